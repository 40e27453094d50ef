"""The request scanner against the standard library's JSON, on any object, in any cut."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.body import RequestScan
from tapproxy.core.usage import text
from tests import captures


def scan(pieces: Iterable[bytes]) -> RequestScan:
    scanner = RequestScan()
    for piece in pieces:
        scanner.feed(piece)
    return scanner


def facts(scanner: RequestScan) -> dict[str, Any]:
    names = ("model", "stream", "n", "max_tokens", "include_usage", "continuous_usage", "ignore_eos", "echo")
    return {name: getattr(scanner, name) for name in names}


NOTHING = facts(RequestScan())


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"model":"m","stream":true}', {"model": "m", "stream": True}),
        ('{"model":"m"}', {"model": "m", "stream": False}),
        ('  \r\n{ "stream" : false , "n" : 2 }', {"stream": False, "n": 2}),
        ('{"messages":[{"role":"user","content":"\\"stream\\": false"}],"stream":true}', {"stream": True}),
        ('{"messages":[{"model":"x","n":3}],"x":{"model":"y","z":{"n":4}}}', {"stream": False}),
        ('{"stream_options":{"include_usage":true,"continuous_usage_stats":false}}',
         {"stream": False, "include_usage": True, "continuous_usage": False}),
        ('{"stream_options":null,"include_usage":true}', {"stream": False}),
        ('{"stream_options":[{"include_usage":true}]}', {"stream": False}),
        ('{"max_tokens":9,"max_completion_tokens":7}', {"stream": False, "max_tokens": 7}),
        ('{"max_tokens":null,"max_output_tokens":8}', {"stream": False, "max_tokens": 8}),
        ('{"inputs":"a","parameters":{"max_new_tokens":5}}', {"stream": False, "max_tokens": 5}),
        ('{"text":"a","sampling_params":{"max_new_tokens":5,"n":2,"ignore_eos":true}}',
         {"stream": False, "max_tokens": 5, "n": 2, "ignore_eos": True}),
        ('{"model":"a","model":"b","stream":true,"stream":false}', {"model": "b", "stream": False}),
        ('{"\\u006dodel":"\\u00e9\\n","str\\u0065am":true}', {"model": "é?", "stream": True}),
        ('{"model":"' + "m" * 300 + '"}', {"model": "m" * 256, "stream": False}),
        ('{"model":"' + "m" * 3000 + '","n":1}', {"stream": False, "n": 1}),
        ('{"' + "k" * 3000 + '":1,"n":1}', {"stream": False, "n": 1}),
        ('{"model":7,"stream":"true","n":-1,"max_tokens":1.5,"echo":1}', {"stream": False}),
        ('{"n":1e2,"model":null}', {"stream": False}),
        ('{"model":{"a":1},"n":[1],"stream":true}', {"stream": True}),
        ('{"model":"\\ud83d"}', {"model": "?", "stream": False}),
        ('{"echo":true,"prompt":["a","b"]}', {"stream": False, "echo": True}),
        ('{"a":"}{][\\\\","n":2}', {"stream": False, "n": 2}),
        ("{}", {"stream": False}),
        ('{"stream":true', {}),
        ('{"stream":true,', {"stream": True}),
        ('{"model":"m', {}),
        ('{"n":1} {"n":2}', {"stream": False, "n": 1}),
        ("[1]", {}),
        ('"stream"', {}),
        ("model=m&stream=true", {}),
        ("", {}),
        ("}}}]]", {}),
        ("{]],,::", {"stream": False}),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)  # fmt: skip
def test_a_body_tells_what_was_asked_for_in_every_cut(body: str, told: dict[str, Any]) -> None:
    raw = body.encode("utf-8", "surrogatepass")
    for size in (len(raw) or 1, 1, 2, 3, 7):
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert facts(scan(pieces)) == NOTHING | told, size


def test_it_says_whether_it_could_read() -> None:
    assert (scan([b"[1]"]).readable, scan([b"[1]"]).complete) == (False, False)
    assert (scan([b'{"a":']).readable, scan([b'{"a":']).complete) == (True, False)
    assert (scan([b'{"a":1}']).readable, scan([b'{"a":1}']).complete) == (True, True)


NAMES = ["model", "stream", "n", "max_tokens", "stream_options", "include_usage", "ignore_eos", "echo", "x", "é", '"\\']
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=7),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_it_reads_what_the_standard_library_reads(
    value: dict[str, Any], ascii_only: bool, indent: int | str | None, sizes: list[int]
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    scanner = RequestScan()
    at = turn = 0
    while at < len(raw):
        size = sizes[turn % len(sizes)]
        scanner.feed(raw[at : at + size])
        at, turn = at + size, turn + 1
    options = value.get("stream_options")
    model = value.get("model")
    assert scanner.complete
    # What a terminal would obey is stored as a question mark, see usage.text.
    assert scanner.model == (text(model) if isinstance(model, str) and model else None)
    assert scanner.stream == (value.get("stream") is True)
    for name in ("n", "max_tokens"):
        given_value = value.get(name)
        assert getattr(scanner, name) == (given_value if type(given_value) is int else None)
    for name, given_value in (("ignore_eos", value.get("ignore_eos")), ("echo", value.get("echo"))):
        assert getattr(scanner, name) == (given_value if type(given_value) is bool else None)
    usage = options.get("include_usage") if isinstance(options, dict) else None
    assert scanner.include_usage == (usage if type(usage) is bool else None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([b"{", b"}", b"[", b"]", b'"', b"\\", b":", b",", b"n", b"1", b"model", b" "])),
    st.binary(max_size=9),
)
def test_no_bytes_make_it_raise(parts: list[bytes], tail: bytes) -> None:
    raw = b"{" + b"".join(parts) + tail
    assert facts(scan([raw])) == facts(scan(raw[at : at + 1] for at in range(len(raw))))


def test_a_body_of_many_megabytes_takes_little_memory_and_linear_time() -> None:
    image = b"A" * 65_536
    words = json.dumps('a line\nof text \u00e9 "quoted"\n' * 1500).encode()

    def run(megabytes: int) -> float:
        scanner = RequestScan()
        started = time.process_time()
        scanner.feed(b'{"messages":[{"role":"user","content":[{"image_url":"')
        for _ in range(megabytes * 16):
            scanner.feed(image)
        scanner.feed(b'"},')
        for _ in range(megabytes * 10):
            scanner.feed(words)
            scanner.feed(b",")
        scanner.feed(b'1]}],"model":"m","stream":true}')
        spent = time.process_time() - started
        assert (scanner.model, scanner.stream) == ("m", True)
        return spent

    tracemalloc.start()
    try:
        run(2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 1024
    # Quadratic would be 256 times the time; caches and the machine's noise get a factor of 6.
    assert run(16) < 16 * 6 * max(run(1), 0.002)


def test_deep_nesting_is_only_counted() -> None:
    deep = b'{"x":' * 100_000 + b"1" + b"}" * 100_000
    assert facts(scan([b'{"n":1,"x":', deep, b',"stream":true}'])) == NOTHING | {"n": 1, "stream": True}


COMMANDS = [path.name for path in sorted((captures.DIRECTORY / "vllm-0.32").glob("*.cmd"))]


@pytest.mark.parametrize("name", [name for name in COMMANDS if "stream" in name and "nonstream" not in name])
def test_the_requests_of_the_captures_ask_for_a_stream(name: str) -> None:
    command = captures.raw(f"vllm-0.32/{name.removesuffix('.cmd')}", ".cmd").decode()
    body = command[command.index("{") : command.rindex("}") + 1]
    scanner = scan([body.encode()])
    assert (scanner.model, scanner.stream) == ("tiny", True)
    assert scanner.max_tokens == json.loads(body).get("max_tokens", json.loads(body).get("max_output_tokens"))
    assert scanner.include_usage == (True if "include_usage" in body else None)
