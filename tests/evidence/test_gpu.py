"""NVML's answers as samples: cards that answer all, some, or nothing, and no driver at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind
from tapproxy.evidence.gpu import GpuReader
from tests.evidence.cards import GPU_LOST, NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, SUCCESS, Card, Nvml, process


def read(nvml: Nvml, engine: frozenset[int] = frozenset({100})) -> list[Sample]:
    return GpuReader(lambda: engine, nvml=nvml, boot_id="boot-1", now_ns=lambda: 5, unix_ns=lambda: 7).read()


def one(answers: dict[str, Any], engine: frozenset[int] = frozenset({100})) -> Sample:
    (sample,) = read(Nvml(Card(answers=answers)), engine)
    return sample


def test_a_healthy_card_answers_everything() -> None:
    sample = one({})
    assert sample.problem is None
    assert sample.absent == {}
    assert sample.values == {
        "gpu_busy_share": 0.97,
        "gpu_memory_busy_share": 0.4,
        "gpu_memory_used_bytes": 60 << 30,
        "gpu_memory_total_bytes": 80 << 30,
        "sm_clock_mhz": 1980,
        "sm_clock_max_mhz": 1980,
        "power_w": 350.5,
        "power_limit_w": 700.0,
        "temperature_c": 55,
        "throttled": 0.0,
        "throttled_thermal": 0.0,
        "throttled_power": 0.0,
        "throttled_power_s": 0.0,
        "throttled_thermal_s": 2.0,
        "mig": 0.0,
        "nvlink_links": 18,
        "own_processes": 1,
        "other_processes": 0,
        "other_memory_bytes": 0,
        "other_busy_share": 0.0,
    }
    assert all(SIGNALS[name][0] is SampleKind.GPU for name in sample.values)
    assert sample.facts == {
        "index": "0",
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "driver": "570.10",
        "throttle_reasons": "none",
        "card_processes": "1",
    }
    assert (sample.source, sample.boot_id, sample.t_mono_ns, sample.t_unix_ns) == ("gpu 0 GPU-1", "boot-1", 5, 7)


@pytest.mark.parametrize(
    ("mask", "expected", "words"),
    [
        pytest.param(0x1, (0, 0, 0), "gpu_idle", id="idle is nobody's fault"),
        pytest.param(0x2, (0, 0, 0), "applications_clocks_setting", id="neither is a setting"),
        pytest.param(0x4, (1, 0, 1), "sw_power_cap", id="power cap"),
        pytest.param(0x48, (1, 1, 0), "hw_slowdown, hw_thermal_slowdown", id="heat"),
        pytest.param(0x8, (1, 0, 0), "hw_slowdown", id="the hardware does not say why"),
        pytest.param(0x80, (1, 0, 1), "hw_power_brake_slowdown", id="power brake"),
    ],
)
def test_the_driver_s_reasons_are_told_apart(mask: int, expected: tuple[int, int, int], words: str) -> None:
    sample = one({"nvmlDeviceGetCurrentClocksEventReasons": mask})
    found = tuple(sample.values[name] for name in ("throttled", "throttled_thermal", "throttled_power"))
    assert (found, sample.facts["throttle_reasons"]) == (expected, words)


def test_an_older_library_is_asked_by_the_older_name() -> None:
    nvml = Nvml(Card(answers={"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20}))
    nvml.nvmlDeviceGetCurrentClocksEventReasons = None  # type: ignore[assignment]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda card: 0x20  # type: ignore[assignment]
    (sample,) = read(nvml)
    assert sample.values["throttled_thermal"] == 1.0


def test_what_a_card_refuses_is_absent_with_the_driver_s_reason() -> None:
    sample = one(
        {
            "nvmlDeviceGetPowerUsage": NOT_SUPPORTED,
            "nvmlDeviceGetUtilizationRates": NO_PERMISSION,
            "nvmlDeviceGetCurrentClocksEventReasons": NOT_SUPPORTED,
        }
    )
    assert sample.absent["power_w"] == "Not Supported"
    assert sample.absent["gpu_busy_share"] == "Insufficient Permissions"
    assert "throttled" in sample.absent
    assert "throttled" not in sample.values
    assert sample.values["temperature_c"] == 55


def test_a_card_that_cannot_be_divided_is_not() -> None:
    assert one({"nvmlDeviceGetMigMode": NOT_SUPPORTED}).values["mig"] == 0.0
    assert one({"nvmlDeviceGetMigMode": [1, 1]}).values["mig"] == 1.0
    assert "mig" in one({"nvmlDeviceGetMigMode": NO_PERMISSION}).absent


def test_a_card_without_links_has_none_and_one_that_does_not_tell_is_not_counted() -> None:
    assert one({"nvmlDeviceGetNvLinkState": NOT_SUPPORTED}).values["nvlink_links"] == 0
    assert "nvlink_links" not in one({"nvmlDeviceGetNvLinkState": NO_PERMISSION}).values


def test_another_process_is_told_with_how_busy_it_keeps_the_card() -> None:
    sample = one(
        {
            "nvmlDeviceGetComputeRunningProcesses": [process(100), process(666, 5 << 30)],
            "nvmlDeviceGetGraphicsRunningProcesses": [process(42, 1 << 20)],
            "nvmlDeviceGetProcessUtilization": [
                SimpleNamespace(pid=100, timeStamp=3, smUtil=50),
                SimpleNamespace(pid=666, timeStamp=2, smUtil=45),
                SimpleNamespace(pid=666, timeStamp=1, smUtil=99),
                SimpleNamespace(pid=42, timeStamp=-3_000_000, smUtil=99),  # of long ago
            ],
        }
    )
    assert sample.values["own_processes"] == 1
    assert sample.values["other_processes"] == 2
    assert sample.values["other_memory_bytes"] == (5 << 30) + (1 << 20)
    assert sample.values["other_busy_share"] == 0.45  # its newest figure


def test_a_figure_that_was_read_before_is_not_news() -> None:
    work = SimpleNamespace(pid=666, timeStamp=10_000_001, smUtil=80)
    running = [process(100), process(666)]
    answers = {"nvmlDeviceGetComputeRunningProcesses": running, "nvmlDeviceGetProcessUtilization": [work]}
    times = iter(range(10_000_000_000, 20_000_000_000, 1_000_000_000))
    reader = GpuReader(lambda: {100}, nvml=Nvml(Card(answers=answers)), unix_ns=lambda: next(times))
    assert [reader.read()[0].values["other_busy_share"] for _ in range(3)] == [0.8, 0.8, 0.0]


def test_every_name_that_is_asked_for_is_the_library_s() -> None:
    names = [*Nvml._USUAL, *(name for name in vars(Nvml) if name.lower().startswith("nvml"))]
    assert len(names) > 20
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_another_process_that_sleeps_keeps_the_card_not_busy() -> None:
    running = [process(100), process(666, None)]
    answers = {
        "nvmlDeviceGetComputeRunningProcesses": running,
        "nvmlDeviceGetProcessUtilization": NOT_FOUND,
    }
    for nothing in (NOT_FOUND, SUCCESS):
        sample = one(answers | {"nvmlDeviceGetProcessUtilization": nothing})
        assert sample.values["other_busy_share"] == 0.0
        assert "other_memory_bytes" in sample.absent
    assert "other_busy_share" in one(answers | {"nvmlDeviceGetProcessUtilization": NOT_SUPPORTED}).absent


@pytest.mark.parametrize(
    ("running", "engine", "expected"),
    [
        pytest.param([process(100)], frozenset(), "--engine-pid", id="nobody named the engine"),
        pytest.param([process(100)], frozenset({7}), "another namespace", id="a container's numbers"),
        pytest.param([], frozenset({7}), "names no process", id="nothing shown"),
    ],
)
def test_whose_a_process_is_can_be_unknown(running: list[object], engine: frozenset[int], expected: str) -> None:
    sample = one({"nvmlDeviceGetComputeRunningProcesses": running}, engine)
    assert expected in sample.absent["other_processes"]
    assert "other_processes" not in sample.values


def test_each_card_has_its_own_sample_and_a_lost_one_does_not_take_the_others_along() -> None:
    lost = Card("GPU-2", dict.fromkeys(Nvml._USUAL, GPU_LOST))
    samples = read(Nvml(Card("GPU-1"), lost, GPU_LOST, Card("GPU-3")))
    assert [sample.source for sample in samples] == ["gpu 0 GPU-1", "gpu 1 GPU-2", "gpu 2", "gpu 3 GPU-3"]
    assert [sample.problem is None for sample in samples] == [True, False, False, True]
    assert samples[1].problem == "card 1 answers nothing: GPU is lost"
    assert samples[2].problem == "card 2 cannot be read: GPU is lost"


def test_no_card_is_said() -> None:
    (sample,) = read(Nvml())
    assert sample.problem == "NVIDIA's driver shows no card here: in a container, give it the cards (--gpus)"


def test_a_driver_that_is_not_there_is_tried_again_now_and_then_and_not_each_time() -> None:
    nvml = Nvml(Card(), fails=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    reader = GpuReader(nvml=nvml)
    for _ in range(60):
        (sample,) = reader.read()
        assert sample.problem is not None
        assert "NVML Shared Library Not Found" in sample.problem
    assert nvml.opened == 1
    nvml.fails = None
    (sample,) = reader.read()
    assert sample.problem is None


def test_a_closed_reader_begins_anew() -> None:
    nvml = Nvml(Card())
    reader = GpuReader(nvml=nvml)
    reader.read()
    reader.close()
    assert reader.read()[0].source == "gpu 0 GPU-1"
    assert nvml.opened == 2


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_the_real_library_without_a_driver() -> None:
    (sample,) = GpuReader().read()
    assert sample.problem is not None
    assert "no NVIDIA card here" in sample.problem
    assert sample.values == {}
