"""The geometry of the strip charts."""

from __future__ import annotations

import pytest

from tapproxy.report.timeline import Axis, Group, axis, groups, ruler, strip


def text(t_ms: list[float], span_ms: float, width: int, *, ascii_only: bool = False) -> str:
    return "".join(piece.text for piece in strip(t_ms, span_ms, width, ascii_only=ascii_only))


@pytest.mark.parametrize(
    ("latest", "step"),
    [
        pytest.param(1531.0, 200.0, id="a second and a half"),
        pytest.param(80.0, 10.0, id="just eight steps"),
        pytest.param(0.9, 0.2, id="below a millisecond"),
        pytest.param(61_000.0, 10_000.0, id="a minute"),
    ],
)
def test_an_axis_has_round_ticks_up_to_the_latest_event(latest: float, step: float) -> None:
    found = axis([latest / 2, latest])
    assert found.ticks_ms[1] - found.ticks_ms[0] == pytest.approx(step)
    assert found.ticks_ms[-1] <= latest < found.span_ms


def test_an_axis_of_nothing_is_one_millisecond() -> None:
    assert axis([]) == Axis(1.0, (0.0, 1.0))


def test_events_close_together_are_one_group() -> None:
    assert groups([10.0, 11.0, 12.5, 30.0]) == [Group(10.0, 12.5, 3), Group(30.0, 30.0, 1)]
    assert groups([]) == []


def test_a_group_is_a_burst_from_six_events_on() -> None:
    assert not groups([1.0] * 5)[0].burst
    assert groups([1.0] * 6)[0].burst


def test_an_event_stands_in_the_column_of_its_time() -> None:
    # 10 columns of 10 ms, each with a left and a right half.
    assert text([5.0, 12.0, 37.0], 100.0, 10) == "⢰⡆ ⢰      "


def test_two_events_in_half_a_column_make_a_longer_mark() -> None:
    assert text([11.0, 14.0, 16.0], 100.0, 10) == " ⣷        "


def test_a_burst_is_a_block_and_the_silence_before_it_says_how_long() -> None:
    assert text([900.0] * 73, 1000.0, 60) == "╌╌╌╌╌╌╌╌ nothing for 900 ms, then 73 at once ╌╌╌╌╌╌╌╌╌█     "


@pytest.mark.parametrize("width", [1, 3, 8, 20, 33, 60, 97])
def test_a_strip_is_as_wide_as_asked(width: int) -> None:
    for t_ms in ([], [0.0], [5.0, 500.0], [900.0] * 73, [float(i) for i in range(1000)]):
        assert len(text(t_ms, 1000.0, width)) == width


def test_a_label_never_covers_an_event() -> None:
    t_ms = [100.0, 500.0, *[900.0] * 8]
    marked = {i for i, c in enumerate(text(t_ms, 1000.0, 40)) if c == "█" or 0x2800 < ord(c) <= 0x28FF}
    assert marked == {4, 20, 36}


def test_a_terminal_without_unicode_gets_ascii() -> None:
    found = text([100.0, *[900.0] * 73], 1000.0, 60, ascii_only=True)
    assert found.isascii()
    assert "then 73" in found
    assert found[6] == "."
    assert found[54] == "#"


def test_the_ruler_numbers_its_ticks() -> None:
    assert ruler(Axis(100.0, (0.0, 50.0)), 20) == ("0        50         ", "├─────────┬─────────")


def test_a_ruler_leaves_out_a_number_without_room() -> None:
    numbers, ticks = ruler(Axis(1000.0, (0.0, 100.0, 200.0, 300.0)), 20)
    assert (numbers, ticks) == ("0  200              ", "├─┬─┬─┬─────────────")
