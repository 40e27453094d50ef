"""A client that leaves costs the engine nothing more: its upstream connection closes at once, and nothing stays behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import percentile
from tests.faults.leaving import PHASES, Outcome, disconnects

COUNT = 1500
AT_ONCE = 40
P99_MS = 100.0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = disconnects(tmp_path_factory.mktemp("tap"), COUNT, AT_ONCE)
    sys.stdout.write(outcome.line() + "\n")
    return outcome


def test_every_disconnect_left_one_record_that_says_so(outcome: Outcome) -> None:
    assert len(outcome.ended) == COUNT
    assert {name: ended for name, ended in outcome.ended.items() if ended != ["client_aborted"]} == {}


def test_no_socket_or_slot_is_left(outcome: Outcome) -> None:
    assert outcome.left_open == 0
    assert outcome.after.descriptors == outcome.before.descriptors


def test_the_floods_had_really_paused_the_reading(outcome: Outcome) -> None:
    floods = {name for name in outcome.ended if name.startswith("flood")}
    assert len(floods) == COUNT * PHASES["/flood"] // 100
    assert floods <= outcome.stalled


def test_the_upstream_is_closed_within_100_ms(outcome: Outcome) -> None:
    assert percentile(outcome.all_ms, 99) <= P99_MS, outcome.line()
