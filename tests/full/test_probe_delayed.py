"""A probe at a distance of 40 ms: what it makes of Nagle's algorithm, of a corked socket, and of a distance alone.

The link is made of network namespaces and takes root; without it these tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tapproxy.wire.link import End
from tests.harness import Tap, tap
from tests.netns.conftest import ends
from tests.probe import cases, proxies

__all__ = ["ends"]  # the fixture

TOKEN = "of-the-tests"


@pytest.fixture(scope="module")
def far(ends: tuple[End, End], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[End, End, Tap, Path]]:
    """A tap at the far end; probes are run at the near one."""
    near, there = ends
    directory = tmp_path_factory.mktemp("far")
    for parent in [directory, *directory.parents[:2]]:
        parent.chmod(0o755)
    flags = ("--allow-probe", "--admin", f"{there.address}:0", "--admin-token", TOKEN)
    with contextlib.ExitStack() as stack:
        with there.inside():
            running = stack.enter_context(tap(directory / "tap", "http://127.0.0.1:9", *flags))
        yield near, there, running, directory


def probed(far: tuple[End, End, Tap, Path], name: str, start: Any) -> dict[str, Any]:
    near, there, running, directory = far
    (directory / name).mkdir()
    with contextlib.ExitStack() as stack:
        with there.inside():
            proxy = stack.enter_context(start(directory / name, running.data[1], host=there.address))
        with near.inside():
            outcome = cases.probe(proxy.url, running, "--idle", "0", "--token", TOKEN)
    assert outcome.document, outcome.stderr
    return outcome.document


def unbuffered(*args: Any, **more: Any) -> Any:
    return proxies.nginx(*args, "proxy_buffering off;", **more)


STARTS: dict[str, Any] = {"off": unbuffered, "nagle": proxies.nginx, "cork": proxies.haproxy}


@pytest.fixture(scope="module")
def found(far: tuple[End, End, Tap, Path]) -> dict[str, dict[str, Any]]:
    """The results of all three, measured at the same time; a thread has its own namespace."""
    here = {name: start for name, start in STARTS.items() if name != "cork" or proxies.find("haproxy")}
    with ThreadPoolExecutor(len(here)) as pool:
        asked = {name: pool.submit(probed, far, name, start) for name, start in here.items()}
        return {name: one.result() for name, one in asked.items()}


def test_a_distance_alone_is_no_fault(found: dict[str, dict[str, Any]]) -> None:
    off = found["off"]
    assert (off["verdict"], off["causes"]) == ("healthy", [])
    assert off["clients"]["http1"]["streaming"] == "streams"
    assert off["clients"]["http1"]["streams"][0]["rtt_ms"] >= 40


def test_small_events_that_wait_for_an_acknowledgement_are_nagles(found: dict[str, dict[str, Any]]) -> None:
    """nginx's buffered way never sets TCP_NODELAY before a second request; on loopback nobody sees it."""
    nagle = found["nagle"]
    causes = {(one["severity"], one["cause"], one["mechanism"]) for one in nagle["causes"]}
    assert ("warning", "network.nagle", "nagle") in causes
    assert not [one for one in causes if one[0] == "error"]
    assert nagle["clients"]["http1"]["streaming"] == "late_header"


def test_a_corked_socket_is_named_though_whole_segments_leave_it(found: dict[str, dict[str, Any]]) -> None:
    if "cork" not in found:
        pytest.skip("haproxy is not installed")
    causes = found["cork"]["causes"]
    assert [(one["cause"], one["mechanism"]) for one in causes] == [("proxy.response_buffering", "timer")]
    assert "MSG_MORE or TCP_CORK" in causes[0]["summary"]
