"""Ten thousand requests that nothing but their body names: none joined wrongly, over many seeds."""

from __future__ import annotations

import pytest

from tests.diagnose.test_joining import Crowd, only_certain


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("bodies", "lost", "least"),
    [
        (0, 0.0, 1.0),
        (5000, 0.0, 0.95),
        (100, 0.0, 0.8),
        (1, 0.0, 0.0),
        (1000, 0.05, 0.8),
        (20, 0.1, 0.4),
        (20, 0.3, 0.1),
    ],
)
def test_none_is_wrong(bodies: int, lost: float, least: float, seed: int) -> None:
    only_certain(*Crowd(bodies=bodies, lost=lost, seed=seed).made(), least)
