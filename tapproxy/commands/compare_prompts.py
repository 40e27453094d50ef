"""The prompts of a comparison: from a file, or made up and counted by whoever can."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tapproxy.load import prompts as prompts_
from tapproxy.load import session
from tapproxy.load.facts import Known
from tapproxy.load.planning import Load
from tapproxy.load.session import Settings

# Made-up prompts take turns beyond this many: each still has a prefix of its own.
_MOST_PROMPTS: Final = 256
_PROBE_TEXT: Final = "able area army away baby back ball bank"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Where prompts come from."""

    file: Path | None
    tokens: int
    tokenizer: Path | None


async def gather(
    load: Load, tokens: int, source: Prompts, settings: Settings, known: dict[str, Known]
) -> tuple[list[prompts_.Prompt], str]:
    """The prompts, and the words for where they come from."""
    if source.file is not None:
        found = prompts_.read(source.file)
        # Files are often sorted: a part of one is no sample of it.
        chosen = _shuffled(found, load.seed)
        return chosen, f"file:{source.file.name} sha256:{prompts_.digest(found)}"
    base = settings.paths[0]
    client = settings.transport.client(base)
    try:
        counter: prompts_.Counter = prompts_.Characters()
        # Optional, and slow to start: only where it is used.
        from tapproxy.load import tokens as tokens_

        if source.tokenizer is not None:
            counter = tokens_.Local(source.tokenizer)
        else:
            model = session.model_of(settings, known)
            remote = tokens_.Remote(client, base.target("/tokenize"), model, settings.headers)
            if await remote.try_count(_PROBE_TEXT) is not None:
                counter = remote
        wanted = load.warmup + load.requests if load.requests is not None else _MOST_PROMPTS
        found = await prompts_.synthetic(min(wanted, _MOST_PROMPTS), tokens, load.seed, counter)
    finally:
        await client.close()
    return found, f"synthetic:{tokens} tokens ({counter.name})"


def _shuffled(found: list[prompts_.Prompt], seed: int) -> list[prompts_.Prompt]:
    return random.Random(f"prompts:{seed}").sample(found, len(found))
