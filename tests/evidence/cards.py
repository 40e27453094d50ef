"""What stands in for NVML: cards that answer as a test says, or refuse with the library's own errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
NO_PERMISSION = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
GPU_LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
SUCCESS = pynvml.NVMLError(pynvml.NVML_SUCCESS)
NOT_FOUND = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


@dataclass
class Card:
    """One card. A value that is an exception is raised; a missing one is what most cards say."""

    uuid: str = "GPU-1"
    answers: dict[str, Any] = field(default_factory=dict)

    def answer(self, name: str, usual: Any) -> Any:
        found = self.answers.get(name, usual)
        if isinstance(found, Exception):
            raise found
        return found


def process(pid: int, memory: int | None = 1 << 30) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory)


class Nvml:
    """The functions that are asked, over cards."""

    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PERF_POLICY_POWER = pynvml.NVML_PERF_POLICY_POWER
    NVML_PERF_POLICY_THERMAL = pynvml.NVML_PERF_POLICY_THERMAL

    _USUAL: dict[str, Callable[..., Any]] = {  # noqa: RUF012
        "nvmlDeviceGetName": lambda: "NVIDIA H200",
        "nvmlDeviceGetClockInfo": lambda _: 1980,
        "nvmlDeviceGetMaxClockInfo": lambda _: 1980,
        "nvmlDeviceGetPowerUsage": lambda: 350_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda: 700_000,
        "nvmlDeviceGetTemperature": lambda _: 55,
        "nvmlDeviceGetViolationStatus": lambda policy: SimpleNamespace(violationTime=2_000_000_000 * policy),
        "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(used=60 << 30, total=80 << 30),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda: 0,
        "nvmlDeviceGetMigMode": lambda: [0, 0],
        "nvmlDeviceGetNvLinkState": lambda link: 1,
        "nvmlDeviceGetComputeRunningProcesses": lambda: [process(100)],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda: [],
        "nvmlDeviceGetMPSComputeRunningProcesses": lambda: [],
        "nvmlDeviceGetProcessUtilization": lambda _: [],
    }

    def __init__(self, *cards: Card | Exception, fails: Exception | None = None) -> None:
        self.cards = cards
        self.fails = fails
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1
        if self.fails is not None:
            raise self.fails

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.10"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        found = self.cards[index]
        if isinstance(found, Exception):
            raise found
        return found

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._USUAL:
            raise AttributeError(name)
        usual = self._USUAL[name]
        return lambda card, *more: card.answer(name, None) if name in card.answers else usual(*more)
