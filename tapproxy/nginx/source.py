"""nginx's configuration text as statements that know where they stand.

Rules here: the grammar is that of ``ngx_conf_read_token`` (nginx 1.22 to 1.31), down to its oddities: ``}`` inside a
word is part of the word, ``#`` starts a comment only where a word could start. crossplane is the oracle of the tests;
it is not used here because its tree has no offsets, which a patch needs, and it loses a block's end after a missing
semicolon. No file access, no meaning: what a directive does is for ``model``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SPACE = " \t\r\n"
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "t": "\t", "r": "\r", "n": "\n"}
_MAX_DEPTH = 100
_LONG_MESSAGE = 400
# Values that are secrets by their own look, under whatever name they stand.
SECRET_VALUE = re.compile(r"\b(?:bearer|basic)\s+[\w+/=.-]{3}|\bsk-\w|://[^/\s;]*@", re.IGNORECASE)
# Statements that may carry a secret, in whichever directive they stand.
CREDENTIAL = re.compile(
    r"authorization|(?:api|access|private|x-auth)[-_ ]?key|x-auth\b|token|secret|passw|passphrase|credential|cookie|"
    + SECRET_VALUE.pattern,
    re.IGNORECASE,
)
HIDDEN = "(hidden)"


class SourceError(Exception):
    """The text cannot be read as nginx configuration: nginx's own wording, and the line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message if len(message) <= _LONG_MESSAGE else f"{message[:_LONG_MESSAGE]} ...")
        self.line = line


@dataclass(frozen=True, slots=True, eq=False)
class Directive:
    """One statement. Compared by identity: two equal lines in a file are two statements.

    ``start`` and ``end`` are offsets into the file's text, from the first letter of the name to just past the ``;`` or
    ``{``; ``close`` is just past the ``}`` of a block. ``arg_spans`` are the arguments' offsets, quotes included.
    ``via`` are the include statements it came through, outermost first, where it is not in the file asked for.
    """

    name: str
    args: tuple[str, ...]
    file: str
    line: int
    start: int
    end: int
    arg_spans: tuple[tuple[int, int], ...]
    block: tuple[Directive, ...] | None = None
    close: int | None = None
    via: tuple[Directive, ...] = ()
    _index: dict[str, tuple[Directive, ...]] | None = field(default=None, init=False, repr=False)

    def named(self, name: str) -> tuple[Directive, ...]:
        """The statements of that name in this block, in the file's order."""
        if self._index is None:
            index: dict[str, tuple[Directive, ...]] = {}
            for one in self.block or ():
                index[one.name] = (*index.get(one.name, ()), one) if one.name in index else (one,)
            # Built at the first question: most blocks are never asked, and some are asked for sixty rules.
            object.__setattr__(self, "_index", index)
        return (self._index or {}).get(name, ())

    @property
    def words(self) -> str:
        """The arguments on one line; a credential is not shown (findings end up in logs and CI)."""
        shown = [HIDDEN if SECRET_VALUE.search(argument) else _quoted(argument) for argument in self.args]
        if len(self.args) > 1 and CREDENTIAL.search(f"{self.name} {self.args[0]}"):
            # `if ($http_authorization = ...)` has it in the third place, a header or variable in the second.
            shown = [*shown[:1], HIDDEN]
        return " ".join(shown)

    @property
    def text(self) -> str:
        """The statement on one line, as one would quote it."""
        words = self.words
        if self.name == "if":  # behind a quoted word the bracket is a word of its own
            words = words.replace(" )", ")") if words.endswith(" )") else words
        return f"{self.name} {words}".rstrip() + (" {" if self.block is not None else ";")


def _quoted(argument: str) -> str:
    if argument and not any(letter in argument for letter in " \t\r\n;\"'"):
        return argument
    return '"' + argument.replace('"', '\\"') + '"'


@dataclass(slots=True)
class _Word:
    text: str
    start: int
    end: int
    line: int


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0
        self.line = 1

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _skip_blank(self) -> None:
        text, at = self.text, self.at
        while at < len(text):
            if text[at] in _SPACE:
                at += 1
            elif text[at] == "#":
                newline = text.find("\n", at)
                at = len(text) if newline < 0 else newline + 1
            else:
                break
        self._advance(at)

    def word(self) -> _Word | None:
        """The next word, or None before ``;``, ``{``, ``}`` or the end of the text."""
        self._skip_blank()
        if self.at >= len(self.text) or self.text[self.at] in ";{}":
            return None
        line, start = self.line, self.at
        if self.text[start] in "\"'":
            value, end = self._quoted_word(start)
        else:
            value, end = self._plain_word(start)
        self._advance(end)
        return _Word(value, start, end, line)

    def _quoted_word(self, start: int) -> tuple[str, int]:
        text, quote, at = self.text, self.text[start], start + 1
        letters: list[str] = []
        while at < len(text) and text[at] != quote:
            taken, at = self._letter(at)
            letters.append(taken)
        if at >= len(text):
            raise SourceError('unexpected end of file, expecting ";" or "}"', self.line)
        after = text[at + 1 : at + 2]
        if after and after not in _SPACE + ";{)":
            raise SourceError(f'unexpected "{after}"', self.line + text.count("\n", start, at))
        return "".join(letters), at + 1

    def _plain_word(self, start: int) -> tuple[str, int]:
        text, at = self.text, start
        letters: list[str] = []
        while at < len(text) and text[at] not in " \t\r\n;":
            # "${" belongs to the word; any other "{" ends it.
            if text[at] == "{" and not (letters and letters[-1] == "$"):
                break
            taken, at = self._letter(at)
            letters.append(taken)
        return "".join(letters), at

    def _letter(self, at: int) -> tuple[str, int]:
        letter = self.text[at]
        if letter != "\\" or at + 1 >= len(self.text):
            return letter, at + 1
        following = self.text[at + 1]
        return _ESCAPES.get(following, letter + following), at + 2

    def block(self, depth: int) -> list[Directive]:
        """The statements up to the end of this block (``depth`` > 0) or of the text."""
        if depth > _MAX_DEPTH:
            raise SourceError(f"blocks nested deeper than {_MAX_DEPTH}", self.line)
        found: list[Directive] = []
        while True:
            words: list[_Word] = []
            while (word := self.word()) is not None:
                words.append(word)
            mark = self.text[self.at : self.at + 1]
            if mark in ("", "}"):
                if words:
                    raise SourceError(_unfinished(words[0].text, mark), words[0].line)
                if mark == "" and depth:
                    raise SourceError('unexpected end of file, expecting "}"', self.line)
                if mark == "}" and not depth:
                    raise SourceError('unexpected "}"', self.line)
                self._advance(self.at + len(mark))
                return found
            if not words:
                raise SourceError(f'unexpected "{mark}"', self.line)
            self._advance(self.at + 1)
            found.append(self._statement(words, mark, depth))

    def _statement(self, words: list[_Word], mark: str, depth: int) -> Directive:
        name, end = words[0], self.at
        block: tuple[Directive, ...] | None = None
        if mark == "{":
            if name.text.endswith("_by_lua_block"):
                self._skip_foreign_block()
                block = ()
            else:
                block = tuple(self.block(depth + 1))
        return Directive(
            name=name.text,
            args=tuple(word.text for word in words[1:]),
            file=self.file,
            line=name.line,
            start=name.start,
            end=end,
            arg_spans=tuple((word.start, word.end) for word in words[1:]),
            block=block,
            close=None if block is None else self.at,
        )

    def _skip_foreign_block(self) -> None:
        """Past the block of another language (OpenResty's Lua): only its braces and strings are understood."""
        text, at, depth, line = self.text, self.at, 1, self.line
        while at < len(text):
            if text.startswith("--", at):
                newline = text.find("\n", at)
                at = len(text) if newline < 0 else newline
            elif text[at] in "\"'":
                quote, at = text[at], at + 1
                while at < len(text) and text[at] != quote:
                    at += 2 if text[at] == "\\" else 1
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
                if depth == 0:
                    self._advance(at + 1)
                    return
            at += 1
        raise SourceError('unexpected end of file, expecting "}"', line)


def _unfinished(name: str, mark: str) -> str:
    if mark == "}":
        return f'directive "{name}" is not terminated by ";"'
    return f'unexpected end of file after "{name}", expecting ";" or "}}"'


def parse(text: str, file: str) -> tuple[Directive, ...]:
    """The statements of one file; raises SourceError."""
    return tuple(_Reader(text, file).block(0))
