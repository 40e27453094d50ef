"""What a single tap cannot see, and whether anything stands there.

Rules here: a tap alone sees its own side of a proxy and nothing of the other, so that it can find a path ill but never
call it healthy where requests bear the mark of a proxy. Without a mark, health is said of what was seen, and that a
proxy which leaves none would not show is said with it. What lies behind a tap before a proxy is judged in module
behind. Records that do not tell (of an older tap) count as marked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tapproxy.diagnose.view import View, usable_records

# So many requests with a mark, and a proxy stands there; single ones are a client that forwards for somebody.
MARKED_SHARE: Final = 0.05
UNSEEN: Final = ("network.downstream", "proxy")


@dataclass(frozen=True, slots=True)
class Lone:
    """A tap alone: ``marked`` of ``requests`` came through a proxy, as their heads show; None: they do not tell."""

    tap: str
    requests: int
    marked: int | None
    marks: Counter[str]

    @property
    def behind_proxy(self) -> bool:
        return self.marked is None or self.marked >= MARKED_SHARE * self.requests

    @property
    def warning(self) -> str:
        """What is not seen, in a sentence."""
        if self.marked is None:
            return (
                f"{self.tap} stands alone and its records do not tell whether a proxy stands before it: no word on "
                "health; a second tap before the proxy would see it"
            )
        if self.behind_proxy:
            marks = ", ".join(f"{mark} {count}" for mark, count in self.marks.most_common(3))
            return (
                f"{self.tap} stands behind a proxy ({self.marked} of {self.requests} requests: {marks}) and sees "
                "nothing of what that does with the answers: no word on health; a second tap before the proxy "
                "would see it"
            )
        return (
            f"{self.tap} stands alone: what lies between it and the clients was not seen. No request bears the mark of "
            "a proxy; one that leaves none (HAProxy) would not show"
        )


def lone_tap(view: View) -> Lone | None:
    """The tap, where one alone saw the requests and no client's records are there."""
    if view.client or bool(view.outer) == bool(view.inner):
        return None
    records = usable_records(view.inner or view.outer)
    if not records:
        return None
    told = [record.request.proxy_marks for record in records if record.request.proxy_marks is not None]
    counted = Counter(mark for marks in told for mark in marks)
    marked = sum(bool(marks) for marks in told) if told else None
    return Lone(records[0].tap, len(records), marked, counted)
