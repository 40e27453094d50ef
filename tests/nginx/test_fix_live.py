"""What --fix proposes, measured: the file as it is holds events, the patched one streams. All cases: tests/full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nginx.corpus import CASES
from tests.nginx.corpus_live import measure, patched
from tests.nginx.live import ALL

# An answer that is not chunked, and that at the inner of two hops; gzip. TLS is in the tests of `check --live --fix`.
SUBSET = {
    "c14_two_hops_inner_http10": "1.22.1",
    "d01_gzip_es_buffering_on": "1.31.3",
}


@pytest.mark.parametrize(("name", "version"), SUBSET.items(), ids=SUBSET)
def test_a_held_case_streams_once_patched(name: str, version: str, tmp_path: Path) -> None:
    nginx = next((one for one in ALL if one.version == version), None)
    if nginx is None:
        pytest.skip(f"no nginx {version} here")
    (case,) = [one for one in CASES if one.name == name]
    text, fixed = patched(case, nginx.version, tmp_path)
    before = measure(nginx, case, text, tmp_path)
    after = measure(nginx, case, fixed, tmp_path)
    assert (before.streams, after.streams) == (False, True), (before, after)
