"""Numbers as text."""

from __future__ import annotations

import pytest

from tapproxy.report.figures import at, milliseconds, number, quantity, share, wanted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(None, "–", id="unknown is a dash"),
        pytest.param(0, "0.00", id="zero is a number"),
        pytest.param(0.314, "0.31", id="below one"),
        pytest.param(0.996, "1.0", id="rounds up to one"),
        pytest.param(15.04, "15.0", id="tens"),
        pytest.param(99.96, "100", id="rounds up to a hundred"),
        pytest.param(1126.2, "1126", id="thousands"),
        pytest.param(-0.001, "0.00", id="no minus before nothing"),
        pytest.param(-3.7, "−3.7", id="negative"),
    ],
)
def test_a_number_keeps_about_three_figures(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_difference_shows_its_sign() -> None:
    assert milliseconds(1080.6, signed=True) == "+1081 ms"
    assert milliseconds(-2.5, signed=True) == "−2.5 ms"
    assert milliseconds(None, signed=True) == "–"


def test_a_whole_number_in_a_sentence_has_no_decimals() -> None:
    assert quantity(73, "events") == "73 events"
    assert quantity(5.0, "ms") == "5 ms"
    assert quantity(0.25, None) == "0.25"
    assert quantity(0.25, "share") == "25 %"
    assert quantity(None, "ms") == "–"


def test_a_share_is_percent_and_unknown_a_dash() -> None:
    assert share(0.963) == "96 %"
    assert share(None) == "–"


def test_a_missing_branch_is_unknown() -> None:
    assert at({"a": {"b": 1}}, "a", "b") == 1
    assert at({"a": None}, "a", "b") is None
    assert at({"a": 3}, "a", "b") is None


def test_requests_are_wanted_only_where_some_are_missing() -> None:
    assert wanted({"need": {"p95": 118}}, "p95") == 118
    assert wanted({"need": {"p95": 0}}, "p95") is None
    assert wanted({"need": {}}, "p95") is None
    assert wanted(None, "p95") is None
