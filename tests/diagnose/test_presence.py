"""What a tap's own presence changed, of which requests."""

from __future__ import annotations

from tapproxy.diagnose.presence import presence
from tests.diagnose.make import passes, taps


def test_before_a_proxy_clients_become_one_address_one_version_and_one_pool() -> None:
    outer, inner = taps(passes)
    found = presence(outer, inner)
    assert [(entry["tap"], entry["requests"]) for entry in found] == [
        ("outer", 12),
        ("outer", 12),
        ("outer", 12),
        ("inner", 12),
    ]
    words = " ".join(entry["what"] for entry in found)
    for word in ("HTTP/1.1", "one client address", "a pool for all clients"):
        assert word in words


def test_flags_that_take_a_change_back_are_heeded_and_named() -> None:
    outer, _ = taps(passes)
    for each in outer:
        each.altered = ["forward-client-ip", "mirror-connections"]
    found = [entry["what"] for entry in presence(outer, [])]
    assert not any("one client address" in what or "a pool" in what for what in found)
    assert any("X-Forwarded-For" in what for what in found)
    assert any("one of its own upstream" in what for what in found)


def test_no_tap_changed_nothing() -> None:
    assert presence([], []) == []


def test_an_alteration_that_is_not_known_is_named_all_the_same() -> None:
    _, inner = taps(passes)
    inner[0].altered = ["something-new"]
    assert {"tap": "inner", "what": "traffic was altered: something-new", "requests": 1} in presence([], inner)
