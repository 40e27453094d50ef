"""An engine with known truth. Imports nothing of ours (scenarios aside)."""
