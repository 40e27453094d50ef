"""Addresses an operator writes: ``HOST:PORT`` to listen on, the URL of an upstream.

Pure: nothing is looked up. Every refusal is a ConfigError of one sentence: what was found, what was expected,
what to do. A user name or password in a URL is never shown.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tapproxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Upstream:
    """One parsed `--upstream`. ``path`` is the UNIX socket's; ``host`` and ``port`` are None with it."""

    scheme: str
    host: str | None = None
    port: int | None = None
    path: str | None = None


_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?\Z")
_WILDCARDS = ("0.0.0.0", "::")
_UNIX_PATH_MAX_BYTES = 107  # sun_path of Linux holds 108 bytes with its NUL


def parse_address(text: str, where: str = "the address") -> tuple[str, int]:
    """``127.0.0.1:9000``, ``[::1]:9000``, ``localhost:0`` → (host, port). Port 0: the system picks one."""
    expected = "expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000"
    if "://" in text:
        raise ConfigError(f"{where} is {quote(_redacted(text))}, a URL: {expected}")
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or not _is_ip(host, 6):
            raise ConfigError(f"{where} is {quote(text)}: {expected}, an IPv6 address in brackets")
        if rest[:1] != ":":
            raise ConfigError(f"{where} is {quote(text)}, which has no port: {expected}")
        port_text = rest[1:]
    else:
        host, colon, port_text = text.rpartition(":")
        if not colon:
            raise ConfigError(f"{where} is {quote(text)}, which has no port: {expected}")
        if not host:
            raise ConfigError(
                f"{where} is {quote(text)}, which has no host: {expected} (0.0.0.0{text} for all interfaces)"
            )
        if ":" in host:
            raise ConfigError(f"{where} is {quote(text)}: write an IPv6 address in brackets, as [::1]:9000")
        if not _is_host(host):
            raise ConfigError(f"{where} is {quote(text)}, whose host is not a name or an address: {expected}")
    return host, _port(port_text, text, where, least=0)


def parse_upstream(url: str, where: str = "--upstream") -> Upstream:
    """``http://HOST[:PORT]``, ``https://HOST[:PORT]`` or ``unix:/PATH``; nothing else may stand in it."""
    expected = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"
    if url.startswith("unix:"):
        return _unix_upstream(url, where)
    shown = quote(_redacted(url))
    if "@" in url:
        base = _redacted(url).split("/")[0] if "://" not in url else "/".join(_redacted(url).split("/")[:3])
        raise ConfigError(
            f"{where} holds a user name or password: write {quote(base)}, clients send their own credentials"
        )
    if "://" not in url:
        advice = f": write http://{url}" if _looks_like_address(url) else f": {expected}"
        raise ConfigError(f"{where} is {shown}, which has no scheme{advice}")
    if any(ord(c) <= 32 or ord(c) >= 127 or c == "\\" for c in url):
        raise ConfigError(f"{where} is {shown}, which holds a space, a backslash or a non-ASCII character: {expected}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{where} is {shown}, which is not a URL: {expected}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{where} is {shown}, whose scheme is {quote(parts.scheme)}: {expected}")
    return _http_upstream(url, parts, shown, where)


def _http_upstream(url: str, parts: SplitResult, shown: str, where: str) -> Upstream:
    authority = parts.netloc
    base = f"{parts.scheme}://{authority}"
    if parts.path not in ("", "/"):
        raise ConfigError(f"{where} is {shown}, which has a path: requests keep their own path, so write {quote(base)}")
    if "?" in url or "#" in url:
        raise ConfigError(f"{where} is {shown}, which has a query or fragment: write {quote(base)}")
    if authority.startswith("["):
        host, _, rest = authority[1:].partition("]")
        good = _is_ip(host, 6) and (rest == "" or rest[0] == ":")
        port_text = rest[1:] if rest else None
    else:
        host, colon, after = authority.partition(":")
        good = _is_host(host)
        port_text = after if colon else None
    if not good:
        raise ConfigError(
            f"{where} is {shown}, whose host is not a name or an address: expected {parts.scheme}://HOST:PORT"
        )
    default = 443 if parts.scheme == "https" else 80
    port = default if port_text is None else _port(port_text, _redacted(url), where, least=1)
    return Upstream(parts.scheme, host, port)


def _unix_upstream(url: str, where: str) -> Upstream:
    path = url.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{where} is {quote(url)}: expected the absolute path of a socket, as unix:/run/engine.sock")
    size_bytes = len(path.encode(errors="surrogateescape"))
    if size_bytes > _UNIX_PATH_MAX_BYTES:
        raise ConfigError(
            f"{where} names a socket path of {size_bytes} bytes: "
            f"the system takes {_UNIX_PATH_MAX_BYTES}, so use a shorter path or a link to it"
        )
    return Upstream("unix", path=path)


def parse_page(url: str, where: str = "the address of the page") -> str:
    """The URL of a metrics page, ``http://HOST:PORT[/PATH]`` or https; without a path it is ``/metrics``.

    A user name and password are sent to the page, and never shown. Raises ConfigError.
    """
    expected = "expected http://HOST:PORT/metrics or https://HOST:PORT/metrics"
    seen = quote(shown(url))
    if "://" not in url:
        raise ConfigError(f"{where} is {seen}, which has no scheme: {expected}")
    if any(ord(c) <= 32 or ord(c) >= 127 or c == "\\" for c in url):
        raise ConfigError(f"{where} is {seen}, which holds a space, a backslash or a non-ASCII character: {expected}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise ConfigError(f"{where} is {seen}, which is not a URL: {expected}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{where} is {seen}, whose scheme is {quote(parts.scheme)}: {expected}")
    if not (_is_ip(host, 6) or _is_host(host)) or port == 0:
        raise ConfigError(f"{where} is {seen}, whose host or port is none: {expected}")
    if parts.fragment:
        raise ConfigError(f"{where} is {seen}, which has a fragment: {expected}")
    return parts._replace(path=parts.path if parts.path not in ("", "/") else "/metrics").geturl()


def shown(url: str) -> str:
    """A URL as it may be shown and stored: without a user name, a password, the query and the fragment."""
    return _redacted(url.partition("#")[0]).partition("?")[0]


def is_loopback(host: str) -> bool:
    """True where only this host can reach it. A name other than localhost counts as reachable."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_host(host: str) -> bool:
    # Digits and dots alone are an IPv4 address or nothing: 127.1 and 999.0.0.1 mean different things to
    # different resolvers.
    if re.fullmatch(r"[0-9.]+", host):
        return _is_ip(host, 4)
    return _HOST.match(host) is not None and ".." not in host


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _port(text: str, whole: str, where: str, *, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{where} is {quote(whole)}, whose port is {quote(text)}: expected {least} to 65535")
    port = int(text)
    if not least <= port <= 65535:
        raise ConfigError(f"{where} is {quote(whole)}, whose port is {port}: expected {least} to 65535")
    return port


def _looks_like_address(text: str) -> bool:
    try:
        parse_address(text)
    except ConfigError:
        return False
    return True


def _redacted(url: str) -> str:
    """Without what may be secret: everything before an @ (a password may hold a slash), and the query."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    base, query, _ = rest.rpartition("@")[2].partition("?")
    return scheme + separator + base + (query and "?…")


def quote(text: str) -> str:
    """Shown on a terminal: control characters escaped, and no longer than a line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def same_socket(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Would both be the same socket? Names are not looked up, so only the plain cases are seen."""
    if one[1] != other[1] or one[1] == 0:
        return False
    hosts = {"127.0.0.1" if host.lower() == "localhost" else host.lower() for host in (one[0], other[0])}
    wild = hosts & set(_WILDCARDS)
    return len(hosts) == 1 or (bool(wild) and all(host in _WILDCARDS or is_loopback(host) for host in hosts))
