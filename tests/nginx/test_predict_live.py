"""What decides when bytes leave nginx, each asked of a real one: the prediction has to be what is measured.

The text is run as it stands; a case that is measured otherwise is measured twice more, alone, and the most counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from tests.nginx.compare import compare_all
from tests.nginx.live import ALL
from tests.nginx.random_configs import Drawn
from tests.nginx.truth import LISTEN, whole

pytestmark = pytest.mark.skipif(not ALL, reason="no nginx here")
H2C = LISTEN.replace("@H2@ ssl http2", "@H2@ http2")
GZIP = "gzip on; gzip_types text/event-stream;"
SSI = "ssi on; ssi_types text/event-stream;"
OFF = "proxy_buffering off;"
INNER = "    server {{ listen 127.0.0.1:@INNER1@; location / {{ proxy_pass http://127.0.0.1:@ENGINE@; {inner} }} }}\n"


def chain(outer: str, inner: str) -> str:
    """One nginx in front of another, in one file."""
    text = whole(location=outer).replace("@ENGINE@", "@INNER1@")
    return text.removesuffix("}\n") + INNER.format(inner=inner) + "}\n"


ONE: dict[str, str] = {
    "postpone-0": whole(location="postpone_output 0;"),
    "postpone-less-than-a-header": whole(location="postpone_output 100;"),
    "large-header": whole(location=f"add_header X-Large {'a' * 1500};"),
    "ssi-off": whole(location=f"{SSI} {OFF}"),
    "ssi-off-postpone-0": whole(location=f"{SSI} {OFF} postpone_output 0;"),
    "ssi-and-gzip-off": whole(location=f"{SSI} {GZIP} {OFF}"),
    "ssi-of-another-type-off": whole(location=f"ssi on; {OFF}"),
    "gzip-off": whole(location=f"{GZIP} {OFF}"),
    "gzip-for-nobody": whole(location=f"{GZIP} gzip_disable .;"),
    "gzip-of-a-hidden-type": whole(location=f"{GZIP} proxy_hide_header Content-Type;"),
    "rate-after-any-answer": whole(location="limit_rate 2k; limit_rate_after 8m;"),
    "rate-after-some-answers": whole(location="limit_rate 2k; limit_rate_after 100k;"),
    "rate-near-that-of-tokens": whole(location="limit_rate 12k;"),
    "rate-by-set": whole(location="set $limit_rate 2k; limit_rate 1m;"),
    "rate-lifted-by-set": whole(location="set $limit_rate 0; limit_rate 2k;"),
    "rate-and-postpone-0": whole(location="limit_rate 4k; postpone_output 0;"),
    "rate-and-postpone-0-off": whole(location=f"limit_rate 32k; postpone_output 0; {OFF}"),
    "rate-too-high-for-a-pause": whole(location=f"limit_rate 1m; postpone_output 0; {OFF}"),
    "buffer-smaller-than-a-header": whole(location="proxy_buffer_size 64;"),
    "h2-without-tls": whole(listen=H2C),
    "proxied-rate-behind-gzip": chain("proxy_limit_rate 4k;", f"{GZIP} {OFF}"),
    "rate-behind-a-hop": chain(OFF, f"limit_rate 32k; postpone_output 0; {OFF}"),
    "rate-behind-a-hop-that-buffers": chain("", f"limit_rate 32k; postpone_output 0; {OFF}"),
    "gzip-two-hops-on-behind-http10": chain("proxy_http_version 1.0;", f"{GZIP}"),
    "header-with-the-gzip-of-a-hop": chain(OFF, f"{GZIP} {OFF}"),
    "header-with-the-gzip-of-a-hop-buffered": chain("proxy_http_version 1.1;", f"{GZIP} {OFF}"),
    "two-answers-about-buffering": chain("", "add_header X-Accel-Buffering no; add_header X-Accel-Buffering off;"),
    "rate-behind-a-hop-postpone-0": chain("postpone_output 0;", f"limit_rate 32k; postpone_output 0; {OFF}"),
    "large-header-from-a-hop": chain("", f"add_header X-Large {'a' * 1500};"),
}
# What is in the ordinary suite, on both versions; all of it, and with both engines, is in tests/full.
SHORT = ("rate-after-any-answer", "postpone-0", "ssi-off", "header-with-the-gzip-of-a-hop", "h2-without-tls")


def disagreeing(names: Iterable[str], profiles: tuple[str, ...]) -> list[str]:
    drawn = [Drawn(number, ONE[name]) for number, name in enumerate(names)]
    verdicts = asyncio.run(compare_all(drawn, ALL, profiles))
    assert len(verdicts) >= 3 * len(drawn) * len(ALL) * len(profiles) - 4
    return [str(one) for one in verdicts if one.wrong or one.live_differs]


def test_the_prediction_is_what_happens_on_a_real_nginx() -> None:
    assert disagreeing(SHORT, ("vllm",)) == []
