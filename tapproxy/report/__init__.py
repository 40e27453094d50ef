"""Formats results for people. Computes nothing."""
