"""The times that logs of cards have, read without guessing.

Rules here: a form that could be read in two ways (05/04/2024) is not read at all. Where a time has no zone it is local
time, and what it was read as is told with it.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, tzinfo
from typing import Final

_DATE: Final = r"(?P<year>\d{4})[/.-](?P<month>\d{1,2})[/.-](?P<day>\d{1,2})"
_DAY_FIRST: Final = r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})"  # with dots it always is
_CLOCK: Final = r"(?P<hour>\d{1,2}):(?P<minute>\d{2}):(?P<second>\d{2})(?:[.,](?P<fraction>\d{1,9}))?"
_ZONE: Final = r"(?P<zone>Z|[+-]\d{2}:?\d{2})?"
_FORMS: Final = (
    re.compile(rf"{_DATE}[T ]+{_CLOCK} ?{_ZONE}"),
    re.compile(rf"{_DAY_FIRST}[T ]+{_CLOCK} ?{_ZONE}"),
    # As asctime writes it: Wed May  1 12:00:00 2024
    re.compile(rf"[A-Z][a-z]{{2}} (?P<name>[A-Z][a-z]{{2}}) +(?P<day>\d{{1,2}}) {_CLOCK} (?P<year>\d{{4}})(?P<zone>)"),
)
_EPOCH: Final = re.compile(r"(\d{9,10})(?:\.(\d{1,9}))?")
_NAMES: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def read_time(text: str, zone: tzinfo | None = None) -> tuple[int, str] | None:
    """(ns since 1970, how it was read); None where it is no time, or could be two. ``zone`` None: this host's."""
    epoch = _EPOCH.fullmatch(text)
    if epoch is not None:
        return int(epoch[1]) * 1_000_000_000 + _fraction_ns(epoch[2]), "seconds since 1970"
    match = next((found for form in _FORMS if (found := form.fullmatch(text)) is not None), None)
    if match is None:
        return None
    groups = match.groupdict()
    name = groups.get("name")
    try:
        month = int(groups["month"]) if name is None else _NAMES.index(name) + 1
        moment = datetime(
            int(groups["year"]),
            month,
            int(groups["day"]),
            int(groups["hour"]),
            int(groups["minute"]),
            int(groups["second"]),
        )
        own = groups["zone"]
        if own:
            moment -= _offset(own)
            seconds, how = _since_1970(moment), "with the zone that it names"
        elif zone is not None:
            seconds, how = round(moment.replace(tzinfo=zone).timestamp()), f"as the time of zone {zone}"
        else:
            seconds, how = round(moment.timestamp()), "as the local time of the host that read the log"
    except (ValueError, OverflowError, OSError):
        return None
    return seconds * 1_000_000_000 + _fraction_ns(groups["fraction"]), how


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "0").ljust(9, "0"))


def _offset(zone: str) -> timedelta:
    if zone == "Z":
        return timedelta()
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return timedelta(minutes=minutes if zone[0] == "+" else -minutes)


def _since_1970(moment: datetime) -> int:
    return round((moment - datetime(1970, 1, 1)).total_seconds())
