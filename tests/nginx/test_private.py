"""What a killed check leaves in the temporary directory goes with the next; what may be in use or is not ours stays."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from tapproxy.nginx.private import private_directory, remove_stale

pytestmark = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="no /proc: nothing is removed")
MAKE = "import sys; from pathlib import Path; from tapproxy.nginx import private; "


def left_by_a_dead_process(parent: Path) -> Path:
    """A directory as a process leaves it that was killed."""
    code = f"{MAKE}print(private.private_directory(Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, parent], capture_output=True, text=True, check=True, timeout=30)
    left = Path(done.stdout.strip())
    (left / "tmp").mkdir()
    (left / "tmp" / "key.pem").write_text("x")
    return left


def test_what_a_dead_process_left_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    own, left = private_directory(tmp_path), left_by_a_dead_process(tmp_path)
    code = f"{MAKE}print(private.private_directory(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert remove_stale(tmp_path) == [left]
        assert own.is_dir()
        assert theirs.is_dir()
        other.communicate("")
    assert remove_stale(tmp_path) == [theirs]
    assert list(tmp_path.iterdir()) == [own]


def test_a_number_that_another_process_has_now_keeps_nothing(tmp_path: Path) -> None:
    """The same process id, begun at another time: it was used again."""
    head, pid, _, rest = private_directory(tmp_path).name.rsplit("-", 3)
    reused = tmp_path / f"{head}-{pid}-1-{rest}"
    reused.mkdir(0o700)
    assert remove_stale(tmp_path) == [reused]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Others' names, kernels, modes, kinds; and where a link stands in a directory, what it leads to."""
    left = left_by_a_dead_process(tmp_path)
    name = left.name
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    (elsewhere / "kept").write_text("x")
    link = tmp_path / f"{name[:-8]}aaaaaaaa"
    link.symlink_to(elsewhere)
    file = tmp_path / f"{name[:-8]}bbbbbbbb"
    file.write_text("x")
    file.chmod(0o700)
    open_to_all = tmp_path / f"{name[:-8]}cccccccc"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    run = name.split("-")[2]
    others = [link, file, open_to_all, elsewhere]
    for text in (
        name.replace(run, "0" * 8 if run != "0" * 8 else "1" * 8),  # another host, an earlier boot, a container
        "tapproxy-nginx-abcdefgh",  # as no process number is in it
        f"{name}.kept",
        f"x{name}",
        f"tapproxy-demo-{name[15:]}",
    ):
        (tmp_path / text).mkdir(0o700)
        others.append(tmp_path / text)
    (left / "out").symlink_to(elsewhere)
    assert remove_stale(tmp_path) == [left]
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert (elsewhere / "kept").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_removes_what_its_nginx_owned_and_no_other_users(tmp_path: Path) -> None:
    nginxs, users = left_by_a_dead_process(tmp_path), left_by_a_dead_process(tmp_path)
    os.chown(nginxs, pwd.getpwnam("nobody").pw_uid, -1)
    os.chown(users, 12345, -1)
    assert remove_stale(tmp_path) == [nginxs]
    assert users.is_dir()


def test_a_temporary_directory_that_cannot_be_read_hinders_nobody(tmp_path: Path) -> None:
    assert remove_stale(tmp_path / "none") == []
