"""The page: self-contained, complete, and closed to text that others wrote."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tapproxy.report import html

PAYLOADS = [
    pytest.param("<script>alert(1)</script>", id="script"),
    pytest.param("</script><script>alert(1)</script>", id="end of script"),
    pytest.param('"><img src=x onerror=alert(1)>', id="end of attribute"),
    pytest.param("' onmouseover='alert(1)", id="single quote"),
    pytest.param("<!--<script>", id="comment"),
    pytest.param("{{ 7 * 7 }}{% raw %}", id="template"),
    pytest.param("</style><svg onload=alert(1)>", id="end of style"),
    pytest.param("<a href='javascript:alert(1)'>x</a>", id="markup that plotly reads"),
    pytest.param("\x1b]0;owned\x07\u202e\ud800", id="controls, order and a half character"),
]


class Skeleton(HTMLParser):
    """The page's tags with the names of their attributes, and its text, scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self._script: str | None = None
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._inside != "style":
            self.text.append(data)


def poisoned(value: Any, payload: str) -> Any:
    """The same result with every text of it, keys of paths included, ending in the payload."""
    if isinstance(value, dict):
        return {
            (f"{key}{payload}" if key in ("nginx", "direct", "proxy", "kernel") else key): poisoned(item, payload)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item, payload) for item in value]
    return value.rstrip("\n") + payload if isinstance(value, str) and value != "degraded" else value


def test_the_page_needs_nothing_but_itself(result: dict[str, Any]) -> None:
    page = Skeleton(html.render(result))
    assert [(n, v) for n, v in page.attributes if n in ("src", "href", "srcset", "action", "data")] == []
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "img", "object", "embed", "base", "form")]
    assert "url(" not in html._own("page.css")
    assert "@import" not in html._own("page.css")


def test_the_page_is_below_six_megabytes(result: dict[str, Any]) -> None:
    for requests in result["timelines"].values():
        requests += [copy.deepcopy(requests[0]) for _ in range(200)]
    assert len(html.render(result).encode()) < 6_000_000


def test_only_the_two_scripts_named_in_the_policy_may_run(result: dict[str, Any]) -> None:
    page = Skeleton(html.render(result))
    policy = next(v for n, v in page.attributes if n == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "script-src 'unsafe" not in policy
    running = [text for kind, text in page.scripts if kind is None]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert len(hashes) == 2


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_of_others_never_becomes_markup(result: dict[str, Any], payload: str) -> None:
    clean, dirty = Skeleton(html.render(result)), Skeleton(html.render(poisoned(result, payload)))
    assert dirty.tags == clean.tags
    assert [text for kind, text in dirty.scripts if kind is None] == [t for k, t in clean.scripts if k is None]
    assert {name for name, _ in dirty.attributes} == {name for name, _ in clean.attributes}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_of_others_is_shown_as_text(result: dict[str, Any], payload: str) -> None:
    shown = "".join(Skeleton(html.render(poisoned(result, payload))).text)
    printable = payload if "\x1b" not in payload else "�]0;owned���"
    for word in ("direct", "hold per event, P50", "serves the stream.", "loopback, no retransmit", "6.18"):
        assert word + printable in shown


def test_names_in_the_plot_carry_no_markup(result: dict[str, Any]) -> None:
    result["timelines"] = {"<b>x</b></script>": [{"t_ms": [1.0]}]}
    page = Skeleton(html.render(result))
    data = json.loads(next(text for kind, text in page.scripts if kind == "application/json"))
    assert data["series"][0]["name"] == "&lt;b&gt;x&lt;/b&gt;&lt;/script&gt;"


def test_the_page_says_what_the_terminal_says(result: dict[str, Any]) -> None:
    shown = " ".join("".join(Skeleton(html.render(result)).text).split())
    for words in (
        "✗ degraded",
        "proxy.response_buffering",
        "+1081 ms TTFT P50",
        "97 % confidence",
        "1126 ms of nothing, then 73 at once",
        "nginx/demo-default.conf:21",
        "+ proxy_buffering off;",
        "engine.prefill40.0",
        "network.downstream––",
        "+0.31 ms TTFT at P50, 130 requests",
        "0.09 ms forward delay P50",
        "✓ under 1 ms at P50",
        "nginx 1.22.1",
    ):
        assert words in shown


def test_unknown_is_a_dash_in_the_table(result: dict[str, Any]) -> None:
    result["paths"] = {"direct": {"requests": 0, "errors": {}, "ttft_ms": None}}
    shown = " ".join("".join(Skeleton(html.render(result)).text).split())
    assert "failed P50P95P50P95P50P95P50P95 direct–––––––––00" in shown


@pytest.mark.parametrize("keep", [("verdict",), ("verdict", "paths"), ("verdict", "timelines"), ()])
def test_half_a_result_makes_a_page_too(result: dict[str, Any], keep: tuple[str, ...]) -> None:
    page = html.render({key: result[key] for key in keep})
    assert page.rstrip().endswith("</html>")


def with_tpot(result: dict[str, Any]) -> dict[str, Any]:
    """TPOT as a buffering hop leaves it: what the engine takes, less what the hop takes away."""
    stage = {"bound_ms": 0.0, "source": "paired taps"}
    stages = {
        "network.downstream": None,
        "proxy": {"ms": -15.0, **stage},
        "engine.decode": {"ms": 20.0, **stage},
    }
    band = {"total_ms": 5.0, "requests": 13, "unexplained_ms": 0.0, "stages": stages}
    result["budget"]["tpot"] = {"p50": band, "p95": {"total_ms": None, "requests": 13, "stages": {}}}
    return result


def test_a_negative_bar_ends_at_the_line_where_positive_ones_begin(result: dict[str, Any]) -> None:
    page = html.render(with_tpot(result))
    assert '<rect class="negative" x="0.0" width="42.9" height="10"/><path d="M42.9 -6V16"/>' in page
    assert '<rect x="42.9" width="57.1" height="10"/><path d="M42.9 -6V16"/>' in page
    # TTFT has none, and no line.
    assert '<rect x="0.0" width="100.0" height="10"/></svg>' in page


def test_each_budget_says_what_could_not_be_observed_of_it(result: dict[str, Any]) -> None:
    result["not_observable"] = ["network.downstream", "engine.frontend"]
    result["budget"]["ttft"]["p50"]["stages"]["network.downstream"] = {"ms": 0.1, "bound_ms": 0.1, "source": "ping"}
    shown = " ".join("".join(Skeleton(html.render(with_tpot(result))).text).split())
    ttft, tpot = shown.split("Where TPOT goes")
    assert "Not observable from here: engine.frontend." in ttft
    assert "Not observable from here: network.downstream." in tpot


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
@pytest.mark.parametrize("width", [320, pytest.param(420, marks=pytest.mark.long)])
def test_on_a_telephone_the_page_does_not_scroll_sideways(result: dict[str, Any], width: int, tmp_path: Path) -> None:
    tell = "<script>onload = () => parent.postMessage(document.documentElement.scrollWidth, '*')</script>"
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html.render(with_tpot(result)))
    (tmp_path / "page.html").write_text(page.replace("</body>", tell + "</body>"), encoding="utf-8")
    frame = f'<iframe src="page.html" style="border:0;width:{width}px;height:20000px"></iframe>'
    listen = "<script>onmessage = event => { document.title = `wide ${event.data}` }</script>"
    (tmp_path / "frame.html").write_text(f"<!doctype html>{listen}{frame}", encoding="utf-8")
    browser = (
        "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=3000 --window-size=900,1200 --dump-dom"
    )
    done = subprocess.run(
        [*browser.split(), f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = re.search(r"wide (\d+)", done.stdout)
    assert found is not None, done.stderr
    assert int(found[1]) <= width


def test_a_healthy_page_says_so_in_words(result: dict[str, Any]) -> None:
    result |= {"verdict": "healthy", "causes": []}
    assert "Nothing on the way holds the stream" in html.render(result)


def test_writing_leaves_the_page_and_nothing_else(result: dict[str, Any], tmp_path: Path) -> None:
    html.write(result, tmp_path / "out.html")
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]
    assert (tmp_path / "out.html").read_text(encoding="utf-8") == html.render(result)


def test_an_unwritable_place_leaves_nothing(result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="out"):
        html.write(result, tmp_path / "missing" / "out.html")


def test_what_is_only_worth_knowing_is_no_answer_to_why(result: dict[str, Any]) -> None:
    note = result["causes"][0] | {"cause": "engine.prefill", "severity": "info"}
    page = html.render(result | {"verdict": "healthy", "causes": [note]})
    assert "Nothing on the way holds the stream" in page
    assert "Worth knowing: <code>engine.prefill</code>" in page
