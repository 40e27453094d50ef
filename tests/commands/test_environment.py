"""What ran where: this host, who listens, the hash of an nginx configuration."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tapproxy import __version__
from tapproxy.commands import environment
from tapproxy.nginx import sandbox
from tapproxy.nginx.sandbox import RunningNginx
from tests.e2e.helpers import engine
from tests.nginx.live import free_ports


def proc(directory: Path, port: int, *words: str, title: str | None = None) -> Path:
    """A /proc with one process, 42, that listens on the port."""
    (directory / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    line = f"   0: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1\n"
    (directory / "net/tcp").write_text(head + line)
    (directory / "42/fd").mkdir(parents=True)
    (directory / "42/fd/3").symlink_to("socket:[777]")
    data = title.encode() if title is not None else b"\0".join(word.encode() for word in words)
    (directory / "42/cmdline").write_bytes(data + b"\0")
    return directory


def test_the_flags_of_a_local_engine_without_its_secrets(tmp_path: Path) -> None:
    words = ("/venv/bin/python", "/venv/bin/vllm", "serve", "m", "--port", "8000", "--max-num-seqs=8")
    fake = proc(tmp_path, 8000, *words, "--api-key", "one", "two", "--enforce-eager", "--lora-modules", "a=b", "c=d")
    assert environment.local("http://127.0.0.1:8000/v1", fake) == {
        "process": {
            "name": "vllm",
            "flags": {
                "--max-num-seqs": "8",
                "--api-key": "… …",
                "--enforce-eager": True,
                "--lora-modules": "a=b c=d",
            },
        },
        "nginx": None,
    }


@pytest.mark.parametrize("url", ["http://127.0.0.1:8001", "http://engine.example:8000", "http://[::1]:1"])
def test_what_cannot_be_seen_from_here_is_none(url: str, tmp_path: Path) -> None:
    fake = proc(tmp_path, 8000, "/venv/bin/vllm", "serve")
    assert environment.local(url, fake) == {"process": None, "nginx": None}


def test_another_program_on_the_port_is_not_described(tmp_path: Path) -> None:
    fake = proc(tmp_path, 8000, "/usr/bin/secretd", "--token-of-somebody", "x")
    assert environment.local("http://127.0.0.1:8000", fake) == {"process": None, "nginx": None}


def test_the_hash_sees_a_change_in_an_included_file(tmp_path: Path) -> None:
    main, part = tmp_path / "nginx.conf", tmp_path / "part.conf"
    main.write_text("events {}\nhttp { include part.conf; }\n")
    part.write_text("proxy_buffering off;\n")
    before = environment.config_hash(main)
    assert before == environment.config_hash(main)
    part.write_text("proxy_buffering on;\n")
    after = environment.config_hash(main)
    assert (before[1], after[1]) == (2, 2)
    assert before[0] != after[0]
    assert environment.config_hash(tmp_path / "none.conf") == (None, None)


def test_a_running_nginx_and_the_engine_behind_it() -> None:
    nginx = sandbox.find_nginx()

    async def seen(listen: int, upstream: int) -> dict[str, object]:
        running = RunningNginx()
        directory = sandbox.private_directory()
        text = f"events {{}}\nhttp {{ access_log off; server {{ listen 127.0.0.1:{listen};\n"
        text += f"location / {{ proxy_pass http://127.0.0.1:{upstream}; }} }} }}\n"
        await running.start(nginx, text, directory)
        try:
            return await environment.gather({"nginx": f"http://127.0.0.1:{listen}"})
        finally:
            await running.stop()

    with engine("--model", "sim") as behind:
        found = asyncio.run(seen(free_ports(1)[0], behind.port))
    path = found["paths"]["nginx"]  # type: ignore[index]
    assert path["models"] == ["sim"]
    assert path["process"] == {"name": "nginx"}
    assert path["nginx"]["version"] == nginx.version
    assert len(path["nginx"]["config_sha256"]) == 64
    assert path["nginx"]["config_files"] == 1


def test_this_host_is_named_by_what_bears_on_speed(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU\n")
    found = environment.this_host(tmp_path)
    assert (found["tapproxy"], found["host"]["cpu"]) == (__version__, "A CPU")


def test_gpus_as_nvidia_smi_lists_them(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86.10'\necho 'NVIDIA H200, 143771 MiB, 570.86.10'\n")
    os.chmod(tool, 0o755)
    assert environment.gpus(tmp_path, str(tool)) == {
        "names": ["NVIDIA H200"] * 2,
        "memory": ["143771 MiB"] * 2,
        "driver": "570.86.10",
    }


def test_a_driver_without_its_tool_is_seen_in_proc(tmp_path: Path) -> None:
    assert environment.gpus(tmp_path, "/nonexistent") is None
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10\n")
    found = environment.gpus(tmp_path, "/nonexistent")
    assert found == {"names": None, "memory": None, "driver": "NVIDIA UNIX x86_64 Kernel Module  570.86.10"}
