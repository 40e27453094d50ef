"""What `tapproxy serve` is told: one frozen value, read from a TOML file, the environment and the flags.

Flags win over the environment (the two secrets only), that over the file, that over the defaults. Keys of the
file are flat and are the flags' names. Every refusal is a ConfigError of one sentence: what was found, what
was expected, what to do. No message and no repr shows a token, a key or a password.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapproxy.core.address import is_loopback, parse_address, parse_page, parse_upstream, quote, same_socket, shown
from tapproxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything a tap is told. Limits that are None are off."""

    upstream: str
    listen: str = "127.0.0.1:9000"
    admin: str = "127.0.0.1:9001"
    name: str = "tap"
    data: Path = Path("tapproxy-data")
    workers: int = 1
    max_disk_bytes: int = 1 << 30
    admin_token: str | None = field(default=None, repr=False)
    pair_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0
    # Engines take minutes for a long prompt and may think between tokens: no limit unless asked for.
    head_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    shutdown_grace_s: float = 30.0
    # Longer than nginx keeps its side (60 s), so that nginx never reuses a connection we just closed.
    client_keepalive_s: float = 75.0
    # Shorter than vLLM keeps its side (5 s), for the same reason.
    upstream_keepalive_s: float = 3.0
    header_timeout_s: float = 30.0
    insecure: bool = False
    upstream_ca: Path | None = None
    rewrite_host: bool = False
    strict_http: bool = False
    mirror_connections: bool = False
    # Costs some 9 µs of CPU an event, a third of what one costs without.
    ack_stamps: bool = False
    self_test: bool = False
    # Answers a probe's requests itself, where they bear a key that was asked for on the admin port.
    allow_probe: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # Evidence beside the traffic, read by the parent process.
    engine_metrics: tuple[str, ...] = field(default=(), repr=False)
    engine_pid: tuple[int, ...] = ()
    gpu: bool = False
    sample_interval_s: float = 1.0


# --- values ------------------------------------------------------------------------------------------------

# A letter alone is nginx's and means the binary unit.
_SIZES = {"": 1, "b": 1} | {p: 1 << (10 * i) for i, p in enumerate("kmgt", 1)}
_SIZES |= {f"{p}ib": 1 << (10 * i) for i, p in enumerate("kmgt", 1)}
_SIZES |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_size(value: object, where: str = "the size") -> int:
    """``1GiB``, ``500MB``, ``4096`` → bytes."""
    expected = "expected a size such as 1GiB, 500MB or 4096"
    return int(_with_unit(value, _SIZES, where, expected) + 0.5)


def parse_duration(value: object, where: str = "the duration") -> float:
    """``1s``, ``500ms``, ``2m``; a bare number is seconds."""
    return _with_unit(value, _SECONDS, where, "expected a duration such as 30s, 500ms or 2m")


def _with_unit(value: object, units: Mapping[str, float], where: str, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where} is {_typed(value)}: {expected}")
    text = value if isinstance(value, str) else f"{value:f}" if isinstance(value, float) else str(value)
    match = _NUMBER_UNIT.match(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{where} is {quote(str(value))}: {expected}")
    number = float(match[1]) * factor
    if not math.isfinite(number) or number > 1e18:
        raise ConfigError(f"{where} is {quote(str(value))}, which is beyond any use: {expected}")
    return number


def _typed(value: object) -> str:
    """A value of the wrong type, named as TOML names it."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return f"{value!r:.80}, {names.get(type(value), type(value).__name__)}"


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f'{where} is {_typed(value)}: expected a string in quotes, such as "…"')
    return value


def _address(value: object, where: str) -> str:
    text = _text(value, where)
    parse_address(text, where)
    return text


def _upstream(value: object, where: str) -> str:
    text = _text(value, where)
    return text if parse_upstream(text, where).scheme == "unix" else text.rstrip("/")


def _name(value: object, where: str) -> str:
    text = _text(value, where)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise ConfigError(f"{where} is {quote(text)}: expected 1 to 64 letters, digits, dots, dashes or underscores")
    return text


def _secret(value: object, where: str) -> str:
    # Never shown, whatever is wrong with it.
    if not isinstance(value, str):
        raise ConfigError(f"{where} is not a string: expected one in quotes")
    if not re.fullmatch(r"[\x21-\x7e]{1,4096}", value):
        raise ConfigError(f"{where} is empty or holds a space or a non-ASCII character: expected printable ASCII")
    return value


def _path(value: object, where: str) -> Path:
    text = os.fspath(value) if isinstance(value, Path) else _text(value, where)
    if not text or "\0" in text:
        raise ConfigError(f"{where} is empty: expected a path")
    return Path(text).expanduser()


def _file(value: object, where: str) -> Path:
    path = _path(value, where)
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{where} is {quote(str(path))}, which cannot be read: {error.strerror}") from None
    return path


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} is {_typed(value)}: expected true or false")
    return value


def _workers(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} is {_typed(value)}: expected a whole number from 1 to 256")
    if not 1 <= value <= 256:
        raise ConfigError(f"{where} is {value}: expected a whole number from 1 to 256")
    return value


def _disk(value: object, where: str) -> int:
    size = parse_size(value, where)
    if size < 16384:
        raise ConfigError(f"{where} is {size} bytes, which holds hardly a record: expected at least 16KiB")
    return size


def _limit(value: object, where: str) -> float:
    seconds = parse_duration(value, where)
    if seconds <= 0:
        raise ConfigError(f"{where} is {value}: expected a duration above 0, such as 10s")
    return seconds


def _limit_or_off(value: object, where: str) -> float | None:
    return None if value == "off" else _limit(value, where)


def read_pages(value: object, where: str) -> tuple[str, ...]:
    """``--engine-metrics``: one URL or several. Raises ConfigError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ConfigError(f"{where} is {_typed(value)}: expected a URL in quotes, or a list of them")
    pages = tuple(parse_page(_text(text, where), where) for text in texts)
    if len(pages) > _MOST_SOURCES:
        raise ConfigError(f"{where} names {len(pages)} pages: expected at most {_MOST_SOURCES}")
    twice = next((page for page in pages if pages.count(page) > 1), None)
    if twice is not None:
        raise ConfigError(f"{where} names {quote(shown(twice))} twice: name each page once")
    return pages


def _pids(value: object, where: str) -> tuple[int, ...]:
    numbers = value if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 1 << 22:
            raise ConfigError(f"{where} is {_typed(number)}: expected the number of a process, as of pgrep -f vllm")
    if len(numbers) > _MOST_SOURCES:
        raise ConfigError(f"{where} names {len(numbers)} processes: expected at most {_MOST_SOURCES}")
    return tuple(dict.fromkeys(numbers))


def read_interval(value: object, where: str) -> float:
    """``--sample-interval`` in seconds. Raises ConfigError."""
    seconds = parse_duration(value, where)
    # Below, the reading is a load of its own; above, a queue comes and goes between two readings.
    if not 0.1 <= seconds <= 3600:
        raise ConfigError(f"{where} is {value}: expected 100ms to 1h")
    return seconds


# Pages, or processes, of one tap: a node's engines are a few; each page has a reader and a connection of its own.
_MOST_SOURCES = 64


# --- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One key: its flag and TOML name (``key``), the field it fills, how its value is read and checked."""

    key: str
    field: str
    read: Callable[[object, str], Any]
    environment: str | None = None


OPTIONS: tuple[Option, ...] = (
    Option("upstream", "upstream", _upstream),
    Option("listen", "listen", _address),
    Option("admin", "admin", _address),
    Option("name", "name", _name),
    Option("data", "data", _path),
    Option("workers", "workers", _workers),
    Option("max-disk", "max_disk_bytes", _disk),
    Option("admin-token", "admin_token", _secret, "TAPPROXY_ADMIN_TOKEN"),
    Option("pair-key", "pair_key", _secret, "TAPPROXY_PAIR_KEY"),
    Option("connect-timeout", "connect_timeout_s", _limit),
    Option("head-timeout", "head_timeout_s", _limit_or_off),
    Option("idle-timeout", "idle_timeout_s", _limit_or_off),
    Option("shutdown-grace", "shutdown_grace_s", parse_duration),
    Option("client-keepalive", "client_keepalive_s", _limit),
    Option("upstream-keepalive", "upstream_keepalive_s", _limit),
    Option("header-timeout", "header_timeout_s", _limit),
    Option("insecure", "insecure", _boolean),
    Option("upstream-ca", "upstream_ca", _file),
    Option("rewrite-host", "rewrite_host", _boolean),
    Option("strict-http", "strict_http", _boolean),
    Option("mirror-connections", "mirror_connections", _boolean),
    Option("ack-stamps", "ack_stamps", _boolean),
    Option("self-test", "self_test", _boolean),
    Option("allow-probe", "allow_probe", _boolean),
    Option("tls-cert", "tls_cert", _file),
    Option("tls-key", "tls_key", _file),
    Option("engine-metrics", "engine_metrics", read_pages),
    Option("engine-pid", "engine_pid", _pids),
    Option("gpu", "gpu", _boolean),
    Option("sample-interval", "sample_interval_s", read_interval),
)
_BY_KEY = {option.key: option for option in OPTIONS}
# Callers of load_serve_config may write the field's name for the flag's: max_disk_bytes for max-disk.
_BY_NAME = _BY_KEY | {option.field.replace("_", "-"): option for option in OPTIONS}


def load_serve_config(
    file: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ServeConfig:
    """Defaults, then ``file``, then the environment, then ``overrides`` (the flags; None: not given).

    ``overrides`` is keyed by flag or field name, dashes or underscores; values as the shell gave them.
    """
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _read_toml(file).items():
            option = _known(key, value, _BY_KEY, f"{file}")
            if option.field in values:
                raise ConfigError(f"{file} gives {option.key} twice, with a dash and with an underscore: keep one")
            values[option.field] = option.read(value, f"{option.key} in {file}")
    given = os.environ if environ is None else environ
    for option in OPTIONS:
        if option.environment is not None and given.get(option.environment):
            values[option.field] = option.read(given[option.environment], option.environment)
    for key, value in overrides.items():
        if value is not None:
            option = _known(key, value, _BY_NAME, "the command line")
            values[option.field] = option.read(value, f"--{option.key}")
    if "upstream" not in values:
        raise ConfigError("no upstream is given: say where the engine listens, as --upstream http://127.0.0.1:8000")
    config = ServeConfig(**values)
    _check_together(config)
    return config


def _known(key: str, value: object, options: Mapping[str, Option], where: str) -> Option:
    option = options.get(key.replace("_", "-"))
    if option is not None:
        return option
    if isinstance(value, dict):
        raise ConfigError(f"{where} has a table [{key}]: its keys stand at the top of the file, without tables")
    near = difflib.get_close_matches(key.replace("_", "-"), list(_BY_KEY), n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join(_BY_KEY)
    raise ConfigError(f"{where} has an unknown key {quote(key)}: {advice}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the configuration {quote(str(file))} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file} is not UTF-8 text (line {line}): save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None


def _check_together(config: ServeConfig) -> None:
    """What no key shows alone."""
    listen, admin = parse_address(config.listen), parse_address(config.admin)
    if not is_loopback(admin[0]) and config.admin_token is None:
        raise ConfigError(
            f"--admin is {config.admin}, which others can reach, and there is no token: "
            "give --admin-token (or TAPPROXY_ADMIN_TOKEN), or bind it to 127.0.0.1"
        )
    if same_socket(listen, admin):
        raise ConfigError(f"--listen and --admin are both {config.listen}: give the admin port another one")
    upstream = parse_upstream(config.upstream)
    if upstream.host is not None and upstream.port is not None:
        for flag, own in (("--listen", listen), ("--admin", admin)):
            if same_socket(own, (upstream.host, upstream.port)):
                raise ConfigError(f"--upstream {config.upstream} is the tap's own {flag} address: name the engine's")
    if (config.tls_cert is None) != (config.tls_key is None):
        have, lack = ("tls-cert", "tls-key") if config.tls_key is None else ("tls-key", "tls-cert")
        raise ConfigError(f"--{have} is given without --{lack}: TLS on the listener needs both")
    if config.insecure and config.upstream_ca is not None:
        raise ConfigError(
            "--insecure and --upstream-ca are both given: with no verification the CA is not used, drop one"
        )


def defaults() -> dict[str, Any]:
    """Default by TOML key, for the documented example and its test. The upstream has none."""
    blank = ServeConfig(upstream="")
    return {option.key: getattr(blank, option.field) for option in OPTIONS if option.field != "upstream"}
