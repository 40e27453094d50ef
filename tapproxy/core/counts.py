"""How many tokens the events of one answer carry, told only where it is known.

Rules here: a count comes from the event itself (a running total, token ids, logprobs), or at the end from the
engine's total, where that leaves one answer; else it stays None. Where the counts told exceed the total, none of them
is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

TOKEN_KINDS: Final = frozenset(("token", "tool", "reasoning"))

MAX_ANSWERS: Final = 1024
# Ended by the limit: the last token had its own event, and no end-of-sequence token came.
_BY_LENGTH: Final = frozenset(("length", "max_tokens", "max_output_tokens"))


class Answer:
    """One of the answers asked for (``n``, several prompts): how far its count is known."""

    __slots__ = ("length", "said", "total", "unknown")

    def __init__(self) -> None:
        self.total = 0  # tokens so far, where ``unknown`` is 0
        self.unknown = 0  # token events of unknown count since the engine last said a total
        self.said: int | None = None  # the engine's own running total
        self.length = (0, 0)  # of SGLang's cumulative text: characters and checksum

    def told(self, said: int) -> int | None:
        """Takes the engine's running total; returns what this event added, None where that can't be told."""
        gained = None if self.unknown or said < self.total else said - self.total
        self.said = self.total = said
        self.unknown = 0
        return gained

    def counted(self, tokens: int | None) -> None:
        """Takes an event without a running total."""
        if tokens is None:
            self.unknown += 1
        else:
            self.total += tokens


class TokenCounts:
    """The counts of one response."""

    __slots__ = ("_maybe", "_soft", "answers", "vague")

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.vague = False  # some event's tokens can't be told even with the total: resolve nothing
        self._maybe: set[int] = set()  # finish events that may be the end-of-sequence token
        self._soft: set[int] = set()  # finish events held to carry no token, until the total says they do

    def new_answer(self, number: int) -> Answer:
        """The state of an answer not seen before. Beyond the limit it is not kept."""
        answer = Answer()
        if len(self.answers) < MAX_ANSWERS:
            self.answers[number] = answer
        return answer

    def said(self) -> int | None:
        """The sum of the running totals, None where there are none."""
        said = [answer.said for answer in self.answers.values() if answer.said is not None]
        return sum(said) if said else None

    def of_finish(self, choice: dict[str, Any], reason: Any, event: int) -> int | None:
        """Tokens of a chat or completions finish that shows no text and no count.

        vLLM marks a choice that ended with ``stop_reason``: this event is its end-of-sequence token. SGLang and
        llama.cpp send the finish by itself, without any content. An empty content from elsewhere may be either.
        """
        if "stop_reason" in choice:
            return 0 if reason == "abort" else None
        delta = choice.get("delta")
        if choice.get("text") == "" if delta is None else type(delta) is dict and delta.get("content") == "":
            self._maybe.add(event)
            return None
        return self.of_separate_finish(reason, event)

    def of_separate_finish(self, reason: Any, event: int) -> int:
        """A finish that holds nothing else carries no token; only a total that is one more can say otherwise."""
        if type(reason) is not str or reason not in _BY_LENGTH:
            self._soft.add(event)
        return 0

    def resolve(self, kinds: Sequence[str], tokens: Sequence[int | None], total: int | None) -> list[int | None]:
        """The counts at the end of the stream. ``total``: the engine's last word, None where it said none.

        An event of unknown count carries at least one token. So where the total leaves as many tokens as there are
        such events each carries one; where it leaves one event open that one carries the rest. Everything else
        stays unknown.
        """
        out = list(tokens)
        if total is None:
            # A running total will do, unless there is an event after it whose count is unknown.
            if self.said() is None or any(answer.unknown for answer in self.answers.values()):
                return out
            total = sum(answer.total for answer in self.answers.values())
        left = total - sum(count for count in out if count is not None)
        if left < 0:
            told = TOKEN_KINDS | {"finish"}
            return [None if kind in told else count for kind, count in zip(kinds, out, strict=False)]
        if self.vague:
            return out
        unknown = [event for event, count in enumerate(out) if count is None]
        sure = sum(event not in self._maybe for event in unknown)
        soft = [event for event in self._soft if event < len(out)]
        if left == sure:
            for event in unknown:
                out[event] = 0 if event in self._maybe else 1
        elif left == len(unknown):
            for event in unknown:
                out[event] = 1
        elif len(unknown) == 1 and not soft and left:
            out[unknown[0]] = left
        elif not unknown and len(soft) == 1:
            out[soft[0]] = left
        return out


def own_count(choice: dict[str, Any]) -> int | None:
    """How many tokens a chat or completions choice says it carries, by its token ids or its logprobs."""
    ids = choice.get("token_ids")
    if type(ids) is list:
        return len(ids)
    logprobs = choice.get("logprobs")
    if type(logprobs) is not dict:
        return None
    for key in ("content", "refusal"):
        listed = logprobs.get(key)
        if type(listed) is list and listed:
            return len(listed)
    listed = logprobs.get("tokens")
    if type(listed) is not list or not listed:
        return None
    odds = logprobs.get("token_logprobs")
    if type(odds) is list and odds and odds[0] is None:
        # ``echo``: the prompt's tokens come first, and the very first has no probability.
        prompt = choice.get("prompt_token_ids")
        return max(len(listed) - len(prompt), 0) if type(prompt) is list else None
    return len(listed)
