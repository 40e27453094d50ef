"""The configuration that a live check runs: generated from the effective settings, never a user's text.

Rules here: one `location /` for each nginx on the way of the request, with the settings of ``live_settings`` as that
location has them in the user's files; proxy_pass leads to the next of these servers or to the measuring engine. All
ports are placeholders until they are known; no path is named but those in the private directory, and they are relative.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tapproxy.nginx.live_left_out import because
from tapproxy.nginx.live_settings import (
    ROWS,
    UPSTREAM_ROWS,
    Facts,
    Level,
    NotRunError,
    Row,
    shown,
    time_ms,
)
from tapproxy.nginx.model import Tree
from tapproxy.nginx.predict import Hop
from tapproxy.nginx.servers import Servers, in_use
from tapproxy.nginx.source import CREDENTIAL, Directive

# What a `listen` of the generated file accepts, by the kind of client that uses it.
LISTEN = {"http1": "", "tls_http1": " ssl", "h2": " ssl http2", "h2c": " http2"}
_CONNECTION_WORDS = frozenset({"", "close", "keep-alive", "upgrade"})
_MAX_REPORTED = 200
_HEAD = """\
worker_processes 1;
error_log error.log warn;
events { worker_connections 512; }
http {
    access_log off;
    client_body_temp_path tmp/client_body;
    proxy_temp_path tmp/proxy;
    fastcgi_temp_path tmp/fastcgi;
    uwsgi_temp_path tmp/uwsgi;
    scgi_temp_path tmp/scgi;
"""


class NotMeasurableError(Exception):
    """Nothing of this path can be run; the text says why, ``at`` the statement that is at fault, where one is."""

    def __init__(self, why: str, at: Directive | None = None) -> None:
        super().__init__(why)
        self.not_run = [] if at is None else [_not_run(at, why)]


@dataclass(frozen=True, slots=True, order=True)
class NotRun:
    """A statement of the user's file that bears, or may bear, on a stream and was left out."""

    file: str
    line: int
    directive: str
    because: str

    def to_dict(self) -> dict[str, str | int]:
        """For the JSON result."""
        return {"directive": self.directive, "file": self.file, "line": self.line, "because": self.because}


@dataclass(slots=True)
class Plan:
    """What is run for one path: the text with its places for ports, and what the text leaves out.

    ``listens``: the kind of listener → its place; ``engine_tls``: the engine is asked over TLS.
    """

    text: str = ""
    listens: dict[str, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    engine_tls: bool = False
    read_timeout_ms: int | None = None
    not_run: list[NotRun] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)

    def filled(self, ports: dict[str, int], host: str = "127.0.0.1") -> str:
        """The text that nginx is given. ``host``: what the outermost server listens on."""
        text = self.text.replace("@HOST@", host)
        return re.sub(r"@(\w+)@", lambda place: str(ports[place[1]]), text)


def plan(tree: Tree, hop: Hop, kinds: tuple[str, ...]) -> Plan:
    """What to run for one path. Raises NotMeasurableError where nginx proxies nothing there."""
    made = Plan()
    hops = list(_chain(hop))
    servers = Servers(tree)
    blocks: list[str] = []
    for number, one in enumerate(hops):
        if one.route.failure is not None or one.route.proxy_pass is None:
            why = f"nothing is proxied here: {one.route.failure or 'no proxy_pass'}"
            raise NotMeasurableError(why, one.route.scope.levels[0])
        tls_behind = _asked_by_tls(one)
        if number + 1 < len(hops):
            place = f"INNER{number + 1}"
        else:
            place, made.engine_tls = "ENGINE", tls_behind
        made.places.append(place)
        listens = _listens(made, number, kinds, tls=number > 0 and _asked_by_tls(hops[number - 1]))
        blocks += _Writer(servers, one, made, number).lines(listens, place, tls_behind)
    made.text = _HEAD + "".join(f"    {line}\n" for line in blocks) + "}\n"
    made.not_run += outside_http(tree)
    made.not_run = sorted(set(made.not_run))[:_MAX_REPORTED]
    return made


def _chain(hop: Hop | None) -> Iterator[Hop]:
    while hop is not None:
        yield hop
        hop = hop.inner


def _asked_by_tls(hop: Hop) -> bool:
    """Whether what stands behind this nginx is."""
    return hop.route.target is not None and hop.route.target.scheme == "https"


def _listens(made: Plan, number: int, kinds: tuple[str, ...], *, tls: bool) -> list[str]:
    if number:
        return [f"127.0.0.1:@INNER{number}@{' ssl' if tls else ''}"]
    for kind in kinds:
        place = f"LISTEN_{kind.upper()}"
        made.listens[kind] = place
        made.places.append(place)
    return [f"@HOST@:@{place}@{LISTEN[kind]}" for kind, place in made.listens.items()]


def outside_http(tree: Tree) -> Iterator[NotRun]:
    """What stands beside the http block and would bear on a stream."""
    inner = (one for level in tree.root if level.name == "events" for one in level.block or ())
    for one in [*tree.root, *inner]:
        why = because(one.name, one.args, replicas=1)
        if one.name == "stream" and tree.http is None:
            why = "its servers pass bytes on as they come; only http is run"
        if why is not None:
            yield _not_run(one, why)


def _not_run(one: Directive, why: str) -> NotRun:
    text = one.text if len(one.text) <= 200 else one.text[:200] + "…"
    if CREDENTIAL.search(" ".join((one.name, *one.args))):
        text = f"{one.name} (hidden);"
    return NotRun(one.file, one.line, text, why)


class _Writer:
    """One server of the generated file, from one hop."""

    def __init__(self, servers: Servers, hop: Hop, made: Plan, number: int) -> None:
        self.hop = hop
        self.made = made
        self.number = number
        self.maps = servers.maps
        self.pool = servers.upstream_block(hop.route.target.host) if hop.route.target else None
        self.replicas = in_use(self.pool)
        content_type = hop.upstream.content_type.lower()
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,60}/[a-z0-9][a-z0-9.+-]{0,60}", content_type):
            raise NotMeasurableError(f"the content type {shown(content_type)} is not one that is run")
        self.facts = Facts(content_type, self._connection)

    def lines(self, listens: list[str], place: str, tls_behind: bool) -> Iterator[str]:
        """The upstream block, where there is one, and the server."""
        self._left_out()
        settings = list(self._settings())
        scheme = "https" if tls_behind else "http"
        target = f"{scheme}://127.0.0.1:@{place}@"
        if self.pool is not None:
            target = f"{scheme}://pool{self.number}"
            yield f"upstream pool{self.number} {{"
            yield f"    server 127.0.0.1:@{place}@;"
            yield from (f"    {line}" for line in self._upstream_settings())
            yield "}"
        yield "server {"
        yield from (f"    listen {one};" for one in listens)
        if any(" ssl" in one for one in listens):
            yield "    ssl_certificate cert.pem;"
            yield "    ssl_certificate_key key.pem;"
        yield from (f"    {line}" for level, line in settings if level == "server")
        yield "    location / {"
        yield from (f"        {line}" for level, line in settings if level == "location")
        yield f"        proxy_pass {target};"
        yield "    }"
        yield "}"

    def _settings(self) -> Iterator[tuple[Level, str]]:
        scope = self.hop.route.scope
        for name, row in ROWS.items():
            if row.level == "upstream":
                continue
            found = scope.statements(name)
            written: list[str] = []
            rate = self.hop.route.variables.get(name) if name == "limit_rate" else None
            if rate is not None:  # `set $limit_rate` puts its value in the place of the directive's
                with contextlib.suppress(NotRunError):
                    written.append(f"{name} {row.read((rate,), self.facts)};")
                found = ()
            for one in found if row.many else found[:1]:
                text = self._value(row, one)
                if text is not None:
                    written.append(f"{name} {text};")
            # A list that is there and holds nothing of effect still replaces the outer level's: so does leaving it out.
            # Of add_header each counts, since all of them are in the header's size.
            yield from ((row.level, line) for line in (written if name == "add_header" else dict.fromkeys(written)))
        with contextlib.suppress(NotRunError):
            timeout_ms = time_ms(scope.setting("proxy_read_timeout").value or "60s")
            self.made.read_timeout_ms = min(timeout_ms, self.made.read_timeout_ms or timeout_ms)

    def _upstream_settings(self) -> Iterator[str]:
        assert self.pool is not None
        for one in self.pool.block or ():
            row = UPSTREAM_ROWS.get(one.name)
            if row is not None:
                text = self._value(row, one)
                if text is not None:
                    yield f"{one.name} {text}".rstrip() + ";"
            elif one.name != "server":
                self._consider(one)

    def _value(self, row: Row, one: Directive) -> str | None:
        try:
            return row.read(one.args, self.facts)
        except NotRunError as why:
            self.made.not_run.append(_not_run(one, str(why)))
            return None

    def _left_out(self) -> None:
        for level in self.hop.route.scope.levels:
            for one in level.block or ():
                if one.name not in ROWS:
                    self._consider(one)
        for one in self.replicas[1:]:
            self.made.not_run.append(_not_run(one, "one replica is run, and it does not fail: nothing is retried"))
        for one in self.replicas:
            if any(argument.startswith("max_conns=") for argument in one.args):
                self.made.not_run.append(_not_run(one, "max_conns refuses requests that come together"))

    def _consider(self, one: Directive) -> None:
        why = because(one.name, one.args, replicas=len(self.replicas))
        if why is not None:
            self.made.not_run.append(_not_run(one, why))
        else:
            self.made.ignored.add(one.name)

    def _connection(self, value: str) -> str | None:
        """The Connection header that a request without Upgrade gets: a closed set of words, or None."""
        if value == "$http_connection":
            return ""  # our clients send none
        word = self.hop.route.expand(value, self.maps)
        return word.lower() if word is not None and word.lower() in _CONNECTION_WORDS else None
