"""Clocks, kernel receive stamps and TCP_INFO.

Kernel stamps (``SO_TIMESTAMPNS``) are CLOCK_REALTIME; everything else here is CLOCK_MONOTONIC. The offset between the
two is taken from the tightest of a few bracketed readings and renewed by ``Clock.sample``; its error is below half
the bracket. A step of the wall clock between two samples is remembered, since stamps across it mean nothing.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Final, NamedTuple

# Linux, generic numbering (x86-64, aarch64). The control message has the number of the option.
SO_TIMESTAMPNS: Final = 35
TCP_INFO: Final = getattr(socket, "TCP_INFO", 11)
# ioctl: bytes handed to the kernel that the peer has not acknowledged.
SIOCOUTQ: Final = 0x5411
HAS_KERNEL_STAMPS: Final = sys.platform == "linux"
_TIMESPEC: Final = struct.Struct("@qq")
# struct tcp_info of linux/tcp.h, eight bytes of flags, then 32-bit words: rtt, total_retrans; min_rtt, data_segs_in,
# data_segs_out (Linux 4.6); rcv_ooopack (5.4).
_RTT_AND_RETRANS: Final = struct.Struct("=68xI28xI")
_AND_SEGMENTS: Final = struct.Struct("=68xI28xI44xIII")
_WHOLE: Final = struct.Struct("=68xI28xI44xIII64xI")
_NO_SAMPLE: Final = 0xFFFFFFFF
# NTP slews the wall clock by at most 500 ppm: half a millisecond between two samples a second apart.
STEP_NS: Final = 2_000_000


def bracketed_offset_ns(tries: int = 7) -> tuple[int, int]:
    """CLOCK_REALTIME − CLOCK_MONOTONIC, and the width of the bracket it was read in (the error is below half of it)."""
    best_width, best_offset = 1 << 62, 0
    for _ in range(tries):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best_width:
            best_width, best_offset = after - before, wall - (before + after) // 2
    return best_offset, best_width


class Clock:
    """The offset that turns kernel stamps into monotonic time. Call ``sample`` about once a second."""

    __slots__ = ("bracket_ns", "offset_ns", "stepped_at_ns")

    def __init__(self) -> None:
        self.offset_ns, self.bracket_ns = bracketed_offset_ns()
        self.stepped_at_ns: int | None = None

    def sample(self) -> None:
        """Renews the offset; remembers when the wall clock stepped."""
        offset, width = bracketed_offset_ns(3)
        if abs(offset - self.offset_ns) > STEP_NS:
            self.stepped_at_ns = time.monotonic_ns()
        self.offset_ns, self.bracket_ns = offset, width


def enable_kernel_stamps(sock: socket.socket) -> bool:
    """Asks for receive stamps; must come before connect, or the first data has none. False where there are none."""
    if not HAS_KERNEL_STAMPS or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def timespec_ns(data: bytes) -> int:
    """The nanoseconds of a kernel's ``struct timespec`` (what follows it is left alone)."""
    seconds, nanoseconds = _TIMESPEC.unpack_from(data)
    at_ns: int = seconds * 1_000_000_000 + nanoseconds
    return at_ns


class TcpFacts(NamedTuple):
    """What the kernel knows of one connection so far: smoothed and least round trip, segments sent again; segments with
    data sent and received, and of these the ones that came out of their order: one before them was lost, or overtaken.
    """

    rtt_ns: int
    retransmits: int
    min_rtt_ns: int | None
    segments_out: int | None = None
    segments_in: int | None = None
    disordered: int | None = None

    def since(self, before: TcpFacts | None) -> TcpFacts:
        """The same, with what was counted after ``before`` only."""
        if before is None:
            return self
        return TcpFacts(
            self.rtt_ns,
            self.retransmits - before.retransmits,
            self.min_rtt_ns,
            _less(self.segments_out, before.segments_out),
            _less(self.segments_in, before.segments_in),
            _less(self.disordered, before.disordered),
        )


def _less(value: int | None, before: int | None) -> int | None:
    return None if value is None or before is None else value - before


def tcp_facts(sock: socket.socket) -> TcpFacts | None:
    """Reads TCP_INFO; None where the socket is no TCP socket or is gone."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _WHOLE.size)
    except OSError:
        return None
    disordered: int | None = None
    if len(raw) == _WHOLE.size:
        rtt_us, retransmits, min_rtt_us, segments_in, segments_out, disordered = _WHOLE.unpack(raw)
    elif len(raw) >= _AND_SEGMENTS.size:
        rtt_us, retransmits, min_rtt_us, segments_in, segments_out = _AND_SEGMENTS.unpack_from(raw)
    elif len(raw) >= _RTT_AND_RETRANS.size:
        rtt_us, retransmits = _RTT_AND_RETRANS.unpack_from(raw)
        return TcpFacts(rtt_us * 1000, retransmits, None)
    else:
        return None
    min_rtt_ns = None if min_rtt_us == _NO_SAMPLE else min_rtt_us * 1000
    return TcpFacts(rtt_us * 1000, retransmits, min_rtt_ns, segments_out, segments_in, disordered)


def boot_id() -> str | None:
    """Names the run of the kernel whose monotonic clock the stamps are on; None where the platform tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
