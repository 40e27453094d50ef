"""The screen, as exact text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tapproxy.report.console import clean
from tapproxy.report.judgement import bar_text, diff_lines
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


@pytest.mark.parametrize("width", [60, 72, 80, 91, 92, 100, 200])
def test_no_line_is_wider_than_the_terminal(result: dict[str, Any], width: int) -> None:
    assert max(len(line) for line in screen(result, width).splitlines()) <= min(width, 110)


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


def test_a_diff_is_shown_without_its_heads() -> None:
    assert diff_lines("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n c\n") == ["-a", "+b", " c"]
