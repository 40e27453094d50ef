"""Why a connection failed is said in words: no number, no class name."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl

import pytest

from tapproxy.wire.fetch import Client
from tapproxy.wire.reasons import os_reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "[whatever]"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "name or service not known"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "wrong version number"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("odd"), "odd"),
    ],
)
def test_a_reason_is_words(error: BaseException, said: str) -> None:
    assert said in os_reason(error)
    assert "Errno" not in os_reason(error)


def test_a_client_says_that_nobody_listens_without_a_number() -> None:
    async def main() -> str | None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            client = Client(url, timeout_s=2)
            fetched = await client.fetch("GET", "/")
            await client.close()
        return fetched.error

    assert asyncio.run(main()) == "connect: Connection refused"
