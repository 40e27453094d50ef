"""What `tapproxy serve` is told: precedence, the example file, and one sentence for each refusal."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tapproxy.config import OPTIONS, ServeConfig, defaults, load_serve_config, parse_duration, parse_size
from tapproxy.core.errors import ConfigError

UPSTREAM = {"upstream": "http://127.0.0.1:8000"}
EXAMPLE = Path(__file__).resolve().parent.parent / "config" / "tapproxy.toml"


def load(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> ServeConfig:
    return load_serve_config(file, {**({} if file else UPSTREAM), **flags}, environ or {})


def toml(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "t.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_an_upstream_alone_is_enough() -> None:
    assert load() == ServeConfig(upstream="http://127.0.0.1:8000")


def test_every_field_has_its_key() -> None:
    assert {option.field for option in OPTIONS} == {field.name for field in fields(ServeConfig)}


def test_the_example_file_holds_the_defaults() -> None:
    assert load(EXAMPLE) == ServeConfig(upstream="http://127.0.0.1:8000")


def test_the_example_file_names_every_key() -> None:
    named = re.findall(r"^(?:# )?([a-z-]+) = ", EXAMPLE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted(["upstream", *defaults()])


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, 'upstream = "http://f:1"\nname = "file"\nadmin-token = "file"\npair-key = "file"\n')
    environ = {"TAPPROXY_ADMIN_TOKEN": "environment", "TAPPROXY_PAIR_KEY": "environment"}
    config = load(file, environ, name="flag", admin_token="flag", workers=None)
    assert (config.upstream, config.name, config.workers) == ("http://f:1", "flag", 1)
    assert (config.admin_token, config.pair_key) == ("flag", "environment")


def test_an_empty_variable_is_none() -> None:
    assert load(environ={"TAPPROXY_ADMIN_TOKEN": ""}).admin_token is None


def test_keys_are_read_with_dashes_or_underscores(tmp_path: Path) -> None:
    file = toml(tmp_path, 'upstream = "http://f:1"\nmax_disk = "2GiB"\nstrict-http = true\n')
    assert (load(file).max_disk_bytes, load(file).strict_http) == (2 << 30, True)
    assert load(max_disk_bytes=1 << 20).max_disk_bytes == 1 << 20


def test_a_slash_after_the_upstream_is_nothing() -> None:
    assert load(upstream="http://h:8000/").upstream == "http://h:8000"


def test_limits_may_be_off() -> None:
    assert load(head_timeout="off").head_timeout_s is None
    assert load(head_timeout="1500ms").head_timeout_s == 1.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1GiB", 1 << 30), ("1.5KiB", 1536), ("500MB", 500_000_000), ("4096", 4096), (4096, 4096), ("2g", 2 << 30)],
)
def test_sizes(value: object, expected: int) -> None:
    assert parse_size(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("1s", 1.0), ("500ms", 0.5), ("2m", 120.0), ("1.5h", 5400.0), (10, 10.0), (0.25, 0.25)]
)
def test_durations(value: object, expected: float) -> None:
    assert parse_duration(value) == expected


REFUSED = [
    pytest.param({"workers": 0}, "--workers is 0: expected a whole number from 1 to 256", id="no_workers"),
    pytest.param({"workers": True}, "--workers is True, a boolean: expected a whole number from 1 to 256", id="bool"),
    pytest.param({"listen": "9000"}, "--listen is '9000', which has no port: expected HOST:PORT such as "
                 "127.0.0.1:9000 or [::1]:9000", id="listen"),
    pytest.param({"max_disk": "1 potato"}, "--max-disk is '1 potato': expected a size such as 1GiB, 500MB or 4096",
                 id="size"),
    pytest.param({"max_disk": "1KiB"}, "--max-disk is 1024 bytes, which holds hardly a record: "
                 "expected at least 16KiB", id="small"),
    pytest.param({"connect_timeout": "10 parsecs"}, "--connect-timeout is '10 parsecs': "
                 "expected a duration such as 30s, 500ms or 2m", id="duration"),
    pytest.param({"connect_timeout": "0s"}, "--connect-timeout is 0s: expected a duration above 0, such as 10s",
                 id="zero"),
    pytest.param({"name": "a b"}, "--name is 'a b': expected 1 to 64 letters, digits, dots, dashes or underscores",
                 id="name"),
    pytest.param({"admin_token": "two words"}, "--admin-token is empty or holds a space or a non-ASCII character: "
                 "expected printable ASCII", id="token"),
    pytest.param({"upstream_ca": "/nonexistent/ca.pem"}, "--upstream-ca is '/nonexistent/ca.pem', which cannot be "
                 "read: No such file or directory", id="ca"),
    pytest.param({"admin": "0.0.0.0:9001"}, "--admin is 0.0.0.0:9001, which others can reach, and there is no token: "
                 "give --admin-token (or TAPPROXY_ADMIN_TOKEN), or bind it to 127.0.0.1", id="open_admin"),
    pytest.param({"admin": "127.0.0.1:9000"}, "--listen and --admin are both 127.0.0.1:9000: "
                 "give the admin port another one", id="same_port"),
    pytest.param({"upstream": "http://localhost:9000"}, "--upstream http://localhost:9000 is the tap's own --listen "
                 "address: name the engine's", id="loop"),
    pytest.param({"tls_cert": __file__}, "--tls-cert is given without --tls-key: TLS on the listener needs both",
                 id="no_key"),
    pytest.param({"insecure": True, "upstream_ca": __file__}, "--insecure and --upstream-ca are both given: "
                 "with no verification the CA is not used, drop one", id="insecure_ca"),
    pytest.param({"lissten": "x"}, "the command line has an unknown key 'lissten': did you mean listen?", id="flag"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_a_wrong_flag_is_refused_in_one_sentence(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**flags)
    assert str(caught.value) == message


def test_no_upstream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^no upstream is given: .* as --upstream http://127\.0\.0\.1:8000$"):
        load_serve_config(None, {}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            'upstraem = "http://h:1"', "FILE has an unknown key 'upstraem': did you mean upstream?", id="misspelt"
        ),
        pytest.param("workers = '2'", "workers in FILE is '2', a string: expected a whole number from 1 to 256"),
        pytest.param("insecure = 1", "insecure in FILE is 1, an integer: expected true or false", id="integer"),
        pytest.param("listen = 9000", 'listen in FILE is 9000, an integer: expected a string in quotes, such as "…"'),
        pytest.param("upstream = [", "FILE is not valid TOML: invalid value (at end of document)", id="cut"),
        pytest.param(
            "upstream = 'http://h:1'\nworkers == 2",
            "FILE is not valid TOML: invalid value (at line 2, column 10)",
            id="broken",
        ),
        pytest.param(b"name = 'a'\nlisten = '\xff'", "FILE is not UTF-8 text (line 2): save it as UTF-8", id="latin"),
        pytest.param(
            "max-disk = '1GiB'\nmax_disk = '2GiB'",
            "FILE gives max-disk twice, with a dash and with an underscore: keep one",
            id="twice",
        ),
        pytest.param("admin-token = 5", "admin-token in FILE is not a string: expected one in quotes", id="token"),
        pytest.param("max-disk = {a = 1}", "max-disk in FILE is {'a': 1}, a table: expected a size such as 1GiB, "
                     "500MB or 4096", id="table"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value) == message.replace("FILE", str(file))


def test_an_unknown_key_near_nothing_lists_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has an unknown key 'zzzz': the keys are upstream, listen, admin,"):
        load(toml(tmp_path, "zzzz = 1"))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the configuration '.*' cannot be read: Is a directory$"):
        load(tmp_path)


def test_no_secret_is_shown() -> None:
    config = load(admin_token="s3cret", pair_key="s3cret")
    assert "s3cret" not in repr(config)


def test_an_open_admin_port_with_a_token_is_allowed() -> None:
    assert load(admin="0.0.0.0:9001", admin_token="t").admin == "0.0.0.0:9001"


def test_port_zero_may_be_given_twice() -> None:
    assert load(listen="127.0.0.1:0", admin="127.0.0.1:0").listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("given", "pages"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000/metrics",)),
        (["http://a:1/metrics", "https://b/v1/metrics"], ("http://a:1/metrics", "https://b/v1/metrics")),
        ([], ()),
    ],
)
def test_the_pages_of_engines_are_one_url_or_several(given: object, pages: tuple[str, ...]) -> None:
    assert load(engine_metrics=given).engine_metrics == pages


def test_a_file_names_pages_processes_and_the_interval(tmp_path: Path) -> None:
    text = 'upstream = "http://f:1"\nengine-metrics = "http://f:1/metrics"\nengine-pid = [7, 8, 7]\ngpu = true\n'
    config = load(toml(tmp_path, text + 'sample-interval = "500ms"\n'))
    assert (config.engine_metrics, config.engine_pid) == (("http://f:1/metrics",), (7, 8))
    assert (config.gpu, config.sample_interval_s) == (True, 0.5)
    assert load(toml(tmp_path, 'upstream = "http://f:1"\nengine-pid = 7\n')).engine_pid == (7,)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("engine_metrics", "127.0.0.1:8000", "--engine-metrics is '127.0.0.1:8000', which has no scheme"),
        ("engine_metrics", "ftp://a/m", "whose scheme is 'ftp'"),
        ("engine_metrics", "http://:8000/", "whose host or port is none"),
        ("engine_metrics", "http://a:99999/", "which is not a URL"),
        ("engine_metrics", "http://me:s3cret@a b/", "is 'http://a b/', which holds a space"),
        ("engine_metrics", ["http://a/metrics", "http://a"], "names 'http://a/metrics' twice"),
        ("engine_metrics", 5, "is 5, an integer: expected a URL in quotes, or a list of them"),
        ("engine_metrics", [f"http://a:{i}" for i in range(1, 66)], "names 65 pages: expected at most 64"),
        ("engine_pid", 0, "--engine-pid is 0, an integer: expected the number of a process"),
        ("engine_pid", "vllm", "expected the number of a process"),
        ("engine_pid", True, "expected the number of a process"),
        ("sample_interval", "1ms", "--sample-interval is 1ms: expected 100ms to 1h"),
        ("sample_interval", "2h", "expected 100ms to 1h"),
    ],
)
def test_evidence_that_cannot_be_taken_is_refused_at_once(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{key: value})
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_the_credentials_of_a_page_are_in_no_repr() -> None:
    assert "s3cret" not in repr(load(engine_metrics="http://me:s3cret@a/"))
