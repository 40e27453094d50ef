"""What to send, over which path, in which order. Data only: nothing here sends, waits or reads a clock.

Rules here: one seed gives one plan; every path gets the same prompts; requests alternate between the paths one by
one, each round in an order of its own, so that neither drift nor warming up favours a path.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tapproxy.core.errors import ConfigError

# Common words of four letters, one token each (with its space) in the usual vocabularies: prompts of equal length in
# characters and, nearly, in tokens. What they say is of no matter.
_TEXT: Final = (
    "able area army away baby back ball bank base bear beat bill bird blue boat body book both call card care case "
    "city club cold come cool cost dark data date days dead deal dear deep door down draw drop east easy edge even "
    "face fact fair fall farm fast fear feel file film find fine fire fish five food foot form four free full game"
)
WORDS: Final = tuple(_TEXT.split())
# Eight of some sixty words: more than 10^14 prefixes, so that no two arms of any runs share one by chance.
PREFIX_WORDS: Final = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One request to send. Slots of one ``round`` have the same prompt but for its first ``PREFIX_WORDS`` words.

    ``prefix``: words of its own that go before the prompt (or its first message) when it is sent; empty where they
    are in the prompt already. ``messages``: (role, text), where the prompt is a conversation; ``prompt`` is then the
    same as one text. ``due_ns``: when to send it, counted from the start of its phase; None: when its turn comes.
    ``prompt_tokens``: how long the prompt was made, where somebody counted.
    """

    index: int
    round: int
    path: str
    prompt: str
    max_tokens: int
    gap_ms: float = 0.0
    warmup: bool = False
    due_ns: int | None = None
    block: int = 0
    prefix: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    prompt_tokens: int | None = None


def interleaved(
    paths: Sequence[str],
    requests: int,
    seed: int,
    *,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    gap_ms: float = 0.0,
    warmup: int = 0,
    prompts: Sequence[str] | None = None,
) -> list[Slot]:
    """``requests`` slots for each path, after ``warmup`` more of each that are not counted.

    Every arm's prompt opens with a prefix of its own, all of one length: a prefix cache that one path's request
    filled is of no use to the other path's. ``prompts`` are used in turn instead of made-up ones of about
    ``prompt_tokens`` words (the prefix comes on top). ``gap_ms``: pause before each request.

    Raises ConfigError for a plan that cannot be.
    """
    if not paths or len(set(paths)) != len(paths):
        raise ConfigError(f"a plan needs paths with different names, got: {', '.join(paths) or 'none'}")
    if requests < 1 or warmup < 0 or max_tokens < 1 or prompt_tokens < 1 or gap_ms < 0:
        raise ConfigError("requests, max tokens and prompt tokens must be at least 1, warm-up and gap at least 0")
    chance = random.Random(seed)
    used: set[str] = set()
    slots: list[Slot] = []
    for turn in range(warmup + requests):
        text = prompts[turn % len(prompts)] if prompts else words(chance, prompt_tokens)
        for path in chance.sample(list(paths), len(paths)):
            prompt = f"{_fresh_prefix(chance, used)} {text}"
            slots.append(Slot(len(slots), turn, path, prompt, max_tokens, gap_ms, warmup=turn < warmup))
    return slots


def _fresh_prefix(chance: random.Random, used: set[str]) -> str:
    while True:
        prefix = words(chance, PREFIX_WORDS)
        if prefix not in used:
            used.add(prefix)
            return prefix


def words(chance: random.Random, count: int) -> str:
    """``count`` words, drawn."""
    return " ".join(chance.choice(WORDS) for _ in range(count))


def salted(prefix: str, salt: int) -> str:
    """The prefix with every word replaced by another of the same length, one to one for one ``salt``.

    A plan that is sent again has the same prefixes, and an engine would find them in its cache: so each run puts its
    own in their place. Two prefixes that differ still differ.
    """
    places = {word: place for place, word in enumerate(WORDS)}
    out = []
    for word in prefix.split(" "):
        salt, shift = divmod(salt, len(WORDS))
        out.append(WORDS[(places[word] + shift) % len(WORDS)] if word in places else word)
    return " ".join(out)


# Every salt gives another mapping.
SALTS: Final = len(WORDS) ** PREFIX_WORDS
