"""Changes to a configuration, as small as they can be, and the unified diff that makes them.

Rules here: an edit touches only the bytes it names; indentation and line ends are the file's own. A patch is in the
form of git (``a/``, ``b/``), so ``patch -p1`` and ``git apply`` take it; absolute paths lose their slash: apply those
from ``/``. A file that is not valid UTF-8 gets none, since its bytes could not be kept.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.lines import line_starts, secret_lines
from tapproxy.nginx.source import Directive

_LONG_LINE = 2000
_CONTEXT = 3


@dataclass(frozen=True, slots=True)
class Edit:
    """Put ``text`` in place of what stands between the offsets ``start`` and ``end`` of ``file``."""

    file: str
    start: int
    end: int
    text: str


def replace_argument(one: Directive, index: int, value: str) -> Edit:
    """Another value for one argument."""
    start, end = one.arg_spans[index]
    return Edit(one.file, start, end, value)


def remove_argument(source: str, one: Directive, index: int) -> Edit:
    """One argument less; the whole statement where it was the only one."""
    if len(one.args) == 1:
        return remove(source, one)
    start, end = one.arg_spans[index]
    while source[start - 1] in " \t\r\n":
        start -= 1
    return Edit(one.file, start, end, "")


def remove(source: str, one: Directive) -> Edit:
    """One statement less, with its line where it has the line to itself."""
    start, end = _line_start(source, one.start), one.end
    newline = source.find("\n", end)
    rest = source[end : len(source) if newline < 0 else newline]
    if source[start : one.start].strip() or rest.strip():
        return Edit(one.file, one.start, one.end, "")
    return Edit(one.file, start, len(source) if newline < 0 else newline + 1, "")


def insert_after(source: str, one: Directive, *statements: str) -> Edit:
    """New statements behind one: on lines of their own where it has one, else on its line."""
    start = _line_start(source, one.start)
    indent = source[start : one.start]
    at = one.end if one.close is None else one.close
    return _insert(source, one.file, at, None if indent.strip() else indent, statements)


def insert_first(source: str, block: Directive, *statements: str) -> Edit:
    """New statements at the top of a block: right below its opening line, indented like what follows."""
    newline = source.find("\n", block.end)
    following = re.match(r"(?:[ \t\r]*\n)*([ \t]*)", source[newline + 1 :]) if newline >= 0 else None
    indent = None
    if following is not None:
        indent = following[1]
        if source[newline + 1 + following.end() :][:1] in ("}", ""):
            own = source[_line_start(source, block.start) : block.start]
            indent = own + "    " if not own.strip() else None
    return _insert(source, block.file, block.end, indent, statements)


def _insert(source: str, file: str, at: int, indent: str | None, statements: tuple[str, ...]) -> Edit:
    newline = source.find("\n", at)
    rest = source[at:newline].strip()
    # A comment may follow on the line; a further statement or a brace may not.
    if indent is None or newline < 0 or (rest and not rest.startswith("#")):
        return Edit(file, at, at, "".join(f" {one}" for one in statements))
    ending = "\r\n" if source[newline - 1] == "\r" else "\n"
    return Edit(file, newline + 1, newline + 1, "".join(f"{indent}{one}{ending}" for one in statements))


def _line_start(source: str, at: int) -> int:
    return source.rfind("\n", 0, at) + 1


def apply(source: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; equal edits count once, of two that overlap the first in the text wins."""
    pieces: list[str] = []
    at = 0
    for edit in sorted(dict.fromkeys(edits), key=lambda one: (one.start, one.end)):
        if edit.start < at:
            continue
        pieces += [source[at : edit.start], edit.text]
        at = edit.end
    return "".join([*pieces, source[at:]])


def _by_file(edits: Iterable[Edit]) -> list[tuple[str, list[Edit]]]:
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    return sorted(by_file.items())


def applied(texts: Mapping[str, str], edits: Iterable[Edit]) -> dict[str, str]:
    """The texts of all files with the edits made; one whose bytes could not be kept stays as it is on disk."""
    changed = {file: apply(texts[file], own) for file, own in _by_file(edits)}
    return {file: changed.get(file, text) for file, text in texts.items() if "\ufffd" not in text}


def unified(texts: Mapping[str, str], edits: Iterable[Edit], *, with_keys: bool = False) -> str | None:
    """The patch over all files that the edits touch, or None where there is nothing that can be given.

    ``with_keys``: also where a changed line itself holds a credential or is very long; for the patch that was asked
    for, not for logs.
    """
    parts: list[str] = []
    for file, own in _by_file(edits):
        before = texts[file]
        if "\ufffd" in before:
            continue
        name, changes = _patch_name(file), _changes(before, own)
        secret = secret_lines(before)
        if not with_keys and any(secret & set(range(one.first + 1, one.last + 1)) for one in changes):
            continue  # what a finding shows ends up in logs and CI
        near = {line for one in changes for line in range(one.first + 1 - _CONTEXT, one.last + 1 + _CONTEXT)}
        changed = {line for one in changes for line in range(one.first + 1, one.last + 1)}
        diff = _diff(before, changes, name, context=0 if secret & (near - changed) else _CONTEXT)
        if any(line.startswith(" ") and len(line) > _LONG_LINE for line in diff):
            diff = _diff(before, changes, name, context=0)
        if not with_keys and any(len(line) > _LONG_LINE for line in diff[2:]):
            continue
        parts += diff
    return "".join(parts) or None


@dataclass(frozen=True, slots=True)
class _Change:
    """Lines ``first`` to ``last`` (from 0, ``last`` not included) of a file and what stands there afterwards."""

    first: int
    last: int
    after: tuple[str, ...]


def _changes(before: str, edits: Iterable[Edit]) -> list[_Change]:
    """The edits as changes of whole lines, as few as there are: what difflib would search for is known here."""
    starts = line_starts(before)
    groups: list[tuple[int, int, list[Edit]]] = []
    for edit in sorted(dict.fromkeys(edits), key=lambda one: (one.start, one.end)):
        first = bisect_right(starts, edit.start) - 1
        # An edit that ends where a line begins leaves that line alone, unless it is all in that line.
        last = max(first + 1, bisect_left(starts, edit.end))
        if groups and first < groups[-1][1]:
            groups[-1] = (groups[-1][0], max(last, groups[-1][1]), [*groups[-1][2], edit])
        else:
            groups.append((first, last, [edit]))
    found = []
    for first, last, own in groups:
        start, end = starts[first], starts[last] if last < len(starts) else len(before)
        old = before[start:end]
        shifted = [Edit(one.file, one.start - start, one.end - start, one.text) for one in own]
        was, now = _lines(old), _lines(apply(old, shifted))
        head = 0
        while head < min(len(was), len(now)) and was[head] == now[head]:
            head += 1
        tail = 0
        while tail < min(len(was), len(now)) - head and was[-1 - tail] == now[-1 - tail]:
            tail += 1
        if was != now:
            found.append(_Change(first + head, first + len(was) - tail, tuple(now[head : len(now) - tail])))
    return found


def _diff(before: str, changes: list[_Change], name: str, *, context: int) -> list[str]:
    if not changes:
        return []
    starts = line_starts(before)
    count = len(starts) - (starts[-1] == len(before))

    def lines(first: int, last: int) -> list[str]:
        return (
            _lines(before[starts[first] : starts[last] if last < len(starts) else len(before)]) if first < last else []
        )

    hunks: list[list[_Change]] = []
    for change in changes:
        if hunks and change.first - hunks[-1][-1].last <= 2 * context:
            hunks[-1].append(change)
        else:
            hunks.append([change])
    diff = [f"--- a/{name}\n", f"+++ b/{name}\n"]
    grown = 0
    for hunk in hunks:
        first, last = max(0, hunk[0].first - context), min(count, hunk[-1].last + context)
        body: list[str] = []
        at = first
        for change in hunk:
            body += [" " + line for line in lines(at, change.first)]
            body += ["-" + line for line in lines(change.first, change.last)]
            body += ["+" + line for line in change.after]
            at = change.last
        body += [" " + line for line in lines(at, last)]
        old = last - first
        new = old + sum(len(change.after) - (change.last - change.first) for change in hunk)
        diff.append(f"@@ -{_range(first, old)} +{_range(first + grown, new)} @@\n")
        diff += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in body]
        grown += new - old
    return diff


def _range(first: int, length: int) -> str:
    # An empty range stands behind the line before it.
    return f"{first + 1}" if length == 1 else f"{first + 1 if length else first},{length}"


def _lines(text: str) -> list[str]:
    # Not splitlines(): a form feed or U+2028 ends no line for patch.
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _patch_name(file: str) -> str:
    path = Path(file)
    if ".." in path.parts:
        path = path.resolve()
    return path.as_posix().lstrip("/")


def write(texts: Mapping[str, str], edits: Iterable[Edit]) -> list[tuple[str, str]]:
    """Make the edits in the files themselves; each one's former content is kept beside it.

    Returns each changed file with its backup. A symbolic link keeps its place, the file it leads to is changed, and
    its mode is kept. Raises ConfigError, before anything is changed, for a file that has other content than was
    checked or whose bytes cannot be kept, and for one that cannot be written.
    """
    planned: list[tuple[str, Path, bytes, bytes]] = []
    for file, own in _by_file(edits):
        path = Path(file).resolve()
        before, after = texts[file].encode("utf-8"), apply(texts[file], own).encode("utf-8")
        try:
            found = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read again: {error.strerror}; nothing was changed") from None
        if found != before:
            raise ConfigError(f"{file} is not valid UTF-8, or has changed since it was read; nothing was changed")
        if after != before:
            planned.append((file, path, before, after))
    done: list[tuple[str, str]] = []
    for file, path, before, after in planned:
        backup = _free_backup(path)
        try:
            backup.write_bytes(before)
            shutil.copymode(path, backup)
            _replace(path, after)
        except OSError as error:
            changed = f"; already changed: {', '.join(name for name, _ in done)}" if done else ""
            raise ConfigError(f"{file} cannot be written: {error.strerror}{changed}") from None
        done.append((file, str(backup)))
    return done


def _free_backup(path: Path) -> Path:
    number = 0
    while True:
        # Not *.conf at the end: a glob include must not read it.
        candidate = path.with_name(f"{path.name}.orig{f'.{number}' if number else ''}")
        if not candidate.exists() and not candidate.is_symlink():
            return candidate
        number += 1


def _replace(path: Path, content: bytes) -> None:
    """As one step, so that a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        status = path.stat()
        temporary.chmod(status.st_mode & 0o7777)
        if os.geteuid() == 0:
            os.chown(temporary, status.st_uid, status.st_gid)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
