"""NVIDIA's cards, as their driver's library (NVML) tells of them: one sample a card and reading.

Rules here: every question is asked by itself, since cards and drivers answer some and not others; what is not answered
is absent with the driver's reason. No driver is a problem that is said, never an error. Nothing is set or reset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import pynvml

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import procfs, throttle

# Where no driver was found it may be loaded later, by an engine's start: how many readings until it is tried again.
_TRY_AGAIN_TURNS: Final = 60
# At the first reading, how far back other processes' work is of interest.
_FIRST_LOOK_US: Final = 2_000_000
_MOST_LINKS: Final = 18
# NVML's "this is not to be had", for a process's memory.
_NOT_AVAILABLE: Final = 0xFFFF_FFFF_FFFF_FFFF
_NO_ENGINE: Final = "whose the processes on the card are: name the engine's process, --engine-pid PID"
_OTHERS: Final = ("other_processes", "other_memory_bytes", "other_busy_share")


class GpuReader:
    """Reads every card of this host. ``read`` never raises.

    ``engine_pids``: the engine's processes at that moment, to tell them from others on the card. ``nvml``: the
    library, or what stands in for it.
    """

    def __init__(
        self,
        engine_pids: Callable[[], Collection[int]] = frozenset,
        *,
        nvml: Any = pynvml,
        boot_id: str | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._engine_pids = engine_pids
        self._nvml = nvml
        self._boot_id = procfs.boot_id() if boot_id is None else boot_id
        self._now_ns = now_ns
        self._unix_ns = unix_ns
        self._cards: list[_Card] | None = None
        self._why: str | None = None
        self._turns = 0
        self._driver: str | None = None
        # Wall clock of the reading before, which is what the driver dates its figures of processes by.
        self._last_us: int | None = None
        self._since_us = 0

    def read(self) -> list[Sample]:
        """One sample a card; a single one with a problem where there is no driver or no card."""
        if self._cards is None and self._turns % _TRY_AGAIN_TURNS == 0:
            self._open()
        self._turns += 1
        if not self._cards:
            sample = self._sample("gpu")
            sample.problem = self._why
            return [self._stamped(sample)]
        engine = self._engine_pids()
        began_us = self._unix_ns() // 1000
        self._since_us = self._last_us if self._last_us is not None else began_us - _FIRST_LOOK_US
        samples = [self._stamped(self._card(card, engine)) for card in self._cards]
        self._last_us = began_us
        return samples

    def close(self) -> None:
        """Lets the library go; a later reading begins anew."""
        if self._cards is not None:
            self._cards = None
            self._turns = 0
            with contextlib.suppress(Exception):  # it is gone already
                self._nvml.nvmlShutdown()

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._driver = _text(nvml.nvmlSystemGetDriverVersion())
        except Exception as error:  # the library's own kinds, and what comes of a broken one
            self._why = (
                f"NVIDIA's driver cannot be asked ({_reason(error)}): no NVIDIA card here, or its library"
                " libnvidia-ml.so.1 is not in this container"
            )
            return
        self._cards = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self._cards.append(_Card(nvml, handle, index))
            except Exception as error:
                self._cards.append(_Card(None, None, index, _reason(error)))
        if not self._cards:
            self._why = "NVIDIA's driver shows no card here: in a container, give it the cards (--gpus)"

    def _sample(self, source: str) -> Sample:
        return Sample(SampleKind.GPU, source, 0, 0, self._boot_id)

    def _stamped(self, sample: Sample) -> Sample:
        sample.t_mono_ns, sample.t_unix_ns = self._now_ns(), self._unix_ns()
        return sample

    def _card(self, card: _Card, engine: Collection[int]) -> Sample:
        sample = self._sample(card.source)
        sample.facts.update(card.facts)
        if self._driver is not None:
            sample.facts["driver"] = self._driver
        if card.why is not None:
            sample.problem = f"card {card.index} cannot be read: {card.why}"
            return sample
        nvml, handle = self._nvml, card.handle
        if card.links is not None:
            sample.values["nvlink_links"] = card.links
        self._mig(sample, handle)
        for signals, question in _QUESTIONS:
            self._ask(sample, signals, partial(question, nvml, handle))
        try:
            throttle.tell(sample, _reasons(nvml, handle))
        except Exception as error:
            sample.absent.update(dict.fromkeys(("throttled", "throttled_thermal", "throttled_power"), _reason(error)))
        self._processes(sample, handle, engine)
        if not sample.values:
            # A card that fell off the bus answers nothing at all.
            sample.problem = f"card {card.index} answers nothing: {next(iter(sample.absent.values()), 'it is lost')}"
        return sample

    def _ask(self, sample: Sample, signals: tuple[str, ...], question: Callable[[], tuple[float, ...]]) -> None:
        try:
            answers = question()
        except Exception as error:
            sample.absent.update(dict.fromkeys(signals, _reason(error)))
        else:
            sample.values.update(zip(signals, answers, strict=True))

    def _mig(self, sample: Sample, handle: Any) -> None:
        try:
            sample.values["mig"] = float(self._nvml.nvmlDeviceGetMigMode(handle)[0] != 0)
        except Exception as error:
            if getattr(error, "value", None) == getattr(self._nvml, "NVML_ERROR_NOT_SUPPORTED", 3):
                sample.values["mig"] = 0.0  # a card that cannot be divided is not
            else:
                sample.absent["mig"] = _reason(error)

    def _processes(self, sample: Sample, handle: Any, engine: Collection[int]) -> None:
        """Who is on the card. Numbers of another namespace (a container's) are nobody's here: that is said."""
        try:
            found = _running(self._nvml, handle)
        except Exception as error:
            sample.absent.update(dict.fromkeys(("own_processes", *_OTHERS), _reason(error)))
            return
        sample.facts["card_processes"] = str(len(found))
        if not engine:
            sample.absent.update(dict.fromkeys(("own_processes", *_OTHERS), _NO_ENGINE))
            return
        others = {pid: memory for pid, memory in found.items() if pid not in engine}
        own = len(found) - len(others)
        sample.values["own_processes"] = own
        if not own:
            why = (
                "none of the engine's processes is among those on this card: it does not use it, or the driver numbers"
                " processes as another namespace does (a container: run the tap with the host's processes)"
                if found
                else "the driver names no process on this card, as it does inside containers"
            )
            sample.absent.update(dict.fromkeys(_OTHERS, why))
            return
        sample.values["other_processes"] = len(others)
        known = [memory for memory in others.values() if memory is not None]
        if len(known) == len(others):
            sample.values["other_memory_bytes"] = sum(known)
        else:
            sample.absent["other_memory_bytes"] = "the driver does not tell the memory of each process"
        if others:
            since_us = self._since_us
            self._ask(sample, ("other_busy_share",), lambda: (_busy_of(self._nvml, handle, others, since_us),))
        else:
            sample.values["other_busy_share"] = 0.0


class _Card:
    """What does not change: the card's name, and the links it has."""

    def __init__(self, nvml: Any, handle: Any, index: int, why: str | None = None) -> None:
        self.handle = handle
        self.index = index
        self.why = why
        self.facts = {"index": str(index)}
        self.links: int | None = None
        if nvml is None:
            self.source = f"gpu {index}"
            return
        for fact, ask in (("name", nvml.nvmlDeviceGetName), ("uuid", nvml.nvmlDeviceGetUUID)):
            try:
                self.facts[fact] = _text(ask(handle))
            except Exception:  # a word for people, no more
                continue
        self.source = f"gpu {index} {self.facts.get('uuid', '')}".strip()
        self.links = _links(nvml, handle)


def _links(nvml: Any, handle: Any) -> int | None:
    """How many NVLinks are up; 0 where the card has none; None where that is not told."""
    up = 0
    for link in range(_MOST_LINKS):
        try:
            up += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except Exception as error:
            value = getattr(error, "value", None)
            ends = (getattr(nvml, "NVML_ERROR_NOT_SUPPORTED", 3), getattr(nvml, "NVML_ERROR_INVALID_ARGUMENT", 2))
            return up if value in ends or link else None
    return up


def _braked_s(nvml: Any, handle: Any, policy: int) -> float:
    return float(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime) / 1e9


def _busy(nvml: Any, handle: Any) -> tuple[float, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _memory(nvml: Any, handle: Any) -> tuple[float, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return float(memory.used), float(memory.total)


def _reasons(nvml: Any, handle: Any) -> int:
    """By the new name of the function, or by the old one that older drivers' libraries know."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except Exception:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _running(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Process → bytes of the card's memory, of all that compute or draw on it."""
    found = {each.pid: _bytes(each.usedGpuMemory) for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    for kind in ("MPSCompute", "Graphics"):
        try:
            others = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
        except Exception:  # cards without graphics, and drivers without the service, need not know of it
            continue
        for each in others:
            found.setdefault(each.pid, _bytes(each.usedGpuMemory))
    return found


def _bytes(value: int | None) -> int | None:
    return None if value is None or value == _NOT_AVAILABLE else int(value)


def _busy_of(nvml: Any, handle: Any, pids: Collection[int], since_us: int) -> float:
    """How busy these kept the card since then, by each one's newest figure.

    The driver has figures only of processes that were at work, and keeps old ones: none since then is 0.
    """
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except Exception as error:
        # The library raises "success" as well where there is no figure.
        nothing = (getattr(nvml, "NVML_ERROR_NOT_FOUND", 6), getattr(nvml, "NVML_SUCCESS", 0))
        if getattr(error, "value", None) in nothing:
            return 0.0
        raise
    newest: dict[int, tuple[int, int]] = {}
    for each in samples:
        if each.pid in pids and each.timeStamp > since_us:
            newest[each.pid] = max(newest.get(each.pid, (0, 0)), (each.timeStamp, each.smUtil))
    return min(1.0, sum(busy for _, busy in newest.values()) / 100)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _reason(error: Exception) -> str:
    """The driver's own words; what an older library has not is said."""
    if isinstance(error, AttributeError):
        return "this version of NVIDIA's library does not know it"
    return str(error)[:120] or type(error).__name__


# Signals → how NVML is asked for them: (module, handle) → their values.
_QUESTIONS: Final[tuple[tuple[tuple[str, ...], Callable[[Any, Any], tuple[float, ...]]], ...]] = (
    (("sm_clock_mhz",), lambda nvml, card: (nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),)),
    (("sm_clock_max_mhz",), lambda nvml, card: (nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM),)),
    (("power_w",), lambda nvml, card: (nvml.nvmlDeviceGetPowerUsage(card) / 1e3,)),
    (("power_limit_w",), lambda nvml, card: (nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3,)),
    (("temperature_c",), lambda nvml, card: (nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),)),
    (("throttled_power_s",), lambda nvml, card: (_braked_s(nvml, card, nvml.NVML_PERF_POLICY_POWER),)),
    (("throttled_thermal_s",), lambda nvml, card: (_braked_s(nvml, card, nvml.NVML_PERF_POLICY_THERMAL),)),
    (("gpu_busy_share", "gpu_memory_busy_share"), _busy),
    (("gpu_memory_used_bytes", "gpu_memory_total_bytes"), _memory),
)
