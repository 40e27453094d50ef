"""The screen, as exact text."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tapproxy.report.console import clean
from tapproxy.report.judgement import bar_text, diff_lines, signed_bars
from tapproxy.report.terminal import show

GOLDEN = Path(__file__).parent.parent / "data" / "report"


def screen(result: dict[str, Any], width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    show(result, Console(file=out, width=width, force_terminal=False))
    out.flush()
    return "\n".join(line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()) + "\n"


@pytest.mark.parametrize("width", [100, 72])
def test_the_screen_is_this_text(result: dict[str, Any], width: int) -> None:
    assert screen(result, width) == (GOLDEN / f"demo-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [20, 40, 60, 72, 80, 91, 92, 100, 200])
def test_no_line_is_wider_than_the_terminal(result: dict[str, Any], width: int) -> None:
    assert max(len(line) for line in screen(result, width).splitlines()) <= min(width, 110)


def table(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("in ms"))
    return lines[first : lines.index("", first)]


@pytest.mark.parametrize("width", [72, 80, 100])
def test_tokens_per_second_stand_in_the_table(result: dict[str, Any], width: int) -> None:
    heads, _, direct, *_ = table(screen(result, width))
    assert heads.split()[-2:] == ["tokens/s", "failed"]
    assert direct.split()[-2:] == ["810", "0"]


@pytest.mark.parametrize(
    ("width", "last", "left_out"),
    [
        pytest.param(71, "tokens/s", "failed", id="71"),
        pytest.param(60, "hold", "tokens/s, failed", id="60"),
        pytest.param(50, "end", "hold, tokens/s, failed", id="50"),
        pytest.param(24, "TTFT", "inter-chunk, end to end, hold, tokens/s, failed", id="24"),
    ],
)
def test_without_room_columns_are_left_out_from_the_right_and_named(
    result: dict[str, Any], width: int, last: str, left_out: str
) -> None:
    heads, under, *rows = table(screen(result, width))
    assert heads.split()[-1] == last
    assert [row.split()[0] for row in rows[:4]] == ["direct", "tap", "✗", "fixed"]
    assert {len(row.removeprefix("✗").split()) for row in rows[:4]} == {len(under.split()) + (last == "tokens/s")}
    assert " ".join(rows[4:]) == f"no room at {width} columns for: {left_out}"


def test_failed_requests_are_told_even_where_their_column_has_no_room(result: dict[str, Any]) -> None:
    result["paths"]["nginx"]["errors"] = {"timeout": 3}
    assert " ".join(table(screen(result, 60))[-2:]).endswith("tokens/s, failed; 3 requests failed")


def test_long_names_of_paths_make_no_line_wrap(result: dict[str, Any]) -> None:
    result["paths"]["a-path-with-a-very-long-name"] = result["paths"].pop("tap")
    for width in (60, 72, 80, 100):
        assert len(table(screen(result, width))) == (6 if width >= 72 else 7)


def test_the_screen_fits_a_screen(result: dict[str, Any]) -> None:
    assert len(screen(result, 100).splitlines()) <= 44


def test_without_colour_the_same_words_stand(result: dict[str, Any]) -> None:
    coloured = io.StringIO()
    console = Console(file=coloured, width=100, force_terminal=True, color_system="truecolor", no_color=True)
    show(result, console)
    assert "\x1b[3" not in coloured.getvalue()  # no colour; bold and dim are left
    assert "✗ DEGRADED" in coloured.getvalue()


def test_a_terminal_of_ascii_gets_ascii_pictures(result: dict[str, Any]) -> None:
    text = screen(result, 100, encoding="ascii")
    assert "x DEGRADED" in text
    assert "then 73 at once" in text
    assert not set("█⣿╌✗✓") & set(text)


def piped(result: dict[str, Any], path: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The screen by a program of its own, its stdout a pipe (or ``path``)."""
    text = (
        "import json, sys; from tapproxy.report import console, terminal; result = json.load(sys.stdin)\n"
        "with console.writing('it is elsewhere'): terminal.show(result, console.stdout())"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONIOENCODING")}
    command = [sys.executable, "-c", text]
    if path:
        command = ["sh", "-c", f'exec "$@" >{path}', "sh", *command]
    return subprocess.run(
        command, input=json.dumps(result).encode(), capture_output=True, check=False, env=kept | environment, timeout=60
    )  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "width"), [({}, 100), ({"COLUMNS": "80"}, 80), ({"COLUMNS": "0"}, 100), ({"COLUMNS": "wide"}, 100)]
)
def test_in_a_pipe_it_is_a_hundred_wide_or_what_columns_says(
    result: dict[str, Any], columns: dict[str, str], width: int
) -> None:
    assert max(len(line) for line in piped(result, **columns).stdout.decode().splitlines()) == width


def test_an_encoding_without_our_signs_gets_others_of_their_width(result: dict[str, Any]) -> None:
    result["notes"] = ["größer → 3 ±1 − 2"]
    done = piped(result, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert "gr??er > 3 ~1 - 2" in text
    heads, _, direct, *_ = table(text)
    assert len(heads.rstrip()) == len(direct.rstrip())
    assert "x DEGRADED" in text


def test_a_full_disk_behind_stdout_is_one_sentence(result: dict[str, Any]) -> None:
    done = piped(result, "/dev/full")
    assert b"MeasureError: stdout cannot be written: No space left on device; it is elsewhere" in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_a_closed_stdout_is_no_fault(result: dict[str, Any]) -> None:
    done = piped(result, "&-")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        pytest.param("plain [bold]text[/]", "plain [bold]text[/]", id="markup is text"),
        pytest.param("a\x1b[31mb", "a�[31mb", id="colour"),
        pytest.param("a\x1b]8;;http://x\x07b", "a�]8;;http://x�b", id="hyperlink"),
        pytest.param("a\nb\tc\rd", "a b c d", id="lines and tabs"),
        pytest.param("a\u202eb\u200bc", "a�b�c", id="order and zero width"),
        pytest.param("a\x9bb", "a�b", id="eight-bit control"),
    ],
)
def test_text_of_others_cannot_steer_the_terminal(raw: str, shown: str) -> None:
    assert clean(raw) == shown


def test_a_change_that_was_tried_shows_what_came_of_it(result: dict[str, Any]) -> None:
    words = "Measured with this change (path fixed), P50: TTFT 1126 → 46.1 ms"
    assert words not in screen(result)
    figures = {"ttft_ms": {"before": {"p50": 1126.2}, "after": {"p50": 46.1}}, "hold_ms": {"before": {"p50": None}}}
    result["causes"][0]["fix"]["measured"] = {"path": "fixed", **figures}
    assert words in screen(result)
    result["causes"][0]["fix"]["measured"] = None
    assert "Measured with" not in screen(result)


def test_controls_of_a_result_reach_no_terminal(result: dict[str, Any]) -> None:
    result["paths"]["\x1b[2Jevil[bold]"] = result["paths"].pop("direct")
    result["timelines"]["\x1b[2Jevil"] = result["timelines"].pop("direct")
    result["causes"][0]["advice"] = "do\x1b]0;title\x07 it"
    result["causes"][0]["fix"]["diff"] = "+\x1b[31m proxy_buffering off;"
    result["notes"] = ["see\x9b31m"]
    text = screen(result)
    assert not {c for c in text if ord(c) < 32 and c != "\n"} | ({"\x9b"} & set(text))
    assert "evil[bold]" in text


def test_unknown_is_a_dash(result: dict[str, Any]) -> None:
    result["paths"] = {"direct": {"requests": 3, "errors": {"connect": 3}}}
    line = next(line for line in screen(result).splitlines() if line.startswith("  direct"))
    assert line.split() == ["direct", *["–"] * 9, "3"]


def test_too_few_requests_for_p95_says_how_many_more(result: dict[str, Any]) -> None:
    for path in result["paths"].values():
        path["ttft_ms"]["p95"] = None
        path["ttft_ms"]["need"] = {"p95": 118}
    assert "too few requests for it; 118 more on each path would give it." in screen(result)


@pytest.mark.parametrize("keep", [("verdict",), ("paths",), ("timelines",), ("tap",), ()])
def test_half_a_result_prints_too(result: dict[str, Any], keep: tuple[str, ...]) -> None:
    assert screen({key: result[key] for key in keep})


def test_a_tap_that_costs_more_than_its_limit_says_so_in_words(result: dict[str, Any]) -> None:
    result["tap"]["within_limit"] = False
    assert "✗ NOT under 1 ms at P50" in screen(result)


def test_a_bar_grows_in_eighths() -> None:
    assert bar_text(1.0, 4) == "████"
    assert bar_text(0.5, 1) == "▌"
    assert bar_text(0.001, 4) == ""
    assert bar_text(0.5, 4, plain=True) == "##"


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        pytest.param([4.0, 2.0, 0.0], ["########", "####", ""], id="none negative"),
        pytest.param([4.0, -4.0, 0.0], ["    |###", "####|", "    |"], id="both ways"),
        pytest.param([-15.7, 5.0], ["#####|", "     |##"], id="mostly negative"),
        pytest.param([40.0, -0.01], ["########", ""], id="a negative one too small to draw"),
        pytest.param([0.0, 0.0], ["", ""], id="nothing"),
    ],
)
def test_a_negative_bar_goes_the_other_way(values: list[float], bars: list[str]) -> None:
    assert signed_bars(values, 8, plain=True) == bars


def test_a_stage_seen_in_this_budget_alone_is_said_to_be_unseen_in_the_other(result: dict[str, Any]) -> None:
    result["not_observable"] = ["network.downstream", "proxy"]
    assert "not observable from here: network.downstream, proxy (in TPOT)" in screen(result, 80)


def test_a_diff_is_shown_without_its_heads() -> None:
    assert diff_lines("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n c\n") == ["-a", "+b", " c"]


def test_what_is_only_worth_knowing_is_no_answer_to_why(result: dict[str, Any]) -> None:
    note = result["causes"][0] | {"cause": "engine.prefill", "severity": "info", "advice": "Shorten prompts."}
    lines = screen(result | {"verdict": "healthy", "causes": [note]}).splitlines()
    (word,) = (line for line in lines if "HEALTHY" in line)
    assert "engine.prefill" not in word
    assert any("worth knowing: engine.prefill: Shorten prompts." in line for line in lines)
