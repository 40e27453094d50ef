"""Where taps stood: said by the operator, shown by the answers' header fields, or by who asked first."""

from __future__ import annotations

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.diagnose.roles import Roles, Upstream, assign
from tests.diagnose.make import MS, passes, taps


def single(server: str | None, via: str | None = None, peer: str = "10.0.0.5:8000") -> dict[str, list[Record]]:
    _, inner = taps(passes)
    for record in inner:
        record.headers["server"], record.headers["via"], record.upstream.peer = server, via, peer
    return {"inner": inner}


def places(roles: Roles) -> tuple[str | None, str | None]:
    return roles.outer, roles.inner


@pytest.mark.parametrize(
    ("server", "via", "expected"),
    [
        ("nginx/1.22.1", None, ("inner", None)),
        ("nginx", None, ("inner", None)),
        ("openresty/1.25", None, ("inner", None)),
        ("envoy", None, ("inner", None)),
        ("uvicorn", "1.1 varnish", ("inner", None)),
        ("uvicorn", None, (None, "inner")),
        ("llama.cpp", None, (None, "inner")),
        (None, None, (None, "inner")),
        # A name within a name is none.
        ("nginxish-engine", None, (None, "inner")),
    ],
)
def test_a_single_tap_is_placed_by_who_answered_it(
    server: str | None, via: str | None, expected: tuple[str | None, str | None]
) -> None:
    assert places(assign(single(server, via))) == expected


def test_what_no_header_shows_is_said() -> None:
    roles = assign(single("uvicorn"))
    assert roles.doubt is not None
    assert "--upstream-is proxy" in roles.doubt
    assert "12 of its answers name uvicorn" in roles.why
    assert "no answer names a server" in assign(single(None)).why


def test_an_engine_whose_own_page_was_read_is_no_proxy() -> None:
    roles = assign(single(None), engines={"10.0.0.5:8000"})
    assert places(roles) == (None, "inner")
    assert roles.doubt is None


def test_the_operator_knows_best() -> None:
    assert places(assign(single("nginx"), upstream_is=Upstream.ENGINE)) == (None, "inner")
    assert places(assign(single("uvicorn"), upstream_is=Upstream.PROXY)) == ("inner", None)
    assert places(assign(single("uvicorn"), outer="inner")) == ("inner", None)


def test_a_few_error_pages_of_a_proxy_of_the_engines_own_name_decide_nothing() -> None:
    found = single("uvicorn")
    found["inner"][0].headers["server"] = "nginx"
    assert places(assign(found)) == (None, "inner")


@pytest.mark.parametrize("order", [("outer", "inner"), ("inner", "outer")])
def test_of_two_taps_the_one_that_was_asked_first_stands_before_the_proxy(order: tuple[str, str]) -> None:
    outer, inner = taps(passes)
    both = {"outer": outer, "inner": inner}
    roles = assign({name: both[name] for name in order})
    assert places(roles) == ("outer", "inner")
    assert "12 of 12 requests" in roles.why


def test_on_two_hosts_the_longer_exchange_encloses_the_shorter() -> None:
    outer, inner = taps(passes)
    for far in inner:
        far.boot_id, far.t0_mono_ns = "boot-2", far.t0_mono_ns - 3_600_000 * MS
    assert places(assign({"b": inner, "a": outer})) == ("a", "b")


def test_two_taps_without_a_request_in_common_are_not_one_path() -> None:
    _, one = taps(passes)
    _, other = taps(passes)
    for record in other:
        record.response_id = record.request_id = record.request.fingerprint = None
    with pytest.raises(ConfigError, match=r"saw no request in common.*--inner a"):
        assign({"a": one, "b": other})


def test_turned_around_times_want_a_word_of_the_operator() -> None:
    outer, inner = taps(passes)
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        if number % 2:
            near.t0_mono_ns, far.t0_mono_ns = far.t0_mono_ns, near.t0_mono_ns
    with pytest.raises(ConfigError, match="--outer NAME --inner NAME"):
        assign({"outer": outer, "inner": inner})


def test_three_taps_are_asked_about_and_two_of_them_may_be_named() -> None:
    outer, inner = taps(passes)
    three = {"a": outer, "b": inner, "c": inner[:3]}
    with pytest.raises(ConfigError, match=r"records of 3 taps \(a \(12\), b \(12\), c \(3\)\)"):
        assign(three)
    roles = assign(three, outer="a", inner="b")
    assert places(roles) == ("a", "b")
    assert "the records of c are left out" in roles.why


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"outer": "nobody"}, "--outer 'nobody' has no records here; there are records of inner \\(12\\)"),
        ({"outer": "inner", "inner": "inner"}, "are both 'inner'"),
    ],
)
def test_a_wrong_name_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign(single("uvicorn"), **flags)  # type: ignore[arg-type]  # names of taps only
