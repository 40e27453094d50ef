"""What an engine said when it started: its limits, the room it found for the KV cache, how it was built and set.

Rules here: phrases and settings are tables; a line that is in none is nothing. A name that is not in the table is not
looked at, so that no key and no prompt comes along. Reading stops counting when the engine is ready, since later
lines may hold what its users sent; of several starts in one log the last one is told. A log is never an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import launchwords as words
from tapproxy.evidence import procfs, settings
from tapproxy.evidence.settings import number, plain

_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 1 << 18
# A start says less than this; what comes after is its daily work, ready or not.
_MOST_LINES_A_START: Final = 20_000
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# vLLM's block of its cache on a GPU, where neither it nor the log says another.
_BLOCK_TOKENS: Final = 16

_EXPECTED: Final = ("kv_cache_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
_NOT_TOLD: Final = "the start-up log does not tell it: engines print some settings only where they were set"


def read(
    path: Path,
    *,
    boot_id: str | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    unix_ns: Callable[[], int] = time.time_ns,
    most_bytes: int = _MOST_BYTES,
) -> Sample:
    """One sample of a start-up log; its times are those of this reading. Never raises: ``problem`` says why not."""
    sample = Sample(SampleKind.LAUNCH, f"log {path.name}", 0, 0, procfs.boot_id() if boot_id is None else boot_id)
    try:
        with path.open("rb") as file:
            reading = _Reading()
            for line in _lines(file.read, most_bytes):
                reading.line(line)
            reading.tell(sample)
            if file.read(1):
                sample.facts["cut"] = f"only its first {most_bytes >> 20} MiB were read"
    except OSError as error:
        sample.problem = f"the engine's log {path.name} cannot be read: {error.strerror}"
    sample.t_mono_ns, sample.t_unix_ns = now_ns(), unix_ns()
    return sample


def _lines(read_bytes: Callable[[int], bytes], most_bytes: int) -> Iterator[str]:
    """Without colours; what a progress bar wrote over is a line of its own."""
    rest, size = b"", 0
    while size < most_bytes and (piece := read_bytes(min(1 << 20, most_bytes - size))):
        size += len(piece)
        *whole, rest = re.split(rb"[\r\n]", rest + piece)
        for line in whole:
            yield _clean(line)
        rest = rest[:_MOST_LINE]
    yield _clean(rest)


def _clean(line: bytes) -> str:
    return _ANSI.sub("", line[:_MOST_LINE].decode("utf-8", "replace"))


class _Reading:
    """What the lines have said so far."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._facts: dict[str, str] = {}
        self._engine: str | None = None
        self._starts = 0
        self._complete = False  # this start has said more than its settings
        self._ready = False
        self._lines = 0
        self._open: list[str] = []  # the lines of a settings text that is not closed yet

    def line(self, line: str) -> None:
        if not line or words.OF_USERS.search(line):
            return
        self._lines += 1
        if self._open:
            self._open.append(line.strip())
            if line.startswith("}") or len(self._open) > 500:
                text, self._open = " ".join(self._open), []
                self._settings(text)
            return
        if words.BEGINS.search(line):
            self._begin()
        if self._ready:
            return
        self._engine = self._engine or next((name for name, phrase in words.ENGINES if phrase.search(line)), None)
        found = words.SETTINGS.search(line)
        self._words(line if found is None else line[: found.start()])
        if found is not None:
            if line.rstrip().endswith("{"):
                self._open = [line[found.end() :]]
            else:
                self._settings(line[found.end() :])
            return
        self._phrases(line)
        self._ready = self._lines > _MOST_LINES_A_START or words.READY.search(line) is not None

    def _begin(self) -> None:
        """Several lines of one start begin it; only what says more than its settings makes the next one another."""
        if self._complete or self._ready:
            self._values.clear()
            self._facts.clear()
            self._complete = self._ready = False
        elif self._starts:
            return
        self._starts += 1
        self._lines = 0

    def _phrases(self, line: str) -> None:
        for pattern, groups, fixed in words.PHRASES:
            match = pattern.search(line)
            if match is None:
                continue
            self._complete = True
            self._values.update(fixed)
            for signal, text in zip(groups, match.groups(), strict=True):
                value = number(text)
                if value is not None:
                    self._put(signal, value)

    def _words(self, line: str) -> None:
        for pattern, fact in words.WORDS:
            match = pattern.search(line)
            if match is not None:
                self._facts[fact] = match[1]

    def _put(self, signal: str, value: float) -> None:
        combine = words.COMBINED.get(signal)
        known = self._values.get(signal)
        self._values[signal] = value if combine is None or known is None else combine(known, value)

    def _settings(self, text: str) -> None:
        found = settings.pairs(text)
        for name, signal, as_read in words.NUMBERS:
            value = number(plain(found.get(name, "")))
            if value is not None:
                self._values[signal] = as_read(value)
        for name, fact in words.FACTS.items():
            word = plain(found.get(name, "").strip("[]"))
            if word is not None and len(word) <= 200 and words.WORD.fullmatch(word):
                self._facts[fact] = word
        self._speculation(found.get("speculative_config", ""))
        mode = words.GRAPH_MODE.search(found.get("compilation_config", ""))
        if mode is not None and found.get("enforce_eager") != "True":
            self._values["cuda_graphs"] = 0.0 if mode[1] == "NONE" else 1.0

    def _speculation(self, text: str) -> None:
        if plain(text) is None:
            return
        method = words.METHOD.search(text)
        self._facts["speculative"] = method[1] if method is not None else "draft_model"
        tokens = words.DRAFT_TOKENS.search(text)
        if tokens is not None:
            self._values["speculative_tokens"] = float(tokens[1])

    def tell(self, sample: Sample) -> None:
        """Puts everything into the sample, with what follows from two of them."""
        values = dict(self._values)
        self._derive(values)
        sample.values = {signal: value for signal, value in values.items() if not signal.startswith("_")}
        sample.facts |= self._facts
        if self._engine is not None:
            sample.facts["engine"] = self._engine
        if self._starts > 1:
            sample.facts["starts"] = f"{self._starts} starts are in the log: the last one is told"
        if not sample.values and "version" not in sample.facts:
            sample.problem = (
                f"{sample.source} holds no line of a start that is known (vLLM, SGLang, llama.cpp, TGI): give the"
                " engine's own output from its start on, at log level INFO"
            )
            return
        sample.absent.update(dict.fromkeys((each for each in _EXPECTED if each not in sample.values), _NOT_TOLD))

    def _derive(self, values: dict[str, float]) -> None:
        if "_allocated" in values:  # of the pools that SGLang allocates, its last line names the one that bounds it
            values.setdefault("kv_cache_tokens", values["_allocated"])
        blocks = values.get("_blocks")
        if blocks is not None and "kv_cache_tokens" not in values:
            values["kv_cache_tokens"] = blocks * values.get("_block_tokens", _BLOCK_TOKENS)
        chunk = values.get("_chunk")
        if chunk is not None:  # SGLang: -1 is off, and then the prefill's own limit bounds a batch
            values["chunked_prefill"] = float(chunk > 0)
            bound = chunk if chunk > 0 else values.get("_prefill")
            if bound is not None:
                values["max_num_batched_tokens"] = bound
        # An engine that says its tensor parallelism says the others where they are not 1.
        if "tensor_parallel" in values and self._facts.get("device", "cuda") not in ("cpu", "tpu"):
            values["gpus_used"] = (
                values["tensor_parallel"] * values.get("pipeline_parallel", 1.0) * values.get("data_parallel", 1.0)
            )
