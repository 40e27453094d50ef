"""Sockets with stamps."""
