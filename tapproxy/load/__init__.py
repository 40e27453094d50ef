"""The same requests over several paths."""
