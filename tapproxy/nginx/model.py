"""One nginx configuration as nginx would read it: includes followed, settings looked up by level.

Rules here: nothing is executed and nothing but the named files is read. What nginx would refuse is a ``Problem``, not
an exception: the rest is still worth checking (``refusals`` finds the others). What cannot be read at all is a
ConfigError.
"""

from __future__ import annotations

import codecs
import glob
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from tapproxy.core.errors import ConfigError
from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Version
from tapproxy.nginx.source import Directive, SourceError, parse

Context = tuple[str, ...]
Kind = Literal["main", "http", "server", "location"]

# Headers whose inheritance can be told (add_header_inherit).
_MERGED = frozenset({"add_header", "add_trailer"})
_MAX_FILE_BYTES = 8 << 20
_MAX_STATEMENTS = 200_000
_MAX_INCLUDE_DEPTH = 20
_MAX_MATCHES = 5000
_MAX_WILD_DIRECTORIES = 2
# Which file this is, told by what stands at its top level.
_MARKS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("main", frozenset({"http", "events", "stream", "mail"})),
    ("http", frozenset({"server", "upstream", "map", "log_format", "geo", "limit_req_zone", "proxy_cache_path"})),
    ("server", frozenset({"location", "listen", "server_name"})),
    ("location", frozenset({"proxy_pass", "proxy_buffering", "proxy_set_header"})),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something for which nginx refuses to start, in nginx's words. ``unread``: a part of the text is missing."""

    text: str
    file: str
    line: int
    directive: str
    context: str
    unread: bool = False


class Unreadable(ConfigError):
    """A configuration without a meaning: what is wrong, and where. Its text is ``file:line: what``."""

    def __init__(self, file: str, line: int, text: str) -> None:
        super().__init__(f"{file}:{line}: {text}")
        self.file = file
        self.line = line
        self.text = text


@dataclass(slots=True)
class Tree:
    """A configuration with its includes expanded, always from the top (`http`) down.

    ``kind`` says what the file itself was: a fragment is wrapped, and what stands above it is unknown.
    """

    kind: Kind
    file: str
    root: tuple[Directive, ...]
    texts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    empty_includes: list[Directive] = field(default_factory=list)
    # Directives that nobody here knows: of third-party modules, or of a dialect.
    foreign: list[Directive] = field(default_factory=list)

    @property
    def http(self) -> Directive | None:
        """The http block."""
        return next((one for one in self.root if one.name == "http"), None)


def parse_version(text: str) -> Version:
    """``1.31.3`` as (1, 31, 3)."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise ConfigError(f"nginx version {text!r} is not of the form 1.31.3")
    return tuple(int(part) for part in text.split("."))


def read(file: str, *, max_statements: int = _MAX_STATEMENTS, texts: Mapping[str, str] | None = None) -> Tree:
    """Read ``file`` and what it includes. Raises OSError for the file itself, ConfigError for what has no meaning.

    ``texts``: taken for the files so named in place of what is on disk (a patch that is not applied yet).
    """
    loader = _Loader(file, max_statements, texts or {})
    root = tuple(loader.expand(loader.statements(file), (), ()))
    names = {one.name for one in root}
    kind: Kind = next((kind for kind, marks in _MARKS if names & marks), "main")
    root = _wrapped(root, kind, file)
    return Tree(kind, file, root, loader.texts, loader.problems, loader.empty_includes)


def _wrapped(root: tuple[Directive, ...], kind: Kind, file: str) -> tuple[Directive, ...]:
    missing: dict[Kind, tuple[str, ...]] = {
        "main": (),
        "http": ("http",),
        "server": ("server", "http"),
        "location": ("location", "server", "http"),
    }
    for name in missing[kind]:
        arguments = ("/",) if name == "location" else ()
        root = (Directive(name, arguments, file, 1, 0, 0, (), block=root),)
    return root


def walk(block: Directive) -> Iterator[Directive]:
    """Every statement in a block, at any depth."""
    for one in block.block or ():
        yield one
        if one.block is not None and one.name not in known.OPAQUE_BLOCKS:
            yield from walk(one)


def location_name(location: Directive) -> tuple[str, str]:
    """The modifier and the name or pattern of a location; nginx also accepts them glued (``~*\\.php$``)."""
    if len(location.args) >= 2:
        return location.args[0], location.args[1]
    text = location.args[0] if location.args else ""
    for sign in ("^~", "~*", "=", "~"):
        if text.startswith(sign):
            return sign, text[len(sign) :]
    return "", text


class _Loader:
    """Reads files and follows includes. A relative include counts from the directory of nginx.conf, as in nginx."""

    def __init__(self, file: str, max_statements: int, given: Mapping[str, str]) -> None:
        self.max_statements = max_statements
        self.given = given
        self.prefix = _prefix_of(Path(file))
        self.texts: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.empty_includes: list[Directive] = []
        self._parsed: dict[str, tuple[Directive, ...]] = {}
        self._count = 0

    def statements(self, file: str) -> tuple[Directive, ...]:
        if file not in self._parsed:
            self.texts[file] = self.given[file] if file in self.given else _read(file)
            try:
                self._parsed[file] = parse(self.texts[file], file)
            except SourceError as error:
                raise Unreadable(file, error.line, str(error)) from None
        return self._parsed[file]

    def expand(self, block: Iterable[Directive], via: tuple[Directive, ...], context: Context) -> Iterator[Directive]:
        for one in block:
            self._count += 1
            if self._count > self.max_statements:
                raise Unreadable(one.file, one.line, f"more than {self.max_statements} statements after includes")
            if one.name == "include" and len(one.args) == 1 and one.block is None:
                yield from self._included(one, via, context)
            elif one.block is None or one.name in known.OPAQUE_BLOCKS:
                yield replace(one, via=via) if via else one
            else:
                inner = tuple(self.expand(one.block, via, (*context, one.name)))
                yield replace(one, block=inner, via=via)

    def _included(self, include: Directive, via: tuple[Directive, ...], context: Context) -> Iterator[Directive]:
        pattern = str(self.prefix / include.args[0])
        is_glob = glob.has_magic(pattern)
        files = self._matches(include, pattern) if is_glob else [pattern]
        if is_glob and not files:
            self.empty_includes.append(include)
        if len(via) >= _MAX_INCLUDE_DEPTH or any(step is include for step in via):
            self._refuse(include, f'"{include.args[0]}" includes itself, or nests too deep', context)
            return
        for file in files:
            if Path(file).exists() and not Path(file).is_file():
                raise Unreadable(include.file, include.line, f"{file} is not a regular file")
            try:
                statements = self.statements(file)
            except FileNotFoundError:
                self._refuse(include, f'open() "{file}" failed (2: No such file or directory)', context)
            except PermissionError:
                raise Unreadable(include.file, include.line, f"{file} cannot be read: no permission") from None
            except OSError as error:
                raise Unreadable(include.file, include.line, f"{file} cannot be read: {error.strerror}") from None
            else:
                yield from self.expand(statements, (*via, include), context)

    def _matches(self, include: Directive, pattern: str) -> list[str]:
        """The files of a glob in nginx's order; bounded, since one pattern can go through the whole disk."""
        wild = sum(glob.has_magic(part) for part in Path(pattern).parent.parts)
        found = list(islice(glob.iglob(pattern), _MAX_MATCHES + 1)) if wild <= _MAX_WILD_DIRECTORIES else []
        if wild > _MAX_WILD_DIRECTORIES or len(found) > _MAX_MATCHES:
            raise Unreadable(include.file, include.line, f"{include.args[0]} matches too many files to be read")
        return sorted(found)

    def _refuse(self, include: Directive, text: str, context: Context) -> None:
        where = " > ".join(context) or "main"
        self.problems.append(Problem(text, include.file, include.line, include.text, where, unread=True))


def _prefix_of(file: Path) -> Path:
    """Where relative includes count from: the nearest directory upwards with an nginx.conf, else the file's own."""
    for directory in file.resolve().parents:
        if (directory / "nginx.conf").is_file():
            # Spelled as the operator spelled it, where that is the file's own directory.
            return file.parent if directory == file.resolve().parent else directory
    return file.parent


def _read(file: str) -> str:
    status = Path(file).stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(file, 1, f"{file} is not a regular file")
    if status.st_size > _MAX_FILE_BYTES:
        raise Unreadable(file, 1, f"{status.st_size} bytes; a configuration over {_MAX_FILE_BYTES} is not read")
    content = Path(file).read_bytes()
    if content.startswith(codecs.BOM_UTF8):
        # nginx takes the mark for letters of the first word: unknown directive (measured on both versions).
        raise Unreadable(file, 1, "begins with a UTF-8 byte order mark, which nginx refuses: save it without")
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise Unreadable(file, line, "has a NUL byte: this is no configuration text")
    return content.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Setting:
    """The value in force, and the statements it comes from (none: the default)."""

    value: str | None
    sources: tuple[Directive, ...] = ()

    @property
    def origin(self) -> str:
        """``default`` or ``file:line``, as the contract wants it."""
        return f"{self.sources[0].file}:{self.sources[0].line}" if self.sources else "default"


@dataclass(frozen=True, slots=True)
class Scope:
    """The blocks a request stands in, innermost first: what nginx merges settings from."""

    levels: tuple[Directive, ...]
    version: Version

    def inside(self, block: Directive) -> Scope:
        """The scope of a block within this one."""
        return Scope((block, *self.levels), self.version)

    def statements(self, name: str) -> tuple[Directive, ...]:
        """All of the nearest level that has any: how nginx inherits, also for lists (all or nothing per level)."""
        if name in _MERGED and self.statements(f"{name}_inherit"):
            return self._merged(name)
        for level in self.levels:
            found = level.named(name)
            if found:
                return found
        return ()

    def _merged(self, name: str) -> tuple[Directive, ...]:
        """add_header where add_header_inherit (since 1.29.3) says that levels add up, or that none is inherited."""
        found: list[Directive] = []
        for index, level in enumerate(self.levels):
            own = level.named(name)
            found += own
            how = Scope(self.levels[index:], self.version).setting(f"{name}_inherit").value
            if how == "off" or (own and how != "merge"):
                break
        return tuple(found)

    def setting(self, name: str) -> Setting:
        """The value in force for a directive of one value or a list of them."""
        found = self.statements(name)
        if not found:
            return Setting(known.default_of(name, self.version))
        if name in known.SINGLE:
            # nginx refuses a second one; the first is what the operator sees taken.
            return Setting(" ".join(found[0].args), found[:1])
        return Setting("; ".join(one.words for one in found), found)

    def words(self, name: str) -> set[str]:
        """All arguments in force for a directive that takes a list, in lower case."""
        return {arg.lower() for one in self.statements(name) for arg in one.args}

    def is_on(self, name: str) -> bool:
        """Whether a flag is on."""
        return (self.setting(name).value or "").lower() == "on"

    @property
    def location(self) -> Directive | None:
        """The innermost location, or None at server level."""
        return next((level for level in self.levels if level.name == "location"), None)

    @property
    def context(self) -> str:
        """``http > server llm.example > location /v1/``, for people."""
        return " > ".join(label(level) for level in reversed(self.levels))


def label(block: Directive) -> str:
    """A block's name for people: with its arguments, a server with its server_name."""
    if block.name == "server":
        names = [arg for one in block.block or () if one.name == "server_name" for arg in one.args]
        return " ".join(["server", *names[:1]])
    return block.text.removesuffix(" {")
