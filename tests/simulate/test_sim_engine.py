"""The batching model by numbers one can check in the head: 1 ms a prompt token, 10 ms + 1 ms a decode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.simulate.engine import Engine, EngineConfig, Frontend, Sequence

MS = 1_000_000


def config(**changes: Any) -> EngineConfig:
    plain: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1000,
        "prefill_tokens_per_s": 1000,
        "prefill_overhead_ns": 0,
        "decode_base_ns": 10 * MS,
        "decode_per_seq_ns": MS,
        "kv_blocks": 1000,
    }
    return EngineConfig(**(plain | changes))


def sequence(prompt: int, output: int, queued_ms: int = 0) -> Sequence:
    return Sequence(prompt, output, queued_ms * MS, queued_ms * MS)


def run(engine: Engine, **names: Sequence) -> dict[str, list[int]]:
    """Add the sequences, run until idle: the ms at which each got each of its tokens."""
    for one in names.values():
        engine.add(one)
    times: dict[str, list[int]] = {name: [] for name in names}
    known = {one: name for name, one in names.items()}
    now_ns = 0
    while True:
        if engine.begin(now_ns) is None:
            wake_ns = engine.wake_ns(now_ns)
            if wake_ns is None:
                return times
            now_ns = wake_ns
            continue
        step = engine.complete()
        now_ns = step.end_ns
        for output in step.outputs:
            times[known[output.sequence]] += [step.end_ns // MS] * output.gained


def test_a_request_alone_has_its_prefill_and_then_even_decodes() -> None:
    a = sequence(20, 3)
    assert run(Engine(config()), a=a) == {"a": [20, 31, 42]}
    assert (a.scheduled_ns, a.first_ns, a.last_ns, a.finished_ns) == (0, 20 * MS, 42 * MS, 42 * MS)


def test_the_overhead_is_added_once_to_a_step_with_any_prefill() -> None:
    engine = Engine(config(prefill_overhead_ns=5 * MS))
    assert run(engine, a=sequence(20, 2), b=sequence(10, 2)) == {"a": [35, 47], "b": [35, 47]}


def test_a_decode_step_grows_with_the_running_sequences() -> None:
    times = run(Engine(config()), a=sequence(1, 2), b=sequence(1, 2), c=sequence(1, 2))
    assert times == {"a": [3, 16], "b": [3, 16], "c": [3, 16]}  # 10 + 3 × 1


def test_a_request_waits_while_max_num_seqs_are_running() -> None:
    a, b, c = sequence(10, 2), sequence(10, 2), sequence(10, 2)
    times = run(Engine(config(max_num_seqs=2)), a=a, b=b, c=c)
    assert times == {"a": [20, 32], "b": [20, 32], "c": [42, 53]}
    assert c.scheduled_ns == 32 * MS  # its queue time


def test_a_long_prefill_is_cut_into_what_decodes_leave_of_the_budget() -> None:
    # Step 1 has a's only token. Then each step has a's decode and 15 tokens of b, and at last 10.
    engine = Engine(config(max_num_batched_tokens=16))
    a, b = sequence(1, 4), sequence(40, 2, queued_ms=1)
    assert run(engine, a=a, b=b) == {"a": [1, 27, 53, 74], "b": [74, 85]}
    assert b.scheduled_ns == 1 * MS


def test_what_arrives_within_a_step_waits_for_the_next() -> None:
    b = sequence(10, 1, queued_ms=5)
    assert run(Engine(config()), a=sequence(20, 2), b=b) == {"a": [20, 41], "b": [41]}
    assert b.scheduled_ns == 20 * MS


def test_an_idle_engine_starts_when_the_next_request_is_queued() -> None:
    assert run(Engine(config()), a=sequence(10, 1), b=sequence(10, 1, queued_ms=100)) == {"a": [10], "b": [110]}


def test_a_full_kv_cache_preempts_the_last_and_recomputes_it() -> None:
    # Four blocks of 16: both prompts fill them. a's first decode needs a third block, so b gives up both of its.
    # a ends at 64 + 19 × 11 = 273; then b recomputes 32 + 1 tokens in 33 ms and goes on.
    engine = Engine(config(kv_blocks=4))
    a, b = sequence(32, 20), sequence(32, 3)
    times = run(engine, a=a, b=b)
    assert times["a"] == [64 + 11 * i for i in range(20)]
    assert times["b"] == [64, 306, 317]
    assert (engine.preemptions, a.preemptions, b.preemptions) == (1, 0, 1)
    assert b.scheduled_ns == 0  # its first time
    assert engine.free_blocks == 4
    assert engine.kv_usage == 0


def test_a_prompt_that_does_not_fit_the_free_blocks_waits() -> None:
    engine = Engine(config(kv_blocks=4))
    a, b = sequence(48, 2), sequence(20, 1)
    assert run(engine, a=a, b=b) == {"a": [48, 59], "b": [79]}
    assert engine.preemptions == 0


def test_an_abort_frees_the_cache_at_once_and_the_step_keeps_its_length() -> None:
    engine = Engine(config())
    a, b = sequence(32, 5), sequence(16, 5)
    engine.add(a)
    engine.add(b)
    assert engine.begin(0) == 48 * MS
    assert engine.free_blocks == 1000 - 3
    engine.abort(a)
    assert engine.free_blocks == 1000 - 1
    step = engine.complete()
    assert step.end_ns == 48 * MS
    assert [output.sequence for output in step.outputs] == [b]


def test_a_waiting_request_can_be_aborted() -> None:
    engine = Engine(config(max_num_seqs=1))
    a, b = sequence(1, 1), sequence(1, 1)
    engine.add(a)
    engine.add(b)
    engine.abort(b)
    assert list(engine.waiting) == [a]


def test_a_held_sequence_gets_no_token_and_the_others_go_on() -> None:
    engine = Engine(config())
    a, b = sequence(1, 3), sequence(1, 3)
    a.hold_until_ns = 100 * MS  # b alone: 11 ms a step
    assert run(engine, a=a, b=b) == {"a": [2, 111, 122], "b": [2, 13, 24]}


def test_speculation_gives_several_tokens_in_one_step() -> None:
    engine = Engine(config(spec_tokens=3, spec_acceptance=1.0))
    engine.add(a := sequence(10, 7))
    gained = []
    now_ns = 0
    while engine.begin(now_ns) is not None:
        step = engine.complete()
        now_ns = step.end_ns
        gained += [(o.gained, step.draft_tokens, step.accepted_tokens) for o in step.outputs]
    assert gained == [(1, 0, 0), (4, 3, 3), (2, 1, 1)]  # never more than were asked for
    assert a.generated == 7


def test_drafts_that_are_never_accepted_change_nothing() -> None:
    engine = Engine(config(spec_tokens=3, spec_acceptance=0.0))
    assert run(engine, a=sequence(10, 3)) == {"a": [10, 21, 32]}


def test_the_first_requests_of_a_cold_engine_take_longer() -> None:
    engine = Engine(config(cold_requests=1, cold_ns=500 * MS))
    assert run(engine, a=sequence(10, 1), b=sequence(10, 1, queued_ms=1000)) == {"a": [510], "b": [1010]}


def test_every_so_many_steps_one_stalls() -> None:
    engine = Engine(config(stall_every=3, stall_ns=100 * MS))
    assert run(engine, a=sequence(10, 4)) == {"a": [10, 21, 132, 143]}


def test_the_frontend_takes_one_request_after_another() -> None:
    frontend = Frontend(ns_per_token=1000)
    assert frontend.admit(0, 50) == 50_000
    assert frontend.admit(10_000, 50) == 100_000  # waits for the first
    assert frontend.admit(500_000, 50) == 550_000


def test_completing_without_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        Engine(config()).complete()


requests = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(0, 300)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(requests=requests, seqs=st.integers(1, 6), budget=st.integers(1, 64), spec=st.integers(0, 3))
def test_whatever_comes_everybody_is_served_once_and_no_block_is_lost(
    requests: list[tuple[int, int, int]], seqs: int, budget: int, spec: int
) -> None:
    def serve() -> tuple[Engine, dict[str, list[int]], list[Sequence]]:
        engine = Engine(
            config(kv_blocks=8, max_num_seqs=seqs, max_num_batched_tokens=budget, spec_tokens=spec, spec_acceptance=0.5)
        )
        ordered = [sequence(*one) for one in sorted(requests, key=lambda one: one[2])]
        return engine, run(engine, **{str(i): one for i, one in enumerate(ordered)}), ordered

    engine, times, sequences = serve()
    assert [len(times[str(i)]) for i in range(len(sequences))] == [one.output_tokens for one in sequences]
    assert engine.free_blocks == 8
    assert not engine.running
    assert not engine.waiting
    scheduled = [one.scheduled_ns or 0 for one in sequences]
    assert scheduled == sorted(scheduled)  # first come, first served
    assert all(one.queued_ns <= (one.scheduled_ns or 0) for one in sequences)
    assert serve()[1] == times  # and again the same
