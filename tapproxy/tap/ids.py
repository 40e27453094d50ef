"""Ids: of records, sortable by time; of requests and traces, for --correlate. Unique without a registry."""

from __future__ import annotations

import os
import random
from typing import Final

_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [first + second for first in _CROCKFORD for second in _CROCKFORD]
# The version (4) and the variant (binary 10) of a UUID.
_UUID_FIXED: Final = 0x4 << 76 | 0x8 << 60
_UUID_FREE: Final = ~(0xF << 76 | 0xC << 60)
# Ids must not meet, and need not be secret: one seed from the system serves a process.
_chance: Final = random.Random(os.urandom(32))


def uuid4() -> str:
    """A random UUID, version 4 (RFC 9562), in lower case."""
    digits = f"{_chance.getrandbits(128) & _UUID_FREE | _UUID_FIXED:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def trace_parent() -> str:
    """A new trace of W3C's Trace Context, sampled: an engine that traces records the request."""
    # Zero names none.
    return f"00-{_chance.getrandbits(128) or 1:032x}-{_chance.getrandbits(64) or 1:016x}-01"


def coin() -> bool:
    """Heads or tails."""
    return _chance.getrandbits(1) == 1


def ulid(unix_ms: int) -> str:
    """A sortable id: 48 bits of time, 80 of chance, in Crockford's base 32 (26 characters)."""
    number = (unix_ms << 80) | _chance.getrandbits(80)
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(120, -1, -10)])
