"""What --fix proposes, measured: the file as it is holds events, the patched one streams. All cases: tests/full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.nginx.sandbox import Nginx
from tests.nginx.corpus import CASES
from tests.nginx.corpus_live import measure, patched
from tests.nginx.live import ALL, label

# One of each mechanism: TLS, an answer that is not chunked, gzip, the inner of two hops.
SUBSET = (
    "a03_default_tls_h1", "a15_http10_explicit_on", "d01_gzip_es_buffering_on", "c14_two_hops_inner_http10",
)  # fmt: skip


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
@pytest.mark.parametrize("name", SUBSET)
def test_a_held_case_streams_once_patched(name: str, nginx: Nginx, tmp_path: Path) -> None:
    (case,) = [one for one in CASES if one.name == name]
    text, fixed = patched(case, nginx.version, tmp_path)
    before = measure(nginx, case, text, tmp_path)
    after = measure(nginx, case, fixed, tmp_path)
    assert (before.streams, after.streams) == (False, True), (before, after)
