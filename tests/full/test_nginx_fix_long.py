"""Every held case of the corpus, on both nginx: held as it is, and streaming with the patch of --fix.

pytest -o addopts= tests/full/test_nginx_fix_long.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.nginx.sandbox import Nginx
from tests.nginx.corpus import CASES, Case
from tests.nginx.corpus_live import measure, patched
from tests.nginx.live import ALL, label

HELD = [(case, nginx) for case in CASES for nginx in ALL if case.truth["verdict"].get(nginx.version) == "held"]


@pytest.mark.parametrize(("case", "nginx"), HELD, ids=[f"{case.name}-{label(nginx)}" for case, nginx in HELD])
def test_a_held_case_streams_once_patched(case: Case, nginx: Nginx, tmp_path: Path) -> None:
    text, fixed = patched(case, nginx.version, tmp_path)
    before = measure(nginx, case, text, tmp_path)
    after = measure(nginx, case, fixed, tmp_path)
    assert (before.streams, after.streams) == (False, True), (before, after)
    (tmp_path / "nginx.conf").write_text(fixed)
    again = case.examine(tmp_path / "nginx.conf", nginx.version)
    assert [one.rule for one in again.findings if one.severity == "error"] == []
