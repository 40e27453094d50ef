"""What a client needs beside the address of an upstream: its authority and its TLS context."""

from __future__ import annotations

import ssl
from pathlib import Path

from tapproxy.core.address import Upstream
from tapproxy.core.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


def authority(upstream: Upstream) -> str:
    """What a Host field for this upstream holds; a UNIX socket has none of its own, so ``localhost``."""
    if upstream.host is None:
        return "localhost"
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    return host if upstream.port == _DEFAULT_PORTS[upstream.scheme] else f"{host}:{upstream.port}"


def tls_context(
    upstream: Upstream, *, insecure: bool = False, ca_file: Path | str | None = None
) -> ssl.SSLContext | None:
    """The verifying context for an https upstream, None for the others.

    Raises ConfigError where ``ca_file`` holds no certificates that can be read.
    """
    if upstream.scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read certificates from {str(ca_file)!r}: {error}") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def check_listener_certificate(certificate: Path, key: Path) -> None:
    """Raises ConfigError where these files would not start TLS on a listener."""
    for file in (certificate, key):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{str(certificate)!r} and {str(key)!r} are no certificate chain with its private key in PEM ({error})"
        ) from None
