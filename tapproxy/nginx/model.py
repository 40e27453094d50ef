"""One nginx configuration as nginx would read it: includes followed, faults noted, settings looked up by level.

Rules here: nothing is executed and nothing but the named files is read. What nginx would refuse is a ``Problem``, not
an exception: the rest is still worth checking. What cannot be read at all is a ConfigError. The tables are in
``directives``; crossplane's are used for argument counts and contexts (strict=False), and distrusted where stale.
"""

from __future__ import annotations

import glob
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from crossplane.analyzer import DIRECTIVES, analyze, enter_block_ctx
from crossplane.errors import NgxParserDirectiveError

from tapproxy.core.errors import ConfigError
from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Build, Version
from tapproxy.nginx.source import Directive, SourceError, parse

Context = tuple[str, ...]
Kind = Literal["main", "http", "server", "location"]

_MAX_FILE_BYTES = 8 << 20
_MAX_STATEMENTS = 200_000
_MAX_INCLUDE_DEPTH = 20
_TIME = re.compile(r"(\d+(ms|s|m|h|d|w|M|y)? ?)+|\d+")
_SIZE = re.compile(r"\d+[kKmMgG]?")
# Which file this is, told by what stands at its top level.
_MARKS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("main", frozenset({"http", "events", "stream", "mail"})),
    ("http", frozenset({"server", "upstream", "map", "log_format", "geo", "limit_req_zone", "proxy_cache_path"})),
    ("server", frozenset({"location", "listen", "server_name"})),
    ("location", frozenset({"proxy_pass", "proxy_buffering", "proxy_set_header"})),
)
_CONTEXTS: dict[Kind, Context] = {
    "main": (),
    "http": ("http",),
    "server": ("http", "server"),
    "location": ("http", "location"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something for which nginx refuses to start, in nginx's words."""

    text: str
    file: str
    line: int
    directive: str
    context: str


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

    @property
    def http(self) -> Directive | None:
        """The http block."""
        return next((one for one in self.root if one.name == "http"), None)


def parse_version(text: str) -> Version:
    """``1.31.3`` as (1, 31, 3)."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise ConfigError(f"nginx version {text!r} is not of the form 1.31.3")
    return tuple(int(part) for part in text.split("."))


def load(file: str, *, version: Version, build: Build | None = None) -> Tree:
    """Read ``file`` and what it includes, and note what this nginx would refuse."""
    loader = _Loader(file)
    root = tuple(loader.expand(loader.statements(file), (), ()))
    names = {one.name for one in root}
    kind: Kind = next((kind for kind, marks in _MARKS if names & marks), "main")
    tree = Tree(kind, file, root, loader.texts, loader.problems, loader.empty_includes)
    checker = _Checker(tree, version, build)
    checker.block(root, _CONTEXTS[kind])
    if kind == "main":
        checker.top()
    else:
        tree.root = _wrapped(root, kind, file)
    return tree


def _wrapped(root: tuple[Directive, ...], kind: Kind, file: str) -> tuple[Directive, ...]:
    for name, arguments in (("location", ("/",)), ("server", ()), ("http", ())):
        if name == "server" and kind == "http":
            continue
        if name == "location" and kind in ("http", "server"):
            continue
        root = (Directive(name, arguments, file, 1, 0, 0, (), block=root),)
    return root


class _Loader:
    """Reads files and follows includes. A relative include counts from the directory of nginx.conf, as in nginx."""

    def __init__(self, file: str) -> None:
        self.prefix = _prefix_of(Path(file))
        self.texts: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.empty_includes: list[Directive] = []
        self._parsed: dict[str, tuple[Directive, ...]] = {}
        self._count = 0

    def statements(self, file: str) -> tuple[Directive, ...]:
        if file not in self._parsed:
            self.texts[file] = _read(file)
            try:
                self._parsed[file] = parse(self.texts[file], file)
            except SourceError as error:
                raise ConfigError(f"{file}:{error.line}: {error}") from None
        return self._parsed[file]

    def expand(self, block: Iterable[Directive], via: tuple[Directive, ...], context: Context) -> Iterator[Directive]:
        for one in block:
            self._count += 1
            if self._count > _MAX_STATEMENTS:
                raise ConfigError(f"more than {_MAX_STATEMENTS} statements after includes: {one.file}:{one.line}")
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
        files = sorted(glob.glob(pattern)) if is_glob else [pattern]
        if is_glob and not files:
            self.empty_includes.append(include)
        if len(via) >= _MAX_INCLUDE_DEPTH or any(step is include for step in via):
            self._refuse(include, f'"{include.args[0]}" includes itself, or nests too deep', context)
            return
        for file in files:
            try:
                statements = self.statements(file)
            except FileNotFoundError:
                self._refuse(include, f'open() "{file}" failed (2: No such file or directory)', context)
            except PermissionError:
                raise ConfigError(f"{file} cannot be read: no permission (included at "
                                  f"{include.file}:{include.line})") from None  # fmt: skip
            else:
                yield from self.expand(statements, (*via, include), context)

    def _refuse(self, include: Directive, text: str, context: Context) -> None:
        self.problems.append(Problem(text, include.file, include.line, include.text, " > ".join(context) or "main"))


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
        raise ConfigError(f"{file} is not a regular file")
    if status.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{file} has {status.st_size} bytes; a configuration over {_MAX_FILE_BYTES} is not read")
    return Path(file).read_bytes().decode("utf-8", errors="replace")


class _Checker:
    """What ``nginx -t`` would say, as far as it can be told without nginx."""

    def __init__(self, tree: Tree, version: Version, build: Build | None) -> None:
        self.tree = tree
        self.version = version
        self.build = build
        self.loaded = " ".join(one.args[0] for one in tree.root if one.name == "load_module" and one.args)

    def note(self, one: Directive, text: str, context: Context) -> None:
        where = " > ".join(context) or "main"
        self.tree.problems.append(Problem(text, one.file, one.line, one.text, where))

    def top(self) -> None:
        """What only a whole configuration can lack."""
        names = {one.name for one in self.tree.root}
        if "events" not in names:
            self.tree.problems.append(Problem('no "events" section in configuration', self.tree.file, 1, "", "main"))

    def block(self, block: tuple[Directive, ...], context: Context) -> None:
        first: dict[str, Directive] = {}
        for one in block:
            text = self._fault(one, context)
            if text is not None:
                self.note(one, text, context)
            elif one.name in known.SINGLE and one.name in first:
                self._duplicate(first[one.name], one, context)
            first.setdefault(one.name, one)
            if one.block is not None and one.name not in known.OPAQUE_BLOCKS:
                inner = enter_block_ctx({"directive": one.name}, context)
                self.block(one.block, inner)

    def _duplicate(self, first: Directive, second: Directive, context: Context) -> None:
        text = f'"{second.name}" directive is duplicate in {second.file}:{second.line}'
        # The snippet is not at fault, including it here is: other blocks may include it rightly.
        culprit = next((step for step in second.via if step not in first.via), second)
        self.note(culprit, text, context)

    def _fault(self, one: Directive, context: Context) -> str | None:
        for check in (self._unknown, self._grammar, self._value):
            text = check(one, context)
            if text is not None:
                return text
        return None

    def _unknown(self, one: Directive, context: Context) -> str | None:
        name, unknown = one.name, f'unknown directive "{one.name}"'
        if name in known.SINCE and self.version < known.SINCE[name]:
            return f"{unknown} (nginx has it since {_dotted(known.SINCE[name])})"
        if name in known.REMOVED and self.version >= known.REMOVED[name] and context[:1] == ("http",):
            return f"{unknown} (nginx has dropped it in {_dotted(known.REMOVED[name])})"
        module = known.MODULES.get(name)
        if module is not None and self.build is not None and module not in self.build.modules:
            if module not in self.build.dynamic:
                return f"{unknown} (this nginx is built without the module {module})"
            if f"ngx_{module}_module" not in self.loaded:
                return f"{unknown} (the module {module} is not loaded: load_module is missing)"
        if (
            name.startswith(known.CLOSED_FAMILIES)
            and context[:1] == ("http",)
            and name not in DIRECTIVES
            and name not in known.NEWER_NAMES
            and name not in known.SINCE
        ):
            return unknown
        return None

    def _grammar(self, one: Directive, context: Context) -> str | None:
        if one.name.startswith(known.STALE_IN_CROSSPLANE):
            return None
        statement = {"directive": one.name, "line": one.line, "args": list(one.args)}
        try:
            analyze(one.file, statement, ";" if one.block is None else "{", context)
        except NgxParserDirectiveError as error:
            return str(error.strerror)
        return None

    def _value(self, one: Directive, context: Context) -> str | None:
        if context[:1] != ("http",):
            return None
        value = one.args[0] if one.args else ""
        invalid = f'invalid value "{value}" in "{one.name}" directive'
        allowed = known.VALUES.get(one.name)
        if allowed is not None and value not in [v for since, v in allowed if self.version >= since][-1]:
            return invalid
        if one.name == "keepalive" and self.version < known.HTTP11_DEFAULT and not re.fullmatch("[1-9][0-9]*", value):
            return invalid
        if one.name in known.TIMES and not _TIME.fullmatch(value):
            return invalid
        if one.name in known.SIZES and not _SIZE.fullmatch(value):
            return invalid
        return None


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)


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
        for level in self.levels:
            found = tuple(one for one in level.block or () if one.name == name)
            if found:
                return found
        return ()

    def setting(self, name: str) -> Setting:
        """The value in force for a directive of one value or a list of them."""
        found = self.statements(name)
        if not found:
            return Setting(known.default_of(name, self.version))
        if name in known.SINGLE:
            # nginx refuses a second one; the first is what the operator sees taken.
            return Setting(" ".join(found[0].args), found[:1])
        return Setting("; ".join(one.words for one in found), found)

    def is_on(self, name: str) -> bool:
        """Whether a flag is on."""
        return (self.setting(name).value or "").lower() == "on"

    def level_of(self, one: Directive) -> Directive:
        """The block of this scope that a statement stands in."""
        return next(level for level in self.levels if one in (level.block or ()))

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
