"""The continuous-batching model: which tokens exist when. Pure: no clock, no I/O, no asyncio.

Rules. Times are integer nanoseconds and are passed in. A step is planned by ``begin`` and takes effect in
``complete``; what arrives in between waits for the next step. First come, first served; running sequences go
before waiting ones and decodes before prefills (vLLM V1's order, with chunked prefill). When the KV cache is
full the sequence admitted last is preempted and later recomputed from its prompt and what it had generated.
Prefix caching is off. The same calls give the same steps: the only chance (speculation) is drawn from the seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_tokens_per_s: int = 20_000
    prefill_overhead_ns: int = 3_000_000  # added once to a step that holds any prefill
    decode_base_ns: int = 12_000_000  # added once to a step that holds any decode
    decode_per_seq_ns: int = 100_000
    kv_blocks: int = 4096
    spec_tokens: int = 0  # drafted per decode; 0: no speculation
    spec_acceptance: float = 0.7  # chance that a drafted token is kept, while all before it were
    cold_requests: int = 0  # the first so many sequences pay cold_ns in their first step
    cold_ns: int = 0
    stall_every: int = 0  # every so many steps one takes stall_ns longer; 0: none
    stall_ns: int = 0
    # Steps that begin this long after the first one, for so long, take so many percent of their time; 0: none.
    slow_after_ns: int = 0
    slow_for_ns: int = 0
    slow_percent: int = 100
    seed: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request: what it asks for and what has become of it."""

    prompt_tokens: int
    output_tokens: int
    arrival_ns: int  # the API process has the whole request
    queued_ns: int  # tokenised, handed to the scheduler
    ends_with: str = "length"  # its finished_reason, once it has all its tokens
    scheduled_ns: int | None = None  # first step that holds it; a preemption does not reset it
    first_ns: int | None = None
    last_ns: int | None = None  # of the newest token
    finished_ns: int | None = None
    generated: int = 0
    computed: int = 0  # tokens whose KV is in the cache
    blocks: int = 0
    prefilling: bool = True  # again after a preemption
    preemptions: int = 0
    hold_until_ns: int = 0  # not scheduled before this (injected stall); its KV stays

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.generated

    @property
    def finished(self) -> bool:
        return self.generated >= self.output_tokens


@dataclass(frozen=True, slots=True)
class Output:
    sequence: Sequence
    gained: int
    previous_ns: int | None  # the token before; None: these are the sequence's first


@dataclass(slots=True)
class Step:
    number: int
    start_ns: int
    end_ns: int
    plan: dict[Sequence, int]  # tokens to compute
    decodes: int
    prefill_tokens: int
    outputs: list[Output] = field(default_factory=list)
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Frontend:
    """The API process: template and tokeniser, one request after another, so much per prompt token."""

    def __init__(self, ns_per_token: int) -> None:
        self.ns_per_token = ns_per_token
        self._free_ns = 0

    def admit(self, arrival_ns: int, prompt_tokens: int) -> int:
        """When the request is ready for the scheduler's queue."""
        self._free_ns = max(self._free_ns, arrival_ns) + prompt_tokens * self.ns_per_token
        return self._free_ns


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # an ordered set, in order of admission
        self.free_blocks = config.kv_blocks
        self.preemptions = 0
        self.step: Step | None = None
        self.last_end_ns = 0
        self._steps = 0
        self._began_ns: int | None = None
        self._admitted = 0
        self._random = random.Random(config.seed)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forget it and free its KV at once; a step already begun keeps its length."""
        self._release(sequence)
        self.running.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if self.step is not None:
            self.step.plan.pop(sequence, None)

    @property
    def kv_usage(self) -> float:
        return 1 - self.free_blocks / self.config.kv_blocks

    def wake_ns(self, now_ns: int) -> int | None:
        """Where ``begin`` found nothing to do now: when to try again by itself."""
        times = [s.hold_until_ns for s in self.running]
        if self.waiting:
            times.append(self.waiting[0].queued_ns)
        return min((t for t in times if t > now_ns), default=None)

    def begin(self, now_ns: int) -> int | None:
        """Plan the step that starts now: its end, or None where there is nothing to compute."""
        plan, cold = self._plan(now_ns)
        if not plan:
            return None
        prefill_tokens = sum(tokens for seq, tokens in plan.items() if seq.prefilling)
        decodes = sum(1 for seq in plan if not seq.prefilling)
        self._steps += 1
        if self._began_ns is None:
            self._began_ns = now_ns
        duration_ns = self._duration_ns(prefill_tokens, decodes)
        if 0 <= now_ns - self._began_ns - self.config.slow_after_ns < self.config.slow_for_ns:
            duration_ns = duration_ns * self.config.slow_percent // 100
        end_ns = now_ns + duration_ns + cold * self.config.cold_ns
        self.step = Step(self._steps, now_ns, end_ns, plan, decodes, prefill_tokens)
        return end_ns

    def complete(self) -> Step:
        """The step begun last is over: hand out its tokens."""
        step = self.step
        if step is None:
            raise RuntimeError("no step was begun")
        self.step = None
        self.last_end_ns = step.end_ns
        for sequence, tokens in step.plan.items():
            gained = self._gain(step, sequence, tokens)
            if not gained:
                continue  # a chunk of a longer prefill
            step.outputs.append(Output(sequence, gained, sequence.last_ns))
            sequence.generated += gained
            sequence.last_ns = step.end_ns
            if sequence.first_ns is None:
                sequence.first_ns = step.end_ns
            if sequence.finished:
                sequence.finished_ns = step.end_ns
                del self.running[sequence]
                self._release(sequence)
        return step

    # -- one step ------------------------------------------------------------------------------------------

    def _plan(self, now_ns: int) -> tuple[dict[Sequence, int], int]:
        plan: dict[Sequence, int] = {}
        budget = self.config.max_num_batched_tokens
        preempted = False
        for sequence in sorted(self.running, key=lambda s: s.prefilling):  # stable: decodes first
            if budget <= 0:
                break
            if sequence not in self.running or sequence.hold_until_ns > now_ns:
                continue
            sequence.hold_until_ns = 0
            wanted = min(budget, self._wanted(sequence))
            while not self._grow(sequence, wanted):
                victim = next(reversed(self.running))
                self._preempt(victim)
                preempted = True
                budget += plan.pop(victim, 0)
                if victim is sequence:
                    break
            else:
                plan[sequence] = wanted
                budget -= wanted
        # As in vLLM: a step that had to preempt admits nobody, or the victim would take its blocks back.
        cold = 0 if preempted else self._admit(now_ns, plan, budget)
        return plan, cold

    def _admit(self, now_ns: int, plan: dict[Sequence, int], budget: int) -> int:
        cold = 0
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            # The whole prompt must fit, not only its first chunk: else half-done prefills starve each other.
            if sequence.queued_ns > now_ns or _blocks(sequence.total) > self.free_blocks:
                break
            self.waiting.popleft()
            self.running[sequence] = None
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns = now_ns
                self._admitted += 1
                cold += self._admitted <= self.config.cold_requests
            wanted = min(budget, sequence.total)
            self._grow(sequence, wanted)
            plan[sequence] = wanted
            budget -= wanted
        return cold

    def _duration_ns(self, prefill_tokens: int, decodes: int) -> int:
        config = self.config
        duration_ns = 0
        if decodes:
            duration_ns += config.decode_base_ns + decodes * config.decode_per_seq_ns
        if prefill_tokens:
            duration_ns += config.prefill_overhead_ns
            duration_ns += prefill_tokens * 1_000_000_000 // config.prefill_tokens_per_s
        if config.stall_every and self._steps % config.stall_every == 0:
            duration_ns += config.stall_ns
        return duration_ns

    def _wanted(self, sequence: Sequence) -> int:
        if sequence.prefilling:
            return sequence.total - sequence.computed
        return 1 + min(self.config.spec_tokens, sequence.output_tokens - sequence.generated - 1)

    def _gain(self, step: Step, sequence: Sequence, tokens: int) -> int:
        """Tokens the sequence has after this step that it had not before."""
        if sequence.prefilling:
            sequence.computed += tokens
            if sequence.computed < sequence.total:
                return 0
            sequence.prefilling = False
            return 1
        gained = 1
        if tokens > 1:
            while gained < tokens and self._random.random() < self.config.spec_acceptance:
                gained += 1
            step.drafts += 1
            step.draft_tokens += tokens - 1
            step.accepted_tokens += gained - 1
        sequence.computed += gained
        return gained

    # -- the KV cache --------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        more = _blocks(sequence.computed + tokens) - sequence.blocks
        if more > self.free_blocks:
            return False
        if more > 0:
            sequence.blocks += more
            self.free_blocks -= more
        return True

    def _release(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.blocks
        sequence.blocks = 0

    def _preempt(self, victim: Sequence) -> None:
        del self.running[victim]
        self._release(victim)
        victim.computed = 0
        victim.prefilling = True
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
