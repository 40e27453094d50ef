"""tapproxy: where do streamed tokens wait, and what to change."""

__version__ = "0.1.0"
