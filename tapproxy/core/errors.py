"""The few errors of our own, split by whose fault it is.

``ConfigError``: the operator's input; the command prints the sentence and exits 2.
``MeasureError``: nothing could be measured (nothing reachable, a port taken); exit 3.
Parser trouble on the data path is data, not an exception.
"""

from __future__ import annotations


class ConfigError(Exception):
    """Wrong usage or unreadable configuration. The message says what was found, expected, and to do."""


class MeasureError(Exception):
    """The measurement could not take place. The message says why and what to do."""
