"""Changes to the text of the demo's nginx configurations: addresses, and lines that make a fault.

Rules here: only texts of our own templates are edited, line by line; nothing parses nginx's language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def with_addresses(text: str, host: str, port: int, to: str, backup: str | None) -> str:
    """``host``: where it listens; ``to``: the upstream's HOST:PORT; ``backup``: the one that is asked after it."""
    number = to.rpartition(":")[2]
    text = text.replace(f"listen 127.0.0.1:{port}", f"listen {host}:{port}")
    for directive in ("server ", "proxy_pass http://"):
        text = text.replace(f"{directive}127.0.0.1:{number};", f"{directive}{to};")
    if backup is not None:
        # max_fails=0: a server that failed once is asked again for the next request.
        text = text.replace(f"server {to};", f"server {backup} max_fails=0;\n        server {to} backup;")
    return text


def with_lines(text: str, http: Sequence[str], location: Sequence[str]) -> str:
    """With these lines in the http block and in the location ``/``: see ``parts.Nginx``."""
    for line in http:
        text = _with_line(text, "http {\n", "    ", line)
    for line in location:
        text = _with_line(text, "location / {\n", " " * 12, line)
    return text


def _with_line(text: str, block: str, indent: str, line: str) -> str:
    words = line.removeprefix("-").rstrip(";").split()
    # A header of another name is another line.
    key = re.escape(" ".join(words[: 2 if words[0] == "proxy_set_header" else 1]))
    held = re.compile(rf"^{indent}{key}\b[^\n]*\n", re.MULTILINE)
    if line.startswith("-"):
        return held.sub("", text)
    if held.search(text):
        return held.sub(lambda _: f"{indent}{line}\n", text, count=1)
    head, found, rest = text.partition(block)
    return head + found + f"{indent}{line}\n" + rest
