"""NAME=URL."""

from __future__ import annotations

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load.path import parse


@pytest.mark.parametrize(
    ("text", "origin", "target"),
    [
        ("d=http://127.0.0.1:8000", "http://127.0.0.1:8000", "/v1/chat/completions"),
        ("d=http://127.0.0.1:8000/", "http://127.0.0.1:8000", "/v1/chat/completions"),
        ("d=http://h:8000/v1", "http://h:8000", "/v1/chat/completions"),
        ("d=https://h/openai/v1/", "https://h", "/openai/v1/chat/completions"),
        ("d=https://[::1]:8443/a/b", "https://[::1]:8443", "/a/b/v1/chat/completions"),
        ("d=unix:/run/engine.sock", "unix:/run/engine.sock", "/v1/chat/completions"),
    ],
)
def test_a_base_address_leads_to_its_api(text: str, origin: str, target: str) -> None:
    (path,) = parse([text])
    assert (path.name, path.origin, path.api_target("chat")) == ("d", origin, target)
    assert path.api_target("completions") == target.replace("/chat", "")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["http://127.0.0.1:8000"], "NAME=URL"),
        (["=http://127.0.0.1:8000"], "is named"),
        (["a b=http://127.0.0.1:8000"], "is named"),
        (["a=127.0.0.1:8000"], "no scheme"),
        (["a=ftp://h"], "scheme"),
        (["a=http://h:99999"], "port"),
        (["a=http://h/v1?key=secret"], "query"),
        (["a=http://h?key=secret"], "query"),
        (["a=http://user:secret@h/v1"], "user name or password"),
        (["http://user:secret@h/v1"], "NAME=URL"),
        (["a=http://h", "a=http://g"], "given twice"),
        (["a=unix:relative"], "unix"),
    ],
)
def test_what_is_no_path_is_refused_without_showing_a_secret(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(texts)
    assert "secret" not in str(caught.value)
