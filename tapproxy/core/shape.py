"""Whether a stored record is one: every value of the type, and within the range, that its field has.

Rules here: the table is read off the record's own fields, so that a new field is checked without a word here. A null
where nothing may be unknown is what a writer without that field leaves: the field's default. A value of another type is
a broken line, which its reader skips and counts: one bad line takes no analysis along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, Final, get_args, get_origin, get_type_hints

# Nanoseconds of 146 years; twice as much still fits a JSON integer of 64 bits.
MOST: Final = 1 << 62


class Checked:
    """One field: which types it takes, and of which its entries are where it is a list or a table."""

    def __init__(self, item: Field[Any], hint: Any) -> None:
        self.name = item.name
        kinds = set(get_args(hint)) if type(None) in get_args(hint) else {hint}
        self.nullable = type(None) in kinds
        (kind,) = kinds - {type(None)}
        self.kind: type = get_origin(kind) or kind
        entry = get_args(kind)[-1] if get_args(kind) else None
        entries = set(get_args(entry) or (entry,))
        # A number of seconds may be written as a whole one.
        self.entries = frozenset(entries | {int} if float in entries else entries)
        self._item = item

    def default(self) -> Any:
        """What the field has where nobody gave a value."""
        made = self._item.default_factory
        return self._item.default if made is MISSING else made()

    def fits(self, value: Any) -> bool:
        """Whether it is a value of this field. A whole number only: 1.0 is none, and true is no 1."""
        if value is None:
            return self.nullable
        if self.kind is int:
            return type(value) is int and -MOST < value < MOST
        if self.kind is list:
            return isinstance(value, list) and self._all_fit(value)
        if self.kind is dict:
            return isinstance(value, dict) and self._all_fit(list(value.values()))
        return isinstance(value, self.kind)

    def _all_fit(self, values: list[Any]) -> bool:
        if not set(map(type, values)) <= self.entries:
            return False
        if int not in self.entries:
            return True
        numbers = [value for value in values if value is not None] if None in values else values
        return not numbers or (min(numbers) > -MOST and max(numbers) < MOST)


def table(part: type) -> tuple[Checked, ...]:
    """The fields of a dataclass, to be checked."""
    hints = get_type_hints(part)
    return tuple(Checked(item, hints[item.name]) for item in fields(part))


def repair(part: object, checks: tuple[Checked, ...]) -> Iterator[str]:
    """Names of fields whose value is of none of their types; a null that may not be becomes the default."""
    for check in checks:
        value = getattr(part, check.name)
        if check.fits(value):
            continue
        if value is None and check.default() is not MISSING:
            setattr(part, check.name, check.default())
        else:
            yield check.name
