"""Configurations drawn at random from what bears on a stream, and from the ways by which a request finds its location.

A seed gives the same text for ever. The texts name ports as ``@PLACE@`` (see ``truth``); most of them are valid, and
that nginx refuses one has to be predicted as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.nginx.truth import HEAD, LISTEN

# What may stand in http, server and location alike: the name, and values of which each is as likely.
_SETTINGS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("proxy_buffering", 12, ("on", "off", "off")),
    ("proxy_http_version", 8, ("1.0", "1.1", "1.1")),
    ("proxy_buffers", 2, ("8 4k", "16 8k", "8 1k", "4 256k", "32 256")),
    ("proxy_buffer_size", 2, ("1k", "4k", "8k", "16k", "64")),
    ("proxy_busy_buffers_size", 1, ("4k", "8k", "16k")),
    ("proxy_max_temp_file_size", 1, ("0", "64k")),
    ("gzip", 8, ("on", "on", "off")),
    ("gzip_types", 6, ("text/event-stream", "*", "text/plain application/json", "TEXT/Event-Stream text/css")),
    ("gzip_proxied", 1, ("any", "off", "expired no-cache")),
    ("gzip_min_length", 1, ("20", "1000000")),
    ("gzip_http_version", 2, ("1.0", "1.1")),
    ("gzip_disable", 1, ("msie6", '"MSIE [1-6]\\."', ".")),
    ("gzip_comp_level", 1, ("1", "9")),
    ("limit_rate", 3, ("2k", "6k", "12k", "32k", "1m", "0")),
    ("limit_rate_after", 2, ("1k", "100k", "8m")),
    ("proxy_limit_rate", 2, ("4k", "12k", "64k", "0")),
    ("postpone_output", 6, ("0", "0", "100", "1460", "16k")),
    ("tcp_nodelay", 1, ("on", "off")),
    ("tcp_nopush", 1, ("on", "off")),
    ("sendfile", 1, ("on", "off")),
    ("output_buffers", 1, ("1 4k", "4 64k")),
    ("ssi", 4, ("on", "on", "off")),
    ("ssi_types", 3, ("text/event-stream", "*", "text/plain")),
    ("sub_filter", 1, ("looked-for put-there",)),
    ("sub_filter_types", 1, ("text/event-stream", "*")),
    ("add_after_body", 1, ("/added",)),
    ("add_before_body", 1, ("/added",)),
    ("addition_types", 2, ("*", "text/event-stream")),
    ("charset", 1, ("utf-8", "off")),
    ("chunked_transfer_encoding", 2, ("on", "off")),
    ("proxy_ignore_headers", 3, ("X-Accel-Buffering", "x-accel-buffering Cache-Control", "Cache-Control")),
    ("proxy_pass_header", 3, ("X-Accel-Buffering", "Server")),
    ("proxy_hide_header", 1, ("X-Accel-Buffering", "Content-Type", "X-Powered-By")),
    ("proxy_request_buffering", 1, ("on", "off")),
    ("proxy_pass_request_headers", 1, ("on", "off")),
    ("proxy_read_timeout", 1, ("600s", "5m")),
    ("proxy_ignore_client_abort", 1, ("on", "off")),
    ("client_body_buffer_size", 1, ("1m",)),
)  # fmt: skip
# These may be there more than once; a level that has one has none of the outer levels'.
_LISTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("add_header", 5, (
        "X-Accel-Buffering no", "X-Accel-Buffering yes", "X-Accel-Buffering off", "X-Accel-Buffering no always",
        "X-Other 1", f"X-Long {'a' * 1500}", f"X-Half {'b' * 700}", 'X-Gone ""',
    )),
    ("proxy_set_header", 5, (
        'Connection ""', "Connection close", 'Accept-Encoding ""', "Accept-Encoding gzip",
        "Accept-Encoding $http_accept_encoding", "Host $host", "X-Real-IP $remote_addr", "X-Accel-Buffering no",
        "Connection $connection_mapped",
    )),
)  # fmt: skip
_SERVER_ONLY: tuple[tuple[str, int, tuple[str, ...]], ...] = (("ssl_buffer_size", 2, ("1400", "4k", "16k")),)
# What nginx accepts in an `if` of a location.
_IN_IF = frozenset({"gzip", "limit_rate", "limit_rate_after", "add_header", "sendfile"})
_MAPS = (
    "map $http_upgrade $connection_mapped { default upgrade; '' ''; } "
    "map $request_method $is_post { POST 1; default 0; } "
    "map $uri $streamed { ~^/v1/ yes; default ''; }"
)
# Of modules that not every nginx has: with one of these most texts would only be refused.
_RARE = frozenset({"sub_filter", "sub_filter_types", "add_after_body", "add_before_body", "addition_types"})
_FACTS = (
    "x-accel-buffering=no", "x-accel-buffering=yes", "x-accel-buffering=NO", "content-encoding=gzip",
    "content-encoding=identity", "framing=length",
)  # fmt: skip


@dataclass
class Drawn:
    """One configuration, with the files that it includes and facts about the engine behind it."""

    seed: int
    text: str
    includes: dict[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()


def draw(seed: int) -> Drawn:
    """The configuration of a seed."""
    return _Drawing(seed).whole()


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(f"nginx-{seed}")
        self.includes: dict[str, str] = {}
        self.rare = self.maybe(0.25)

    def maybe(self, share: float) -> bool:
        return self.dice.random() < share

    # -- settings ----------------------------------------------------------------------------------------------

    def settings(self, most: int, only: frozenset[str] | None = None, *, server: bool = False) -> str:
        """Some statements, no name of a single value twice; now and then in a file of their own."""
        rows = [*_SETTINGS, *_LISTS, *(_SERVER_ONLY if server else ())]
        rows = [row for row in rows if (only is None or row[0] in only) and (self.rare or row[0] not in _RARE)]
        lists = {row[0] for row in _LISTS}
        chosen: list[str] = []
        used: set[str] = set()
        for _ in range(self.dice.randint(0, most)):
            name, _, values = self.dice.choices(rows, [row[1] for row in rows])[0]
            line = f"{name} {self.dice.choice(values)};"
            if (name in used and name not in lists) or line in chosen:
                continue
            used.add(name)
            chosen.append(line)
        text = " ".join(chosen)
        if only is None and chosen and self.maybe(0.12):
            name = f"part{len(self.includes)}.inc"
            self.includes[name] = text + "\n"
            return f"include {name};"
        return text

    # -- the ways to a location --------------------------------------------------------------------------------

    def serving(self, target: str, depth: int = 0) -> str:
        """What stands in a location that proxies."""
        parts = [self.settings(6), f"proxy_pass {target};"]
        if self.maybe(0.15):
            condition = self.dice.choice(
                ("$request_method = POST", "$is_post", "$streamed", "$request_method = GET", "$uri ~ ^/v2", "$arg_none")
            )
            parts.insert(self.dice.randint(0, 1), f"if ({condition}) {{ {self.settings(2, _IN_IF)} }}")
        if depth == 0 and self.maybe(0.1):
            parts.append(f"location {self.dice.choice(('/v1/chat', '/v1/chat/completions'))} "
                         f"{{ {self.serving(target, 1)} }}")  # fmt: skip
        return " ".join(parts)

    def locations(self, target: str) -> str:
        ways: Sequence[Callable[[str], str]] = (
            self._plain, self._plain, self._plain, self._decoys, self._rewritten, self._tried, self._paged,
            self._nested,
        )  # fmt: skip
        return self.dice.choice(ways)(target)

    def _place(self) -> str:
        return self.dice.choice(
            ("/", "/v1/", "= /v1/chat/completions", "~ ^/v1/.*completions$", "^~ /v1/chat", "~* /CHAT/")
        )

    def _plain(self, target: str) -> str:
        return f"location {self._place()} {{ {self.serving(target)} }}"

    def _decoys(self, target: str) -> str:
        places = self.dice.sample(
            ("/", "/v1/", "/v1/chat/", "~ ^/v1/.*s$", "~* \\.json$", "^~ /v1/chat/com", "/v2/"), 3
        )
        places = places if any(place not in ("~* \\.json$", "/v2/") for place in places) else ["/", *places]
        return " ".join(f"location {place} {{ {self.serving(target)} }}" for place in places)

    def _rewritten(self, target: str) -> str:
        where = self.dice.choice(("server", "location"))
        flag = self.dice.choice(("last", "break"))
        rewrite = f"rewrite ^/v1/(.*)$ /api/$1 {flag};"
        here = f"location /v1/ {{ {'' if where == 'server' else rewrite} {self.serving(target)} }}"
        return f"{rewrite if where == 'server' else ''} {here} location /api/ {{ {self.serving(target)} }}"

    def _tried(self, target: str) -> str:
        return f"location / {{ {self.settings(3)} try_files $uri @app; }} location @app {{ {self.serving(target, 1)} }}"

    def _paged(self, target: str) -> str:
        return (
            f"location / {{ {self.settings(2)} error_page 418 = @stream; return 418; }} "
            f"location @stream {{ {self.serving(target, 1)} }}"
        )

    def _nested(self, target: str) -> str:
        inner = self.dice.choice(("/v1/chat/", "~ completions", "/v1/models"))
        return (
            f"location /v1/ {{ {self.settings(4)} proxy_pass {target}; "
            f"location {inner} {{ {self.serving(target, 1)} }} }}"
        )

    # -- the whole ---------------------------------------------------------------------------------------------

    def whole(self) -> Drawn:
        hops = self.dice.choices((1, 2, 3), (55, 35, 10))[0]
        servers: list[str] = []
        pools: list[str] = []
        tls = False
        for number in range(hops):
            last = number == hops - 1
            tls_next = not last and self.maybe(0.15)
            address = "127.0.0.1:@ENGINE@" if last else f"127.0.0.1:@INNER{number + 1}@"
            if self.maybe(0.35):
                keep = self.dice.choice(("keepalive 8;", ""))
                pools.append(f"upstream pool{number} {{ server {address}; {keep} }}")
                address = f"pool{number}"
            target = f"{'https' if tls_next else 'http'}://{address}"
            listen = LISTEN if number == 0 else f"        listen 127.0.0.1:@INNER{number}@{' ssl' if tls else ''};\n"
            if number and tls:
                listen += "        ssl_certificate cert.pem; ssl_certificate_key key.pem;\n"
            if number == 0 and self.maybe(0.1):
                listen = listen.replace("@H2@ ssl http2", "@H2@ http2")
            # The text that `addition` adds comes from here.
            added = "location = /added { internal; return 200 added; }"
            servers.append(
                f"    server {{\n{listen}        {self.settings(4, server=True)}\n        {self.locations(target)}\n"
                f"        {added}\n    }}\n"
            )
            tls = tls_next
        facts = ()
        if self.maybe(0.25):
            facts = (self.dice.choice(_FACTS),)
        text = f"{HEAD}    {_MAPS}\n    {' '.join(pools)}\n    {self.settings(5)}\n{''.join(servers)}}}\n"
        return Drawn(self.seed, text, self.includes, facts)
