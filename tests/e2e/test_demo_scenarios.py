"""Some of the staged scenarios, run as a user runs them: the cause is named first, its effect is what was put in."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tapproxy.simulate.scenarios import effects
from tests.e2e.test_demo import Place, _has_nginx, place

__all__ = ["place"]  # a fixture
pytestmark = pytest.mark.skipif(not _has_nginx(), reason="needs an nginx")


def staged(place: Place, name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the verdict of one scenario; whatever it started and wrote is gone."""
    done = place.run("--scenario", name, *arguments, "--json", "-")
    assert done.stdout, done.stderr
    assert place.files() == []
    assert place.processes() == []
    return done.returncode, json.loads(done.stdout)


def test_an_engine_that_bundles_is_named_from_its_stream_alone(place: Place) -> None:
    code, verdict = staged(place, "bundling", "--requests", "16")
    assert code == 1
    assert effects(verdict)["ok"], effects(verdict)
    assert verdict["scenario"]["effect"]["ms"] == pytest.approx(36.3)


def test_a_second_upstream_that_was_asked_is_a_retry(place: Place) -> None:
    code, verdict = staged(place, "retry", "--requests", "16")
    assert code == 1
    assert effects(verdict)["ok"], effects(verdict)
    assert verdict["paths"]["nginx"]["route"] == "client → outer tap → nginx → inner tap → engine"


def test_a_healthy_engine_is_called_so(place: Place) -> None:
    code, verdict = staged(place, "healthy-direct", "--requests", "16")
    assert (code, verdict["verdict"]) == (0, "healthy")
    assert [cause for cause in verdict["causes"] if cause["severity"] != "info"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")
def test_a_client_far_away_is_told_from_a_slow_engine(place: Place) -> None:
    code, verdict = staged(place, "far-client", "--requests", "16")
    assert code == 1
    assert effects(verdict)["ok"], effects(verdict)
