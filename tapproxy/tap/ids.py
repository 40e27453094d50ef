"""Ids of records: sortable by time, unique without a registry."""

from __future__ import annotations

import os
import random
from typing import Final

_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [first + second for first in _CROCKFORD for second in _CROCKFORD]
# Ids must not meet, and need not be secret: one seed from the system serves a process.
_chance: Final = random.Random(os.urandom(32))


def ulid(unix_ms: int) -> str:
    """A sortable id: 48 bits of time, 80 of chance, in Crockford's base 32 (26 characters)."""
    number = (unix_ms << 80) | _chance.getrandbits(80)
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(120, -1, -10)])
