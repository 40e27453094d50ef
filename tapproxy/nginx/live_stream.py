"""One stream of a live check, judged from both sides' stamps.

Rules here: the thresholds by which a stream counts as held are those of the measurements that the predictions rest on.
Both sides' stamps are of one clock: the engine's just before its write, the client's of the read that brought an
event's end (the kernel's where it gives one). Unknown is None.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from tapproxy.nginx.live_engine import DONE, Seen
from tapproxy.wire.fetch import Fetched

HELD_MAX_MS: Final = 12.0
HELD_P50_MS: Final = 8.0
HELD_COALESCED: Final = 0.1
LATE_HEADER_SHARE: Final = 0.5
_NUMBER: Final = re.compile(rb'"n":(\d{7}),"pad":"[^"]*"\}\n\n')


@dataclass(frozen=True, slots=True)
class Stream:
    """What came of one stream."""

    status: int | None
    error: str | None
    complete: bool
    hold_ms: tuple[float, ...]
    coalesced: float | None
    header_delay_ms: float | None
    ttft_added_ms: float | None
    encoding: str | None
    seen: Seen

    @property
    def hold_p50_ms(self) -> float | None:
        """The median hold."""
        return median(self.hold_ms) if self.hold_ms else None

    @property
    def hold_max_ms(self) -> float | None:
        """The longest hold."""
        return max(self.hold_ms, default=None)

    @property
    def cut(self) -> bool:
        """Whether an answer began and was broken off."""
        return self.status == 200 and not self.complete and not self.timed_out

    @property
    def timed_out(self) -> bool:
        """Whether we gave up waiting, long after the engine had sent all."""
        return self.error is not None and self.error.startswith("timeout")

    @property
    def held(self) -> bool:
        """The corpus' criterion."""
        if not self.hold_ms or self.coalesced is None:
            return False
        return max(self.hold_ms) >= HELD_MAX_MS and (
            self.coalesced >= HELD_COALESCED or median(self.hold_ms) >= HELD_P50_MS
        )

    @property
    def streaming(self) -> str:
        """The contract's word for it."""
        if self.status == 200 and self.timed_out and self.seen.finished:
            return "held"
        if self.status != 200 or not self.complete or self.seen.method != "POST":
            return "fails"
        if self.held:
            return "held"
        # A header that is not sent at once leaves with the first event.
        first_ms = self.seen.answer.events[0][0]
        late = self.header_delay_ms is not None and self.header_delay_ms >= first_ms * LATE_HEADER_SHARE
        return "late_header" if late else "streams"

    def to_dict(self) -> dict[str, Any]:
        """The keys that every stream of the result has."""
        return {
            "streaming": self.streaming,
            "hold_ms": {"p50": rounded(self.hold_p50_ms), "max": rounded(self.hold_max_ms)},
            "header_delay_ms": rounded(self.header_delay_ms),
            "ttft_added_ms": rounded(self.ttft_added_ms),
            "coalesced": rounded(self.coalesced),
            "content_encoding": self.encoding,
            "status": self.status,
            "error": self.error,
        }


def rounded(value: float | None) -> float | None:
    """To the microsecond, where the value is in ms."""
    return None if value is None else round(value, 3)


def _arrivals(fetched: Fetched, gzip: bool) -> Iterator[tuple[int, int, int]]:
    """(event, when its end arrived, in which read), with what compressed it undone; and -1 for the end's mark."""
    unzip = zlib.decompressobj(wbits=47) if gzip else None
    text = b""
    at = 0
    done = False
    for index, read in enumerate(fetched.reads):
        try:
            text += read.body if unzip is None else unzip.decompress(read.body)
        except zlib.error:
            return
        for match in _NUMBER.finditer(text, at):
            at = match.end()
            yield int(match[1]), read.arrived_ns, index
        if not done and text.find(DONE, at) >= 0:
            done = True
            yield -1, read.arrived_ns, index


def stream_of(fetched: Fetched, seen: Seen, *, one_way_ms: float = 0.0) -> Stream:
    """The stream from both sides' stamps. ``one_way_ms``: the link's share of each hold."""
    encoding = next((value for name, value in fetched.headers if name.lower() == b"content-encoding"), None)
    arrivals = list(_arrivals(fetched, encoding == b"gzip"))
    complete = fetched.error is None and any(number == -1 for number, _, _ in arrivals)
    events = [one for one in arrivals if 0 <= one[0] < len(seen.sent_ns)]
    # A kernel stamp is converted wall time: of two stamps within a microsecond either may come first.
    hold_ms = [max(0.0, (at_ns - seen.sent_ns[number]) / 1e6 - one_way_ms) for number, at_ns, _ in events]
    first = next((hold for hold, one in zip(hold_ms, events, strict=True) if one[0] == 0), None)
    upload_end_ns = fetched.write_end_ns or fetched.write_start_ns
    lag_ms = _between_ms(upload_end_ns, seen.complete_ns)
    header_ms = _between_ms(seen.header_ns, fetched.head_ns)
    reads = len({index for _, _, index in events})
    return Stream(
        status=fetched.status,
        error=fetched.error,
        complete=complete,
        hold_ms=tuple(hold_ms),
        coalesced=(len(events) - reads) / (len(events) - 1) if len(events) > 1 else None,
        header_delay_ms=None if header_ms is None else max(0.0, header_ms - one_way_ms),
        ttft_added_ms=None if lag_ms is None or first is None else max(0.0, lag_ms - one_way_ms) + first,
        encoding=None if encoding is None else encoding.decode("latin-1"),
        seen=seen,
    )


def _between_ms(before_ns: int | None, after_ns: int | None) -> float | None:
    return None if before_ns is None or after_ns is None else (after_ns - before_ns) / 1e6
