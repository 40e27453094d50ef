"""Why a connection could not be made or broke, in words for people: no number, no class."""

from __future__ import annotations

import os
import socket
import ssl


def os_reason(error: BaseException) -> str:
    """What the system, the resolver or TLS says; `connection refused`."""
    if isinstance(error, ssl.SSLCertVerificationError) and getattr(error, "verify_message", None):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return str(getattr(error, "reason", None) or error)
    if isinstance(error, socket.gaierror):
        # Its number is the resolver's, not the system's.
        return (error.strerror or str(error)).lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
