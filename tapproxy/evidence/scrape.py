"""Fetches a metrics page every time it is asked to, and never more than it was told: one address, a deadline, a size.

Rules here: whatever goes wrong is the sample's ``problem``, one sentence, and no exception. Only the address that the
operator named is contacted: a redirect to another one is a problem. Proxies of the environment are not used. What takes
time without waiting (unpacking, reading the page) is done in a thread, off the loop.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
import zlib
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import httpx
import orjson

from tapproxy.core.address import shown
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import engines
from tapproxy.evidence.exposition import MOST_BYTES
from tapproxy.evidence.names import ENGINES, Engine

# A page takes an engine milliseconds; one that takes this long is stuck, or its process is.
DEADLINE_S: Final = 2.0
_VERSION_DEADLINE_S: Final = 1.0
_VERSION_BYTES: Final = 1 << 20
# The engine's answer to it changes only when it is started anew; asked again after so many pages all the same.
_ASK_AGAIN: Final = 600
_MOST_HOPS: Final = 3
# Shorter than vLLM keeps its side (5 s), so that no page is asked for on a connection that is about to close.
_KEEPALIVE_S: Final = 3.0
_MOST_WORDS: Final = 160
_HEADERS: Final = {
    "accept": "text/plain;version=0.0.4;q=1, text/plain;q=0.9, */*;q=0.1",
    "accept-encoding": "gzip",
    "user-agent": "tapproxy",
}
_HINTS: Final = {
    401: "it wants credentials: give them as http://USER:PASSWORD@HOST:PORT/metrics",
    403: "it wants credentials, or refuses this host",
    404: "there is no page at this path: " + "; ".join(about.page for about in ENGINES.values()),
    501: "its metrics are off: " + ENGINES[Engine.LLAMA_CPP].page,
    503: "it is loading, or overloaded",
}


class PageError(Exception):
    """Why there is no page; the message is a sentence to show."""


class EnginePage:
    """One engine's page. ``await read()`` as often as wanted, never twice at once; ``close()`` at the end.

    ``verify``: how an https page is verified; None does not.
    """

    kind = SampleKind.ENGINE

    def __init__(
        self,
        url: str,
        *,
        verify: ssl.SSLContext | None = None,
        deadline_s: float = DEADLINE_S,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.source = shown(url)
        self._url = httpx.URL(url)
        self._deadline_s = deadline_s
        self._mono_ns, self._unix_ns = mono_ns, unix_ns
        limits = httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_S)
        self._client = httpx.AsyncClient(
            verify=verify if verify is not None else False,
            trust_env=False,
            follow_redirects=False,
            timeout=deadline_s,
            limits=limits,
        )
        self._told: str | None = None
        self._start_s: float | None = None
        self._until_asked = 0

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    async def read(self) -> Sample:
        """The page as it is now; its ``problem`` where there is none."""
        try:
            async with asyncio.timeout(self._deadline_s):
                raw, encoding = await self._fetch(self._url, MOST_BYTES)
            at = self._mono_ns(), self._unix_ns()
            sample = await asyncio.to_thread(self._sample, raw, encoding, at)
            if await self._ask_version(sample):
                sample = await asyncio.to_thread(self._sample, raw, encoding, at)
            return sample
        except TimeoutError:
            return self._failed(f"no whole page came within {self._deadline_s:g} s")
        except PageError as error:
            return self._failed(str(error))

    def _sample(self, raw: bytes, encoding: str, at: tuple[int, int]) -> Sample:
        # The framing was checked when it was fetched.
        return engines.read(unpack(raw, encoding), self.source, *at, told=self._told)

    def _failed(self, problem: str) -> Sample:
        self._until_asked = 0
        return Sample(SampleKind.ENGINE, self.source, self._mono_ns(), self._unix_ns(), problem=problem)

    async def _fetch(self, url: httpx.URL, most_bytes: int) -> tuple[bytes, str]:
        """(the body as it came, its encoding). Raises PageError."""
        try:
            for _ in range(_MOST_HOPS + 1):
                async with self._client.stream("GET", url, headers=_HEADERS) as response:
                    if response.is_redirect:
                        url = self._same_origin(url, response.headers.get("location", ""))
                        continue
                    if response.status_code != 200:
                        raise PageError(_refused(response.status_code))
                    body = bytearray()
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > most_bytes:
                            raise PageError(f"the page is larger than {most_bytes >> 20} MiB")
                    return bytes(body), response.headers.get("content-encoding", "").strip().lower()
            raise PageError("it redirects in circles")
        except httpx.TimeoutException:
            raise TimeoutError from None
        except httpx.ConnectError as error:
            raise PageError(f"it cannot be connected to: {_words(error)}") from None
        except httpx.RemoteProtocolError as error:
            raise PageError(f"the answer broke off, or is not HTTP: {_words(error)}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise PageError(f"it cannot be read: {_words(error)}") from None

    def _same_origin(self, url: httpx.URL, location: str) -> httpx.URL:
        to = url.join(location)
        if (to.scheme, to.host, to.port) != (self._url.scheme, self._url.host, self._url.port):
            elsewhere = urlsplit(str(to)).hostname or "nowhere"
            raise PageError(f"it redirects to another address ({elsewhere[:80]}), which was not named: give that one")
        return to.copy_with(userinfo=self._url.userinfo)

    async def _ask_version(self, sample: Sample) -> bool:
        """Asks the engine for its version where that may have changed; whether it did."""
        start_s = sample.values.get("process_start_s")
        if sample.problem is not None or (self._until_asked > 0 and start_s == self._start_s):
            self._until_asked -= 1
            return False
        self._start_s, self._until_asked = start_s, _ASK_AGAIN
        engine = sample.facts.get("engine")
        about = ENGINES[Engine(engine)] if engine in tuple(Engine) else None
        # Inside another server the page is that server's, and the engine is at another address.
        pages = () if about is None or "within" in sample.facts else about.told_at
        told = None
        for path, key in pages:
            told = told or await self._version(path, key)
        changed, self._told = told != self._told, told
        return changed

    async def _version(self, path: str, key: str) -> str | None:
        try:
            async with asyncio.timeout(_VERSION_DEADLINE_S):
                body, encoding = await self._fetch(self._url.copy_with(path=path, query=None), _VERSION_BYTES)
            told = orjson.loads(unpack(body, encoding)).get(key)
        except (TimeoutError, PageError, ValueError, AttributeError):
            return None
        return told.strip() if isinstance(told, str) and told.isprintable() and told.strip() else None


def unpack(raw: bytes, encoding: str) -> bytes:
    """The page itself, at most ``MOST_BYTES`` of it. Raises PageError."""
    if encoding in ("", "identity"):
        return raw
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise PageError(f"it is encoded as {encoding[:20]!r}, which was not asked for: expected plain text or gzip")
    # 32: gzip's head or zlib's, whichever is there.
    inflate = zlib.decompressobj(32 + zlib.MAX_WBITS)
    try:
        text = inflate.decompress(raw, MOST_BYTES + 1)
    except zlib.error as error:
        raise PageError(f"its {encoding} cannot be unpacked: {_words(error)}") from None
    if len(text) > MOST_BYTES:
        raise PageError(f"the page is larger than {MOST_BYTES >> 20} MiB, unpacked")
    if not inflate.eof:
        raise PageError(f"its {encoding} broke off")
    return text


def _refused(status: int) -> str:
    hint = _HINTS.get(status)
    return f"it answers with status {status}" + (f": {hint}" if hint else ": expected a page with status 200")


def _reason(error: OSError) -> str:
    """The system's word; a resolver's error has numbers of its own, below 0."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error.strerror)


def _words(error: BaseException) -> str:
    """What an exception says, on one line; of one that wraps the system's own word, that word."""
    inner: BaseException | None = error
    while inner is not None:
        reasons = inner.exceptions if isinstance(inner, BaseExceptionGroup) else (inner,)
        said = next((_reason(each) for each in reasons if isinstance(each, OSError) and each.strerror), None)
        if said is not None:
            error = OSError(said)
            break
        inner = inner.__cause__ or inner.__context__
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(letter for letter in text if letter.isprintable())[:_MOST_WORDS]
