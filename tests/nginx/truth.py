"""What a real nginx does to one stream, for each kind of client: the text as it stands, with our engine behind it.

The texts are those of the tests (no user's text is ever run). They name ports as ``@PLACE@``; ``Place`` gives them
numbers, so that a check reads the same text that nginx runs.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.live_engine import Answer, Engine
from tapproxy.nginx.live_stream import Stream
from tapproxy.nginx.live_streams import STANDARD, Door, fresh
from tapproxy.nginx.ports import HeldPorts, bound
from tapproxy.nginx.predict import upstream_of
from tapproxy.nginx.sandbox import Nginx, RunningNginx, make_certificate, private_directory

TARGET = "/v1/chat/completions"
KINDS = ("http1", "tls_http1", "h2")
HEAD = """\
worker_processes 1;
error_log error.log warn;
events { worker_connections 256; }
http {
    access_log off;
    client_body_temp_path tmp/client_body; proxy_temp_path tmp/proxy; fastcgi_temp_path tmp/fastcgi;
    uwsgi_temp_path tmp/uwsgi; scgi_temp_path tmp/scgi;
"""
LISTEN = """\
        listen 127.0.0.1:@HTTP1@;
        listen 127.0.0.1:@TLS_HTTP1@ ssl;
        listen 127.0.0.1:@H2@ ssl http2;
        ssl_certificate cert.pem; ssl_certificate_key key.pem;
"""
_PLACE = re.compile(r"@([A-Z0-9_]+)@")


def whole(*, http: str = "", server: str = "", location: str = "", listen: str = LISTEN) -> str:
    """A configuration with these statements at these levels, in front of the engine."""
    return (
        f"{HEAD}    {http}\n    server {{\n{listen}        {server}\n"
        f"        location / {{ proxy_pass http://127.0.0.1:@ENGINE@; {location} }}\n    }}\n}}\n"
    )


@dataclass
class Place:
    """A text with its ports filled in, in a directory of its own, which ``run`` uses up."""

    text: str
    includes: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Place:
        names = sorted(set(_PLACE.findall(self.text)))
        self._held = HeldPorts(len(names))
        self.ports = dict(zip(names, self._held.numbers, strict=True))
        self.directory = private_directory()
        for name, text in {"nginx.conf": self.text, **self.includes}.items():
            (self.directory / name).write_text(_PLACE.sub(lambda place: str(self.ports[place[1]]), text))
        self.file = self.directory / "nginx.conf"
        self.filled = self.file.read_text()
        for name in self.includes:  # the sandbox runs no include: the same text, in its place
            self.filled = self.filled.replace(f"include {name};", (self.directory / name).read_text().strip())
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def examine(self, nginx: Nginx, profile: str, facts: Iterable[str] = ()) -> Examination:
        """The check of this text."""
        return examine(
            [self.file],
            nginx_version=nginx.version,
            paths=[TARGET],
            upstream=upstream_of(profile, facts),
            build=nginx.build,
        )

    async def run(
        self,
        nginx: Nginx,
        profile: str,
        kinds: Iterable[str] = KINDS,
        *,
        facts: Iterable[str] = (),
        answer: Answer = STANDARD,
        times: int = 1,
    ) -> dict[str, list[Stream]]:
        """One stream a kind of client, all at once, and ``times`` over."""
        engine = Engine(upstream_of(profile, facts))
        running = RunningNginx()
        cert, _ = make_certificate(self.directory)
        try:
            if "ENGINE" in self.ports:
                await engine.start(bound(self.ports["ENGINE"]))
            await running.start(nginx, self.filled, self.directory, timeout_s=20)
            doors = {kind: self._door(kind, cert) for kind in kinds}
            found: dict[str, list[Stream]] = {kind: [] for kind in doors}
            for _ in range(times):
                streams = await asyncio.gather(*(fresh(engine, door, answer) for door in doors.values()))
                for kind, stream in zip(doors, streams, strict=True):
                    found[kind].append(stream)
            return found
        finally:
            self._held.close()
            await engine.close()
            await running.stop()

    def _door(self, kind: str, cert: Path) -> Door:
        port = self.ports[kind.upper()]
        plain = kind == "http1" or f"127.0.0.1:{port} http2" in self.filled
        return Door(kind, f"{'http' if plain else 'https'}://127.0.0.1:{port}", cert, timeout_s=5.0)
