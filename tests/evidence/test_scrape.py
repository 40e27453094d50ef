"""Fetching a page: whatever the other side does becomes one sentence, in time, and no other address is contacted."""

from __future__ import annotations

import asyncio
import base64
import gzip
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tapproxy.core.sample import Sample
from tapproxy.evidence.scrape import EnginePage, PageError, unpack
from tests.evidence.pages import Answer, Pages, page, raw, serving

PAGE = (Path(__file__).parent.parent / "data" / "metrics_pages" / "vllm-0.32.txt").read_bytes()
T = TypeVar("T")


def run(answer: Answer, use: Callable[[Pages], Awaitable[T]]) -> T:
    async def both() -> T:
        async with serving(answer) as pages:
            return await use(pages)

    return asyncio.run(asyncio.wait_for(both(), 10))


async def once(pages: Pages) -> Sample:
    reader = EnginePage(pages.url, deadline_s=0.5)
    try:
        return await reader.read()
    finally:
        await reader.close()


def problem_of(answer: Answer) -> str:
    started = time.monotonic()
    sample = run(answer, once)
    assert time.monotonic() - started < 2
    assert sample.problem is not None
    assert (sample.values, "\n" in sample.problem) == ({}, False)
    return sample.problem


def test_a_page_becomes_a_sample_with_the_version_that_the_engine_says() -> None:
    async def answer(target: bytes, writer: asyncio.StreamWriter) -> None:
        body = b'{"version": "0.32.1"}' if target == b"/version" else PAGE
        await page(body)(target, writer)

    async def twice(pages: Pages) -> tuple[list[Sample], list[str]]:
        reader = EnginePage(pages.url)
        try:
            return [await reader.read(), await reader.read()], pages.targets()
        finally:
            await reader.close()

    samples, targets = run(answer, twice)
    assert [(each.problem, each.facts["version"], each.facts["version_from"]) for each in samples] == [
        (None, "0.32.1", "the engine")
    ] * 2
    # Asked for once: it changes only when the engine is started anew.
    assert targets == ["/metrics", "/version", "/metrics"]
    assert samples[0].values["finished"] == 444
    assert samples[1].t_mono_ns > samples[0].t_mono_ns > 0


def test_the_version_is_asked_for_again_when_the_engine_was_started_anew() -> None:
    starts = iter((b"100.0", b"200.0"))

    async def answer(target: bytes, writer: asyncio.StreamWriter) -> None:
        if target == b"/version":
            await page(b"{}")(target, writer)
        else:
            body = b'vllm:num_requests_running{engine="0"} 1\nprocess_start_time_seconds %s\n' % next(starts)
            await page(body)(target, writer)

    async def twice(pages: Pages) -> list[str]:
        reader = EnginePage(pages.url)
        try:
            await reader.read()
            await reader.read()
            return pages.targets()
        finally:
            await reader.close()

    assert run(answer, twice) == ["/metrics", "/version"] * 2


def test_the_second_page_is_asked_where_the_first_is_gone() -> None:
    async def answer(target: bytes, writer: asyncio.StreamWriter) -> None:
        known = {b"/metrics": b"sglang:num_running_reqs 1\n", b"/server_info": b'{"version": "0.5.23", "api_key": "k"}'}
        answer_of = page(known[target]) if target in known else page(b"", status="404 Not Found")
        await answer_of(target, writer)

    sample = run(answer, once)
    assert (sample.facts["engine"], sample.facts["version"]) == ("SGLang", "0.5.23")


def test_a_version_page_that_hangs_or_lies_costs_the_page_nothing() -> None:
    async def answer(target: bytes, writer: asyncio.StreamWriter) -> None:
        await page(b"[1]" if target == b"/version" else PAGE)(target, writer)

    sample = run(answer, once)
    assert (sample.problem, sample.facts["version"]) == (None, "0.28.0 or later")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(page(b"<html>nginx</html>"), "the page is HTML", id="html"),
        pytest.param(page(b'{"error": "x"}'), "the page is JSON", id="json"),
        pytest.param(page(b"\0\1\2"), "binary data", id="binary"),
        pytest.param(page(b""), "the page is empty", id="empty"),
        pytest.param(page(b"node_load1 1\n"), "such as node_load1", id="another_program"),
        pytest.param(page(b"{}", status="404 Not Found"), "404: there is no page at this path: vLLM has", id="404"),
        pytest.param(page(b"{}", status="501 Not Implemented"), "start llama-server with --metrics", id="501"),
        pytest.param(page(b"{}", status="401 Unauthorized"), "USER:PASSWORD", id="401"),
        pytest.param(page(b"", status="500 Internal Server Error"), "it answers with status 500", id="500"),
        pytest.param(raw(b"220 mail.example ESMTP\r\n"), "is not HTTP", id="not_http"),
        pytest.param(raw(b""), "broke off", id="closed_at_once"),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + PAGE[:500]), "broke off", id="cut_short"
        ),
        pytest.param(
            raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nvllm:num"), "broke off", id="chunk_cut"
        ),
        pytest.param(page(PAGE, "Content-Encoding: br"), "encoded as 'br'", id="encoding_not_asked_for"),
        pytest.param(page(PAGE, "Content-Encoding: gzip"), "gzip cannot be unpacked", id="not_gzip"),
        pytest.param(page(gzip.compress(PAGE)[:-20], "Content-Encoding: gzip"), "gzip broke off", id="gzip_cut"),
        pytest.param(
            page(gzip.compress(b"x 1\n" * (5 << 20)), "Content-Encoding: gzip"), "larger than 16 MiB, unpacked"
        ),
        pytest.param(page(b"", "Location: /metrics", status="302 Found"), "redirects in circles", id="circle"),
        pytest.param(
            page(b"", "Location: http://169.254.169.254/latest", status="302 Found"),
            "redirects to another address (169.254.169.254), which was not named",
            id="elsewhere",
        ),
        pytest.param(
            page(b"", "Location: https://127.0.0.1/", status="301 Moved"), "another address (127.0.0.1)", id="scheme"
        ),
        pytest.param(page(b"", status="302 Found"), "circles", id="redirect_to_nowhere"),
    ],
)
def test_what_is_no_page_is_a_problem_of_one_sentence(answer: Answer, says: str) -> None:
    assert says in problem_of(answer)


def test_a_page_that_hangs_is_given_up_at_the_deadline() -> None:
    async def silent(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def dribbling(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\n#\r\n")
            await asyncio.sleep(0.05)

    for answer in (silent, dribbling):
        assert problem_of(answer) == "no whole page came within 0.5 s"


def test_a_page_without_an_end_is_given_up_at_its_size() -> None:
    async def endless(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            writer.write(b"vllm:x 1\n" * 100_000)
            await writer.drain()

    async def read(pages: Pages) -> Sample:
        reader = EnginePage(pages.url, deadline_s=8)
        try:
            return await reader.read()
        finally:
            await reader.close()

    assert run(endless, read).problem == "the page is larger than 16 MiB"


def test_nobody_there_is_a_problem() -> None:
    async def gone() -> Sample:
        async with serving(page(b"")) as pages:
            pass
        return await once(pages)

    problem = asyncio.run(gone()).problem
    assert problem is not None
    assert problem.startswith("it cannot be connected to: ")


def test_a_gzipped_page_and_a_redirect_on_the_same_address_are_read() -> None:
    async def answer(target: bytes, writer: asyncio.StreamWriter) -> None:
        if target == b"/metrics":
            await page(b"", "Location: /metrics/", status="307 Temporary Redirect")(target, writer)
        elif target == b"/metrics/":
            await page(gzip.compress(PAGE), "Content-Encoding: gzip")(target, writer)
        else:
            await page(b"", status="404 Not Found")(target, writer)

    sample = run(answer, once)
    assert (sample.problem, sample.values["finished"]) == (None, 444)


def test_credentials_are_sent_and_never_shown() -> None:
    async def read(pages: Pages) -> tuple[Sample, list[bytes]]:
        reader = EnginePage(pages.url.replace("http://", "http://me:s3cret@") + "?token=t0ken")
        try:
            return await reader.read(), pages.asked
        finally:
            await reader.close()

    sample, asked = run(page(PAGE), read)
    assert b"Basic " + base64.b64encode(b"me:s3cret") in asked[0]
    assert asked[0].startswith(b"GET /metrics?token=t0ken ")
    for text in (sample.source, str(sample.to_dict())):
        assert "s3cret" not in text
        assert "t0ken" not in text


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run(page(PAGE), once).problem is None


def test_what_deflate_calls_itself_is_unpacked() -> None:
    assert unpack(zlib.compress(b"up 1\n"), "deflate") == b"up 1\n"
    assert unpack(b"up 1\n", "identity") == b"up 1\n"
    with pytest.raises(PageError, match="not asked for"):
        unpack(b"", "zstd")
