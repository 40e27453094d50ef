"""Raw HTTP responses of real engines (tests/data/captures), read by a parser of their own.

None of the package's readers is used here, so that a fault of theirs can't hide in the expectations. Files over
200 KB are stored gzipped; both kinds read alike.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "data" / "captures"


class Response(NamedTuple):
    """One captured response. ``chunks``: sizes of its HTTP chunks, empty where it was not chunked."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[int]
    complete: bool


def names(pattern: str = "**/*.http*") -> list[str]:
    """The captures' names, without ``.http`` and ``.gz``, sorted."""
    return sorted(
        str(path.relative_to(DIRECTORY)).removesuffix(".gz").removesuffix(".http") for path in DIRECTORY.glob(pattern)
    )


def raw(name: str, suffix: str = ".http") -> bytes:
    """The file's bytes, unpacked where it is gzipped."""
    path = DIRECTORY / (name + suffix)
    if path.exists():
        return path.read_bytes()
    return gzip.decompress(path.with_name(path.name + ".gz").read_bytes())


def load(name: str) -> Response:
    """The response of that name."""
    return parse(raw(name), to_head=name.endswith("_head"))


def parse(wire: bytes, *, to_head: bool = False) -> Response:
    """Takes one response apart. ``complete`` says whether the body ended as its framing promised.

    ``to_head``: it answered a HEAD request, so no body follows whatever its fields say.
    """
    head, _, rest = wire.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    status = int(first.split(" ")[1])
    if to_head:
        return Response(status, headers, b"", [], not rest)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body, sizes, complete = _unchunk(rest)
        return Response(status, headers, body, sizes, complete)
    if "content-length" in headers:
        length = int(headers["content-length"])
        return Response(status, headers, rest[:length], [], len(rest) >= length)
    return Response(status, headers, rest, [], True)


def _unchunk(rest: bytes) -> tuple[bytes, list[int], bool]:
    body, position = b"", 0
    sizes: list[int] = []
    while True:
        line_end = rest.find(b"\r\n", position)
        if line_end < 0:
            return body, sizes, False
        size = int(rest[position:line_end].split(b";")[0], 16)
        if size == 0:
            return body, sizes, rest.endswith(b"\r\n\r\n")
        start = line_end + 2
        body += rest[start : start + size]
        if len(rest) < start + size + 2:
            return body, sizes, False
        sizes.append(size)
        position = start + size + 2
