"""Saved nvidia-smi logs, as people have them, and the topology's matrix."""

from __future__ import annotations

from datetime import UTC, timedelta, timezone
from pathlib import Path

import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind
from tapproxy.evidence import gpulog, topo
from tapproxy.evidence.gpulogtime import read_time

# Noon of the first of May 2024, in UTC.
NOON_NS = 1_714_564_800_000_000_000
ANCHOR = (NOON_NS, 500)

# The line of the manuals, with two cards; the header comes again where the log was restarted.
HEADER = (
    "index, utilization.gpu [%], memory.used [MiB], memory.total [MiB], clocks.current.sm [MHz], power.draw [W],"
    " temperature.gpu"
)
USUAL = f"""\
{HEADER}
0, 97 %, 60000 MiB, 81559 MiB, 1980 MHz, 650.25 W, 71
1, 0 %, 3 MiB, 81559 MiB, 345 MHz, 70.00 W, 35
{HEADER}
0, 98 %, 60000 MiB, 81559 MiB, 1410 MHz, 699.90 W, 84
1, 0 %, 3 MiB, 81559 MiB, 345 MHz, 70.
"""
FULL = """\
timestamp, name, uuid, index, clocks.sm [MHz], clocks.max.sm [MHz], power.limit [W], clocks_throttle_reasons.active, \
mig.mode.current, pstate, utilization.memory [%]
2024/05/01 12:00:00.250, NVIDIA H200, GPU-aa, 0, 1980, 1980, 700.00, 0x0000000000000000, Disabled, P0, 40
2024/05/01 12:00:01.250, NVIDIA H200, GPU-aa, 0, 990, 1980, 700.00, 0x0000000000000048, Disabled, P0, [N/A]
"""


def read(tmp_path: Path, text: str | bytes, **more: object) -> list[Sample]:
    file = tmp_path / "smi.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    options = {"zone": UTC, "anchor": ANCHOR, "boot_id": "boot-1"} | more
    return gpulog.read(file, **options)  # type: ignore[arg-type]


def test_the_usual_line_with_two_cards_and_a_header_again(tmp_path: Path) -> None:
    samples = read(tmp_path, USUAL)
    assert [sample.source for sample in samples] == ["gpu 0", "gpu 1", "gpu 0"]
    assert samples[0].values == {
        "gpu_busy_share": 0.97,
        "gpu_memory_used_bytes": 60000 << 20,
        "gpu_memory_total_bytes": 81559 << 20,
        "sm_clock_mhz": 1980,
        "power_w": 650.25,
        "temperature_c": 71,
    }
    assert all(SIGNALS[name][0] is SampleKind.GPU for sample in samples for name in sample.values)
    # The last line is torn.
    assert samples[2].facts["skipped"] == "1 lines of the log are none of its columns"


def test_a_last_number_without_an_end_of_line_may_be_half_of_one(tmp_path: Path) -> None:
    samples = read(tmp_path, "index, temperature.gpu\n0, 71\n0, 8")
    assert [sample.values for sample in samples] == [{"temperature_c": 71}]


def test_a_log_without_times_claims_none(tmp_path: Path) -> None:
    for sample in read(tmp_path, USUAL):
        assert (sample.t_unix_ns, sample.t_mono_ns) == (0, 0)
        assert "no timestamps" in sample.facts["untimed"]


def test_a_log_without_times_is_dated_by_its_start_and_interval_card_by_card(tmp_path: Path) -> None:
    samples = read(tmp_path, USUAL, started_unix_ns=NOON_NS, interval_s=0.5)
    assert [sample.t_unix_ns - NOON_NS for sample in samples] == [0, 0, 500_000_000]
    assert [sample.t_mono_ns for sample in samples] == [500, 500, 500_000_500]
    assert "untimed" not in samples[0].facts


def test_timestamps_reasons_and_limits_are_read(tmp_path: Path) -> None:
    first, second = read(tmp_path, FULL)
    assert (first.source, first.boot_id) == ("gpu 0 GPU-aa", "boot-1")
    assert first.t_unix_ns == NOON_NS + 250_000_000
    assert first.t_mono_ns == 250_000_500
    assert (first.values["sm_clock_max_mhz"], first.values["power_limit_w"], first.values["mig"]) == (1980, 700, 0)
    assert (first.values["throttled"], second.values["throttled"]) == (0, 1)
    assert (second.values["throttled_thermal"], second.values["throttled_power"]) == (1, 0)
    assert second.facts["throttle_reasons"] == "hw_slowdown, hw_thermal_slowdown"
    assert second.absent == {"gpu_memory_busy_share": "the log says '[N/A]'"}


def test_a_column_for_each_reason_tells_only_what_it_covers(tmp_path: Path) -> None:
    header = "clocks_event_reasons.sw_power_cap, clocks_event_reasons.hw_power_brake_slowdown, index\n"
    calm, capped = read(tmp_path, header + "Not Active, Not Active, 0\nActive, Not Active, 0\n")
    assert (calm.values, capped.values) == ({"throttled_power": 0}, {"throttled": 1, "throttled_power": 1})


def test_a_log_without_a_header_is_read_by_the_columns_that_are_told(tmp_path: Path) -> None:
    text = "0, 97, 60000\n0, 96, 60001\n"
    samples = read(tmp_path, text, columns=["index", "utilization.gpu", "memory.used"])
    assert [sample.values["gpu_busy_share"] for sample in samples] == [0.97, 0.96]
    assert samples[1].values["gpu_memory_used_bytes"] == 60001 << 20
    (problem,) = read(tmp_path, text)
    assert problem.problem is not None
    assert "has no header that is known" in problem.problem


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1 GiB", 1 << 30),
        ("1024 MiB", 1 << 30),
        ("1048576 KiB", 1 << 30),
        ("1024", 1 << 30),
        ("[Not Supported]", None),
        ("[Unknown Error]", None),
        ("ERR!", None),
        ("5 parsecs", None),
    ],
)
def test_units_are_those_that_stand_there(tmp_path: Path, value: str, expected: int | None) -> None:
    (sample,) = read(tmp_path, f"memory.used [MiB], index\n{value}, 0\n")
    assert sample.values.get("gpu_memory_used_bytes") == expected
    assert ("gpu_memory_used_bytes" in sample.absent) == (expected is None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_the_ways_in_which_windows_and_others_save_it(tmp_path: Path, encoding: str, end: str) -> None:
    samples = read(tmp_path, FULL.replace("\n", end).encode(encoding))
    assert [sample.problem for sample in samples] == [None, None]
    assert samples[1].values["sm_clock_mhz"] == 990


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no header that is known"),
        ("index, utilization.gpu [%]\n", "holds no reading (0 lines"),
        ("index, utilization.gpu [%]\n0\n0, 1, 2\n", "holds no reading (2 lines"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "NVIDIA-SMI has failed"),
        ("No devices were found\n", "No devices were found"),
        ("\x00\x01\x02\n" * 100, "has no header that is known"),
        ("a,b,c\n1,2,3\n", "has no header that is known"),
        ('"' * 200_000, "has no header that is known"),
    ],
)
def test_what_is_no_log_of_cards_is_said(tmp_path: Path, text: str, expected: str) -> None:
    (sample,) = read(tmp_path, text)
    assert sample.problem is not None
    assert expected in sample.problem
    assert sample.values == {}


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (sample,) = gpulog.read(tmp_path / "no.csv")
    assert sample.problem == "the GPU log 'no.csv' cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("text", "seconds_after_noon"),
    [
        ("2024/05/01 12:00:00.000", 0),
        ("2024-05-01T12:00:00Z", 0),
        ("2024-05-01 14:00:00,500 +02:00", 0.5),
        ("2024-05-01T06:30:00.25-0530", 0.25),
        ("01.05.2024 12:00:01", 1),
        ("Wed May  1 12:00:00 2024", 0),
        ("1714564801.5", 1.5),
        ("05/01/2024 12:00:00", None),  # May or January: nobody can know
        ("2024/13/01 12:00:00", None),
        ("2024/05/01", None),
        ("[N/A]", None),
        ("", None),
    ],
)
def test_times_are_read_where_they_mean_one_thing(text: str, seconds_after_noon: float | None) -> None:
    found = read_time(text, UTC)
    assert (None if found is None else (found[0] - NOON_NS) / 1e9) == seconds_after_noon


def test_a_time_without_a_zone_is_in_the_zone_that_is_given() -> None:
    found = read_time("2024/05/01 12:00:00.000", timezone(timedelta(hours=2)))
    assert found is not None
    assert (NOON_NS - found[0]) / 3_600_000_000_000 == 2
    assert found[1] == "as the time of zone UTC+02:00"


def test_a_time_that_is_not_read_leaves_the_reading_untimed(tmp_path: Path) -> None:
    (sample,) = read(tmp_path, "timestamp, utilization.gpu [%]\n05/01/2024 12:00:00, 5 %\n")
    assert sample.t_mono_ns == 0
    assert "is not read" in sample.facts["untimed"]
    assert sample.values == {"gpu_busy_share": 0.05}


NVLINK = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV12\tNODE\t0-47\t0\t\tN/A
GPU2\tNV18\tNV12\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_every_pair_with_links_is_nvlink(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(NVLINK)
    sample = topo.read(file, boot_id="boot-1", now_ns=lambda: 5, unix_ns=lambda: 7)
    assert (sample.kind, sample.source, sample.problem) == ("launch", "topology topo.txt", None)
    assert sample.values == {"gpus": 3, "nvlink": 1, "nvlink_weakest": 12}
    assert sample.facts["cards"] == "GPU0 GPU1 GPU2"


def test_one_pair_over_the_socket_s_link_is_no_nvlink(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(NVLINK.replace("NV12", "SYS"))
    sample = topo.read(file)
    assert (sample.values["nvlink"], sample.values["nvlink_weakest"]) == (0, 0)
    assert sample.facts["worst_way"] == "SYS"


@pytest.mark.parametrize("text", ["", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-47\n", "GPU0 is here\n", "\x00" * 1000])
def test_what_is_no_matrix_of_cards_is_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(text)
    sample = topo.read(file)
    assert sample.problem is not None
    assert "nvidia-smi topo -m" in sample.problem
    assert sample.values == {}
