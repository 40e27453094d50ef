"""Addresses and upstreams as an operator writes them."""

from __future__ import annotations

import pytest

from tapproxy.core.address import Upstream, is_loopback, parse_address, parse_upstream, same_socket
from tapproxy.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("gpu-1.example.org:8000", ("gpu-1.example.org", 8000)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "9000",
            "--listen is '9000', which has no port: expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000",
            id="no_port",
        ),
        pytest.param(
            ":9000",
            "--listen is ':9000', which has no host: expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000 "
            "(0.0.0.0:9000 for all interfaces)",
            id="no_host",
        ),
        pytest.param(
            "127.0.0.1:70000", "--listen is '127.0.0.1:70000', whose port is 70000: expected 0 to 65535", id="high"
        ),
        pytest.param("h:", "--listen is 'h:', whose port is '': expected 0 to 65535", id="empty_port"),
        pytest.param("h:+1", "--listen is 'h:+1', whose port is '+1': expected 0 to 65535", id="sign"),
        pytest.param("h:١", "--listen is 'h:١', whose port is '١': expected 0 to 65535", id="arabic_digit"),
        pytest.param(
            "::1:9000", "--listen is '::1:9000': write an IPv6 address in brackets, as [::1]:9000", id="bare_ipv6"
        ),
        pytest.param(
            "[::1]",
            "--listen is '[::1]', which has no port: expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000",
            id="ipv6_no_port",
        ),
        pytest.param(
            "127.1:80",
            "--listen is '127.1:80', whose host is not a name or an address: "
            "expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000",
            id="short_ipv4",
        ),
        pytest.param(
            "http://h:80",
            "--listen is 'http://h:80', a URL: expected HOST:PORT such as 127.0.0.1:9000 or [::1]:9000",
            id="a_url",
        ),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, "--listen")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Upstream("http", "127.0.0.1", 8000)),
        ("http://engine/", Upstream("http", "engine", 80)),
        ("https://engine.example.org", Upstream("https", "engine.example.org", 443)),
        ("http://[::1]:8000", Upstream("http", "::1", 8000)),
        ("HTTP://engine:1", Upstream("http", "engine", 1)),
        ("unix:/run/engine.sock", Upstream("unix", path="/run/engine.sock")),
        ("unix:///run/engine.sock", Upstream("unix", path="/run/engine.sock")),
    ],
)
def test_an_upstream_is_an_origin_or_a_socket(url: str, expected: Upstream) -> None:
    assert parse_upstream(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        pytest.param(
            "127.0.0.1:8000",
            "--upstream is '127.0.0.1:8000', which has no scheme: write http://127.0.0.1:8000",
            id="no_scheme",
        ),
        pytest.param(
            "engine",
            "--upstream is 'engine', which has no scheme: expected http://HOST:PORT, https://HOST:PORT or unix:/PATH",
            id="no_scheme_no_port",
        ),
        pytest.param(
            "ftp://h:21",
            "--upstream is 'ftp://h:21', whose scheme is 'ftp': "
            "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH",
            id="ftp",
        ),
        pytest.param(
            "http://h:8000/v1",
            "--upstream is 'http://h:8000/v1', which has a path: "
            "requests keep their own path, so write 'http://h:8000'",
            id="path",
        ),
        pytest.param(
            "http://h:8000?key=s3cret",
            "--upstream is 'http://h:8000?…', which has a query or fragment: write 'http://h:8000'",
            id="query",
        ),
        pytest.param(
            "http://h#f", "--upstream is 'http://h#f', which has a query or fragment: write 'http://h'", id="fragment"
        ),
        pytest.param(
            "http://me:s3cret@h:8000",
            "--upstream holds a user name or password: write 'http://h:8000', clients send their own credentials",
            id="userinfo",
        ),
        pytest.param(
            "http://me:s3/cret@h:8000/x",
            "--upstream holds a user name or password: write 'http://h:8000', clients send their own credentials",
            id="userinfo_with_a_slash",
        ),
        pytest.param("http://h:0", "--upstream is 'http://h:0', whose port is 0: expected 1 to 65535", id="port_0"),
        pytest.param(
            "http://h:99999", "--upstream is 'http://h:99999', whose port is 99999: expected 1 to 65535", id="port_high"
        ),
        pytest.param(
            "http://", "--upstream is 'http://', whose host is not a name or an address: expected http://HOST:PORT"
        ),
        pytest.param(
            "http://[::1",
            "--upstream is 'http://[::1', which is not a URL: "
            "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH",
            id="open_bracket",
        ),
        pytest.param(
            "http://a\nb",
            "--upstream is 'http://a\\nb', which holds a space, a backslash or a non-ASCII character: "
            "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH",
            id="line_feed",
        ),
        pytest.param(
            "unix:engine.sock",
            "--upstream is 'unix:engine.sock': expected the absolute path of a socket, as unix:/run/engine.sock",
            id="relative_socket",
        ),
        pytest.param(
            "unix:/" + "x" * 107,
            "--upstream names a socket path of 108 bytes: the system takes 107, so use a shorter path or a link to it",
            id="long_socket",
        ),
    ],
)
def test_a_wrong_upstream_is_refused_in_one_sentence_without_its_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_upstream(url)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST")],
        *[(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org")],
    ],
)
def test_only_loopback_addresses_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("127.0.0.1", 1), ("127.0.0.1", 1), True),
        (("127.0.0.1", 1), ("127.0.0.1", 2), False),
        (("127.0.0.1", 0), ("127.0.0.1", 0), False),
        (("localhost", 1), ("127.0.0.1", 1), True),
        (("0.0.0.0", 1), ("127.0.0.1", 1), True),
        (("10.0.0.1", 1), ("127.0.0.1", 1), False),
        (("0.0.0.0", 1), ("engine", 1), False),
    ],
)
def test_two_addresses_are_the_same_socket_where_that_is_plain(
    one: tuple[str, int], other: tuple[str, int], expected: bool
) -> None:
    assert same_socket(one, other) is expected
    assert same_socket(other, one) is expected
