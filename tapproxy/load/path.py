"""A path as it is given on the command line, ``NAME=URL``, and the clients that send over it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Final
from urllib.parse import urlsplit

from tapproxy.core.address import parse_upstream, quote
from tapproxy.core.errors import ConfigError
from tapproxy.wire.fetch import Client

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TARGETS: Final = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class Path:
    """One way to reach the engine. ``prefix``: what stands before ``/v1`` in its targets, no slash at its end."""

    name: str
    origin: str
    prefix: str = ""

    @property
    def url(self) -> str:
        return self.origin + self.prefix

    def target(self, what: str) -> str:
        """``/v1/models``, ``/metrics`` … on this path."""
        return self.prefix + what

    def api_target(self, api: str) -> str:
        """Where requests go."""
        return self.target("/v1" + _TARGETS[api])


@dataclass(frozen=True, slots=True)
class Transport:
    """How connections are made, the same on every path."""

    insecure: bool = False
    ca_file: File | None = None
    timeout_s: float | None = 600.0
    fresh: bool = False

    def client(self, path: Path) -> Client:
        """Raises ConfigError where the CA file cannot be read."""
        return Client(
            path.origin, insecure=self.insecure, ca_file=self.ca_file, timeout_s=self.timeout_s, fresh=self.fresh
        )


def parse(texts: Sequence[str]) -> list[Path]:
    """The paths of the command line, the baseline first. Raises ConfigError for what is none."""
    found = [_parse(text) for text in texts]
    names = [path.name for path in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the path {twice} is given twice: give each a name of its own")
    return found


def _parse(text: str) -> Path:
    name, equals, url = text.partition("=")
    if not equals or "/" in name or ":" in name:
        raise ConfigError(f"a path is {quote(_shown(text))}: expected NAME=URL such as direct=http://127.0.0.1:8000")
    if not _NAME.match(name):
        raise ConfigError(
            f"a path is named {quote(name)}: expected 1 to 64 letters, digits, dots, dashes or underscores"
        )
    where = f"the path {name}"
    if "://" not in url or url.startswith("unix:"):
        parse_upstream(url, where)
        return Path(name, url)
    scheme, _, rest = url.partition("://")
    authority, slash, tail = rest.partition("/")
    origin = f"{scheme}://{authority}"
    # Whatever is wrong with the origin is said by its own rules: a user name, a port that is none.
    if "?" in authority or "#" in authority:
        parse_upstream(url, where)
    parse_upstream(origin, where)
    if "?" in tail or "#" in tail or any(ord(c) <= 32 or ord(c) >= 127 for c in tail):
        raise ConfigError(f"{where} has a query, a fragment or a strange character: expected the API's base address")
    # The address that OpenAI's clients are given ends in /v1.
    prefix = urlsplit(url).path.rstrip("/").removesuffix("/v1")
    return Path(name, origin, prefix if slash else "")


def _shown(text: str) -> str:
    """A user name or password in a URL is never shown."""
    return re.sub(r"(://|^)[^/@]*@", r"\1…@", text)
