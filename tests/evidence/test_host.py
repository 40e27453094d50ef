"""The host reader on a made-up machine, and on this one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind
from tapproxy.evidence import procfs
from tapproxy.evidence.host import HostReader
from tapproxy.evidence.threads import Threads
from tests.evidence.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def reader(machine: Machine, *pids: int, own_pid: int | None = None) -> HostReader:
    return HostReader(pids, machine.root, now_ns=lambda: 5, unix_ns=lambda: 7, own_pid=own_pid)


def rise(after: Sample, before: Sample, signal: str) -> float:
    return round(after.values[signal] - before.values[signal], 6)


def test_every_signal_is_of_the_vocabulary_and_of_the_host(machine: Machine) -> None:
    machine.process(10)
    read = reader(machine, 10).read()
    assert read.problem is None
    for name in (*read.values, *read.absent):
        assert SIGNALS[name][0] is SampleKind.HOST, name
    assert (read.source, read.boot_id, read.t_mono_ns, read.t_unix_ns) == ("host gpu-7", "boot-1", 5, 7)


def test_the_machine_is_told_in_seconds_of_its_cores(machine: Machine) -> None:
    machine.cpu([1.0, 2.0, 3.0, 4.0], idle_s=8.0, steal_s=0.5, running=6)
    machine.pressure("cpu", 1.25)
    values = reader(machine).read().values
    # Stolen time is nobody's work: it is of the total, and not of what was busy.
    assert (values["cpu_busy_s"], values["cpu_steal_s"], values["cpu_total_s"]) == (10.0, 0.5, 18.5)
    assert (values["cores"], values["physical_cores"]) == (4, 2)
    # The reader itself was one of the six that wanted a core.
    assert values["run_queue"] == 5
    assert values["psi_cpu_some_s"] == 1.25
    assert values["memory_available_bytes"] == 1000 * 1024


def test_the_busiest_core_is_followed_where_the_work_moves(machine: Machine) -> None:
    host = reader(machine)
    readings = []
    for busy in ([5.0, 0.0, 0.0, 0.0], [5.9, 0.1, 0.0, 0.0], [5.9, 1.1, 0.0, 0.2]):
        machine.cpu(busy)
        readings.append(host.read())
    # 0.9 s of the first core, then 1.0 s of the second one.
    assert rise(readings[1], readings[0], "busiest_core_busy_s") == 0.9
    assert rise(readings[2], readings[0], "busiest_core_busy_s") == 1.9


def test_a_worker_that_ends_lowers_no_counter(machine: Machine) -> None:
    machine.process(10, cpu_s=1.0)
    machine.process(11, parent=10, cpu_s=30.0)
    host = reader(machine, 10)
    before = host.read()
    assert before.values["engine_cpu_s"] == 31.0
    machine.end(11)
    machine.process(10, cpu_s=1.5)
    after = host.read()
    assert rise(after, before, "engine_cpu_s") == 0.5
    assert after.values["engine_processes"] == 1


def test_a_child_that_is_new_is_found_and_counts_from_its_start(machine: Machine) -> None:
    machine.process(10, cpu_s=1.0)
    host = reader(machine, 10)
    before = host.read()
    machine.process(12, parent=10, cpu_s=0.25)
    machine.process(13, parent=12, cpu_s=0.25)
    machine.process(99, parent=1, cpu_s=50.0)
    after = host.read()
    assert after.facts["engine_pids"] == "10 12 13"
    assert rise(after, before, "engine_cpu_s") == 0.5
    assert rise(after, before, "engine_busiest_cpu_s") == 0.25


def test_a_child_whose_parent_went_is_still_the_engine_s(machine: Machine) -> None:
    machine.process(10, cpu_s=1.0)
    machine.process(11, parent=10, cpu_s=2.0)
    host = reader(machine, 10)
    host.read()
    machine.end(10)
    machine.process(11, parent=1, cpu_s=2.5)
    read = host.read()
    assert read.facts["engine_pids"] == "11"
    assert "process 10 has ended" in read.facts["engine_lost"]
    assert read.values["engine_cpu_s"] == 3.5


def test_the_number_of_another_process_is_not_followed(machine: Machine) -> None:
    machine.process(10, cpu_s=1.0, started=100)
    host = reader(machine, 10)
    host.read()
    machine.process(10, cpu_s=9.0, started=777)
    for _ in range(2):  # it stays said
        read = host.read()
        assert "engine_cpu_s" not in read.values
        assert "number 10 is another process now" in read.absent["engine_cpu_s"]
        assert read.values["cores"] == 4


@pytest.mark.parametrize("state", ["Z", "X"])
def test_one_that_ended_and_was_not_collected_is_gone(machine: Machine, state: str) -> None:
    machine.process(10)
    host = reader(machine, 10)
    host.read()
    machine.process(10, state=state)
    assert "process 10 has ended" in host.read().absent["engine_cpu_s"]


def test_a_number_that_is_not_there_is_said(machine: Machine) -> None:
    read = reader(machine, 4711).read()
    assert read.problem is None
    assert "process 4711 is not to be seen here" in read.absent["engine_threads"]


def test_without_a_number_it_is_said_how_to_name_one(machine: Machine) -> None:
    read = reader(machine).read()
    assert "--engine-pid" in read.absent["engine_cpu_s"]
    assert read.values["tcp_out_segments"] == 1000
    assert read.facts["tcp_of"] == "this host"


def test_the_reader_and_its_children_are_not_the_engine_s(machine: Machine) -> None:
    machine.process(10)
    machine.process(20, parent=10)
    machine.process(21, parent=20)
    read = reader(machine, 10, own_pid=20).read()
    assert read.facts["engine_pids"] == "10"


def test_waits_and_switches_are_those_of_all_threads(machine: Machine) -> None:
    threads = {10: (1.0, 0.1), 11: (5.0, 0.2), 12: (0.0, 0.0)}
    machine.process(10, cpu_s=6.0, threads=threads, switches=(10, 2))
    host = reader(machine, 10)
    before = host.read()
    assert before.values["engine_runqueue_wait_s"] == pytest.approx(0.3)
    assert before.values["engine_involuntary_switches"] == 6
    threads |= {10: (1.9, 0.6), 11: (5.3, 0.2)}
    machine.process(10, cpu_s=7.2, threads=threads, switches=(10, 3))
    after = host.read()
    assert rise(after, before, "engine_runqueue_wait_s") == 0.5
    assert rise(after, before, "engine_longest_thread_wait_s") == 0.5
    # Of a process at 120 % of a core, the thread that has most of it has 90 %.
    assert rise(after, before, "engine_busiest_thread_cpu_s") == 0.9
    # The third thread did not run, so its file was not read again.
    assert rise(after, before, "engine_involuntary_switches") == 2


def test_of_very_many_threads_the_sleeping_ones_have_their_turns(machine: Machine) -> None:
    every = dict.fromkeys(range(10, 16), (1.0, 0.0))
    machine.process(10, cpu_s=6.0, threads=every)
    threads = Threads(str(machine.root), most_a_turn=3)
    members = [procfs.stat(str(machine.root), 10)]
    threads.read(members)
    assert threads.run_s.total == 6.0  # all of them, so that nobody's past is counted later
    machine.process(10, cpu_s=9.0, threads=every | dict.fromkeys((10, 12, 15), (2.0, 0.5)))
    threads.read(members)
    assert threads.wait_s.total >= 0.5  # the first thread's, and whose turn it was
    for _ in range(2):
        threads.read(members)
    assert (threads.run_s.total, threads.wait_s.total) == (9.0, 1.5)
    # One that was looked at after three turns may have run at any time of them.
    assert 1.0 <= threads.run_s.most <= 2.0


def test_threads_that_run_all_the_time_starve_no_other(machine: Machine) -> None:
    threads = Threads(str(machine.root), most_a_turn=4)
    for turn in range(1, 15):
        # All run but the last two, which run once, at the fifth turn.
        times = dict.fromkeys(range(10, 18), (float(turn), 0.0))
        times |= dict.fromkeys((16, 17), (1.0, 0.25 if turn >= 5 else 0.0))
        machine.process(10, cpu_s=turn, threads=times)
        threads.read([procfs.stat(str(machine.root), 10)])
    assert threads.wait_s.total == 0.5


def test_a_kernel_that_tells_no_waiting_leaves_it_absent(machine: Machine) -> None:
    machine.process(10, threads={10: (1.0, 0.0)})
    (machine.root / "proc/10/task/10/schedstat").unlink()
    read = reader(machine, 10).read()
    assert "engine_runqueue_wait_s" not in read.values
    assert "schedstat" in read.absent["engine_runqueue_wait_s"]
    assert read.values["engine_context_switches"] == 12


def test_a_machine_without_pressure_figures_says_so(machine: Machine) -> None:
    (machine.root / "proc/pressure/io").unlink()
    read = reader(machine).read()
    assert "PSI" in read.absent["psi_io_some_s"]
    assert "psi_cpu_some_s" in read.values


def test_cores_whose_threads_nobody_tells_are_not_called_physical(machine: Machine) -> None:
    (machine.root / "sys/devices/system/cpu/cpu2/topology/thread_siblings_list").unlink()
    read = reader(machine).read()
    assert read.values["cores"] == 4
    assert "physical_cores" in read.absent
    assert "physical_cores" not in read.values


def test_the_cores_that_the_engine_may_use_are_those_of_its_mask_that_are_there(machine: Machine) -> None:
    machine.process(10, cpus="0-1")
    machine.process(11, parent=10, cpus="3,64-127")
    read = reader(machine, 10).read()
    assert (read.values["engine_affinity_cores"], read.values["engine_physical_cores"]) == (3, 2)


def test_version_2_groups_give_the_tightest_limit_and_all_throttling(machine: Machine) -> None:
    machine.process(10, cgroup="0::/pod/engine")
    machine.write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    machine.write("sys/fs/cgroup/pod/cpu.stat", "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2000000\n")
    machine.write("sys/fs/cgroup/pod/engine/cpu.max", "max 100000\n")
    machine.write("sys/fs/cgroup/pod/engine/cpu.stat", "usage_usec 5\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n")
    machine.write("sys/fs/cgroup/pod/engine/cpu.pressure", "some avg10=0.00 total=500000\n")
    read = reader(machine, 10).read()
    assert read.values["cpu_limit_cores"] == 1.5
    assert read.values["cgroup_throttled_s"] == 2.0
    assert (read.values["cgroup_periods"], read.values["cgroup_throttled_periods"]) == (10, 4)
    assert read.values["cgroup_psi_cpu_some_s"] == 0.5
    assert read.facts["cgroup"] == "version 2, /pod/engine"


def test_no_limit_is_known_and_is_no_number(machine: Machine) -> None:
    machine.process(10, cgroup="0::/engine")
    machine.write("sys/fs/cgroup/engine/cpu.max", "max 100000\n")
    read = reader(machine, 10).read()
    assert read.facts["cpu_limit"] == "none"
    assert "cpu_limit_cores" not in read.values
    assert "cpu_limit_cores" not in read.absent


@pytest.mark.parametrize(
    ("mount", "group", "where"),
    [
        pytest.param("/ /sys/fs/cgroup/cpu,cpuacct", "/docker/ab", "sys/fs/cgroup/cpu,cpuacct/docker/ab", id="host"),
        # What a container sees of itself: its own group mounted, under the name that the host has for it.
        pytest.param(
            "/docker/ab /sys/fs/cgroup/cpu,cpuacct", "/docker/ab", "sys/fs/cgroup/cpu,cpuacct", id="container"
        ),
    ],
)
def test_version_1_groups_are_read_alike(machine: Machine, mount: str, group: str, where: str) -> None:
    machine.write(
        "proc/self/mountinfo",
        f"30 24 0:26 {mount} rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    machine.process(10, cgroup=f"5:memory:/docker/ab\n4:cpu,cpuacct:{group}\n0::/docker/ab")
    machine.write(f"{where}/cpu.cfs_quota_us", "50000\n")
    machine.write(f"{where}/cpu.cfs_period_us", "100000\n")
    machine.write(f"{where}/cpu.stat", "nr_periods 8\nnr_throttled 3\nthrottled_time 1500000000\n")
    values = reader(machine, 10).read().values
    assert (values["cpu_limit_cores"], values["cgroup_throttled_s"]) == (0.5, 1.5)


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/../other", "outside this container"),
        ("0::/not/here", "is not to be seen here"),
        ("3:memory:/x", "no control groups with a CPU controller"),
        ("gibberish", "not enough values"),
    ],
)
def test_a_group_that_cannot_be_seen_is_said(machine: Machine, cgroup: str, expected: str) -> None:
    machine.process(10, cgroup=cgroup)
    read = reader(machine, 10).read()
    assert expected in read.absent["cpu_limit_cores"]
    assert "cpu_limit_cores" not in read.values


def test_connections_are_those_of_the_engine_s_own_namespace(machine: Machine) -> None:
    machine.process(10)
    read = reader(machine, 10).read()
    assert (read.values["tcp_out_segments"], read.values["tcp_retransmits"]) == (5000, 50)
    assert read.values["tcp_listen_drops"] == 2
    assert read.facts["tcp_of"] == "the network namespace of process 10"


def test_a_table_without_a_column_leaves_that_one_absent(machine: Machine) -> None:
    machine.write("proc/self/net/netstat", "TcpExt: ListenDrops\nTcpExt: 4\n")
    read = reader(machine).read()
    assert read.values["tcp_listen_drops"] == 4
    assert "tcp_timeouts" in read.absent


def test_the_parts_of_vllm_are_told_by_their_names(machine: Machine) -> None:
    machine.process(10, name="vllm", cpu_s=1.0)
    machine.process(11, parent=10, name="VLLM::EngineCor", cpu_s=2.0)
    machine.process(12, parent=11, name="VLLM::Worker_TP", cpu_s=4.0)
    machine.process(13, parent=11, name="VLLM::Worker_TP", cpu_s=8.0)
    read = reader(machine, 10).read()
    roles = [read.values[f"engine_{role}_cpu_s"] for role in ("api", "core", "worker")]
    assert roles == [1.0, 2.0, 12.0]
    assert read.facts["engine_roles"] == "api 10, core 11, worker 12, worker 13"


def test_names_that_tell_nothing_give_no_role(machine: Machine) -> None:
    machine.process(10, name="a) S 1 (b", cpu_s=1.0)
    read = reader(machine, 10).read()
    assert read.values["engine_cpu_s"] == 1.0
    assert "engine_api_cpu_s" in read.absent


@pytest.mark.parametrize("text", [None, "", "cpu  x y\n", "\xff\xfe", "cpu  1 2 3 4 5 6 7 8 9 10\n"])
def test_what_is_no_machine_is_a_problem_and_no_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_text(text)
    read = HostReader([1], tmp_path).read()
    assert read.problem is not None
    assert "/proc/stat cannot be read" in read.problem
    assert not read.values


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone")
def test_this_process_on_this_machine() -> None:
    host = HostReader([os.getpid()])
    before = host.read()
    busy_until = time.process_time() + 0.05
    while time.process_time() < busy_until:
        pass
    after = host.read()
    assert after.problem is None
    assert 0.03 <= rise(after, before, "engine_cpu_s") < 1.0
    assert after.values["engine_threads"] >= 1
    assert after.values["engine_rss_bytes"] > 1 << 20
    assert after.values["cpu_total_s"] > before.values["cpu_total_s"] - 1e-9
