"""The terminal itself: where results and progress go, what it can show, and text made harmless for it.

Rules here: colour only repeats what a word or a sign says; text that engines, models or headers wrote reaches the
terminal with its control characters taken out. A result that was measured is not lost to a stdout that cannot take
it: what its encoding lacks is written in ASCII, and one that is full or closed is said in a sentence.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich import progress as live
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.text import Text

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.report.figures import at

# Where nobody says how wide it is.
_PIPED_WIDTH: Final = 100
_SIGNS: Final = {
    # verdict: (sign, the same in ASCII, style)
    "healthy": ("✓", "+", "bold green"),
    "degraded": ("✗", "x", "bold red"),
    "not_measured": ("?", "?", "bold yellow"),
}
# Our own signs where the encoding has none, each as wide as itself: columns stay columns.
_ASCII: Final = {"–": "-", "−": "-", "·": "*", "→": ">", "±": "~", "…": ".", "✓": "+", "✗": "x", "│": "|"}
_ERRORS: Final = "tapproxy.ascii"


def stdout() -> Console:
    """Where results go. rich honours NO_COLOR, TERM=dumb and COLUMNS, and writes plain text into a pipe."""
    console = Console()
    said = os.environ.get("COLUMNS", "")
    if not console.is_terminal and not (said.isdecimal() and int(said) > 0):
        console.width = _PIPED_WIDTH
    return console


def refuse_unwritable(flag: str, target: Path | str | None) -> None:
    """Says before a measurement, not after it, that its result could not be written. Raises ConfigError."""
    if target is None or str(target) == "-":
        return
    path = Path(target)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {str(target)!r} cannot be written: give a file in a directory that you may write")


@contextmanager
def writing(kept: str = "") -> Iterator[None]:
    """Around everything that writes to stdout, to its last byte. ``kept``: where the result is found all the same."""
    if sys.stdout is None:
        # Closed by whoever started us (`>&-`): nobody is listening, and nothing else may take its number.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error(_ERRORS, _in_ascii)
        sys.stdout.reconfigure(errors=_ERRORS)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail once more at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise MeasureError(f"stdout cannot be written: {error.strerror}" + (f"; {kept}" if kept else "")) from None


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """An encoding's error handler: the next best characters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


class Progress:
    """One line on stderr while something runs; nothing at all where that is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = live.Progress(
            SpinnerColumn("line" if not can_unicode(self._console) else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("starting", total=None, count="")

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, what: str, done: int, of: int) -> None:
        """``of`` 0: nobody knows how much there is to do."""
        count = f"{done} of {of} requests" if of else ""
        self._live.update(self._task, description=clean(what), completed=done, total=of or None, count=count)


def clean(text: object) -> str:
    """Text someone else wrote, as one line that cannot move a cursor, colour a terminal or hide its order."""
    out = []
    for character in str(text):
        if character in "\n\r\t":
            out.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp"):
            out.append("�")
        else:
            out.append(character)
    return "".join(out)


def can_unicode(console: Console) -> bool:
    """Whether its encoding has the blocks and dots of the pictures."""
    try:
        "█⣿✗".encode(console.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def heading(text: str, note: str = "") -> Text:
    """A block's title, with what is to be known of it beside."""
    return Text.assemble((text, "bold"), ("  " + note if note else "", "dim"))


def verdict_style(result: Mapping[str, Any]) -> str:
    """The colour of a result's verdict; its sign says the same."""
    return _SIGNS.get(str(at(result, "verdict")), _SIGNS["not_measured"])[2]


def verdict_sign(result: Mapping[str, Any], plain: bool) -> str:
    """✓, ✗ or ?; ``plain``: in ASCII."""
    return _SIGNS.get(str(at(result, "verdict")), _SIGNS["not_measured"])[1 if plain else 0]
