"""One module a command: puts parts together."""
