"""What cannot be done is said in one clear sentence on stderr, with the right exit code, and nothing is left running.

2: the operator's words (a flag, a file) are wrong. 3: the words are right and the machine does not allow it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.helpers import tapproxy

SERVE = ("serve", "--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")


def one_sentence(stderr: str) -> str:
    """The message, which is one line of ours or typer's box around one; never a traceback."""
    assert "Traceback" not in stderr, stderr
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1, stderr
    return lines[0]


# Flags, and what the sentence has to name: what was found, or what was expected.
BAD_FLAGS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("upstream_ftp", ("serve", "--upstream", "ftp://x"), ("--upstream", "ftp://x", "http://")),
    ("upstream_no_url", ("serve", "--upstream", "localhost"), ("--upstream", "localhost")),
    ("upstream_path", ("serve", "--upstream", "http://h:1/v1"), ("--upstream",)),
    ("upstream_port", ("serve", "--upstream", "http://h:99999"), ("--upstream", "99999")),
    ("no_upstream", ("serve",), ("--upstream",)),
    ("listen_no_port", (*SERVE, "--listen", "127.0.0.1"), ("--listen", "127.0.0.1")),
    ("listen_word", (*SERVE, "--listen", "127.0.0.1:http"), ("--listen", "http")),
    ("admin_open_to_all", (*SERVE, "--admin", "0.0.0.0:0"), ("--admin", "token")),
    ("workers_none", (*SERVE, "--workers", "0"), ("workers", "0")),
    ("max_disk", (*SERVE, "--max-disk", "lots"), ("--max-disk", "lots")),
    ("duration", (*SERVE, "--idle-timeout", "soon"), ("--idle-timeout", "soon")),
    ("ca_file_absent", (*SERVE, "--upstream-ca", "/nonexistent/ca.pem"), ("/nonexistent/ca.pem",)),
    ("tls_cert_absent", (*SERVE, "--tls-cert", "/nonexistent/cert.pem"), ("--tls-cert", "/nonexistent/cert.pem")),
    ("config_absent", ("serve", "--config", "/nonexistent/tap.toml"), ("/nonexistent/tap.toml",)),
    ("simulate_listen", ("simulate", "--listen", "here"), ("--listen", "here")),
    ("simulate_fault", ("simulate", "--listen", "127.0.0.1:0", "--fault", "explode"), ("--fault", "explode")),
    (
        "simulate_replay",
        ("simulate", "--listen", "127.0.0.1:0", "--replay", "/nonexistent.http"),
        ("nonexistent.http",),
    ),
    ("simulate_seqs", ("simulate", "--listen", "127.0.0.1:0", "--max-num-seqs", "0"), ("--max-num-seqs", "0")),
]


@pytest.mark.parametrize(("arguments", "named"), [case[1:] for case in BAD_FLAGS], ids=[case[0] for case in BAD_FLAGS])
def test_a_bad_flag_is_one_sentence_and_exit_2(
    arguments: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    extra = ("--data", str(tmp_path)) if arguments[0] == "serve" else ()
    done = tapproxy(*arguments, *extra)
    sentence = one_sentence(done.stderr)
    assert done.returncode == 2, done
    assert done.stdout == ""
    for word in named:
        assert word.lower() in sentence.lower()


NO_CERTIFICATE: list[tuple[str, tuple[str, ...]]] = [
    ("listener", ("--tls-cert", "FILE", "--tls-key", "FILE")),
    ("upstream", ("--upstream", "https://127.0.0.1:1", "--upstream-ca", "FILE")),
]


@pytest.mark.parametrize("flags", [case[1] for case in NO_CERTIFICATE], ids=[case[0] for case in NO_CERTIFICATE])
def test_a_file_that_is_no_certificate_is_one_sentence_and_exit_2(flags: tuple[str, ...], tmp_path: Path) -> None:
    # Once the workers found it out, one after the other, and were started again for ever.
    file = tmp_path / "place.pem"
    file.write_text("this is no certificate\n")
    done = tapproxy(*SERVE, "--data", str(tmp_path), *(str(file) if flag == "FILE" else flag for flag in flags))
    assert done.returncode == 2, done
    assert str(file) in one_sentence(done.stderr)


@pytest.mark.parametrize("arguments", [("serve", "--lisen", "x"), ("no-such-command",)], ids=["flag", "command"])
def test_an_unknown_word_is_named_and_exit_2(arguments: tuple[str, ...]) -> None:
    done = tapproxy(*arguments)
    assert done.returncode == 2
    assert arguments[-1] in done.stderr or arguments[-2] in done.stderr
    assert "Traceback" not in done.stderr


TOML: list[tuple[str, str, tuple[str, ...]]] = [
    ("cut", 'upstream = "http://127.0.0.1:1', ("tap.toml", "not valid TOML", "end of document")),
    ("no_toml", "workers = 1\nupstream: http://x\n", ("tap.toml", "not valid TOML", "line 2")),
    ("unknown_key", 'upstream = "http://127.0.0.1:1"\nlisen = "127.0.0.1:0"\n', ("lisen", "listen")),
    ("wrong_type", 'upstream = "http://127.0.0.1:1"\nworkers = "two"\n', ("workers", "two")),
    ("not_utf8", "upstream = 'http://x' # \udcff\n", ("tap.toml",)),
]


@pytest.mark.parametrize(("text", "named"), [case[1:] for case in TOML], ids=[case[0] for case in TOML])
def test_a_broken_file_is_one_sentence_and_exit_2(text: str, named: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "tap.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = tapproxy("serve", "--config", str(file), "--data", str(tmp_path / "data"))
    sentence = one_sentence(done.stderr)
    assert done.returncode == 2, done
    for word in named:
        assert word in sentence


@pytest.mark.parametrize("flag", ["--listen", "--admin"])
def test_a_used_port_is_one_sentence_and_exit_3(flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tapproxy(*SERVE, flag, address, "--data", str(tmp_path))
    sentence = one_sentence(done.stderr)
    assert done.returncode == 3, done
    assert address in sentence
    assert flag in sentence
    assert "in use" in sentence


def test_a_used_port_of_the_simulated_engine_is_one_sentence_and_exit_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tapproxy("simulate", "--listen", address)
    assert done.returncode == 3, done
    assert address in one_sentence(done.stderr)


def test_an_address_of_another_host_is_one_sentence_and_exit_3(tmp_path: Path) -> None:
    # 192.0.2.0/24 is for documentation: no host has it.
    done = tapproxy(*SERVE, "--listen", "192.0.2.1:9000", "--data", str(tmp_path))
    assert done.returncode == 3, done
    assert "192.0.2.1:9000" in one_sentence(done.stderr)


def a_file(path: Path) -> Path:
    path.write_text("")
    return path


def below_a_file(path: Path) -> Path:
    path.write_text("")
    return path / "data"


def read_only(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o500)
    return path / "data"


def on_proc(_: Path) -> Path:
    return Path("/proc/tapproxy-data")


DIRECTORIES = [a_file, below_a_file, read_only, on_proc]


@pytest.mark.parametrize("make", DIRECTORIES, ids=[make.__name__ for make in DIRECTORIES])
def test_a_directory_that_cannot_be_written_is_one_sentence_and_exit_2(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    if make is read_only and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    directory = make(tmp_path / "place")
    done = tapproxy(*SERVE, "--data", str(directory))
    sentence = one_sentence(done.stderr)
    assert done.returncode == 2, done
    assert str(directory) in sentence
    assert done.stdout == ""
