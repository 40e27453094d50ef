"""Body text from a seeded list of words: never the prompt's, and the same for the same seed."""

from __future__ import annotations

import random

# Some are longer, some are not ASCII: event sizes vary, and byte offsets differ from character offsets.
WORDS = (
    " the", " a", " of", " in", " and", " to", " is", " it", " on", " for", " with", " by", " at", " from",
    " river", " lantern", " copper", " garden", " window", " autumn", " letter", " harbour", " engine",
    " measure", " morning", " quiet", " station", " ladder", " mirror", " pocket", " thread", " orchard",
    " signal", " marble", " candle", " winter", " bridge", " paper", " needle", " valley", " compass",
    " extraordinary", " understanding", " archaeologist", " counterbalance", " incandescent",
    ",", ".", ";", " naïve", " café", " über", " señal", " мост", " 橋", " 🚂",
)  # fmt: skip
FILLER = "x"


class Voice:
    """The words of one choice."""

    def __init__(self, seed: int, request: int, index: int) -> None:
        self._random = random.Random(f"{seed}/{request}/{index}")

    def words(self, count: int) -> list[str]:
        return self._random.choices(WORDS, k=count)


def count_tokens(text: str) -> int:
    """The simulator's tokeniser: four bytes of UTF-8 a token, rounded up, at least one."""
    return max(1, -(-len(text.encode("utf-8", "surrogatepass")) // 4))
