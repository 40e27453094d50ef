"""What the choices of one request say: the text and the channel of each token, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from tapproxy.simulate.ask import Ask
from tapproxy.simulate.engine import Sequence
from tapproxy.simulate.shape import Piece
from tapproxy.simulate.words import Voice


@dataclass(slots=True)
class Speaker:
    """One choice's tokens: their texts, the channel of each, and how it ends."""

    ask: Ask
    index: int
    voice: Voice
    said: int = 0
    held: list[tuple[str, str]] = field(default_factory=list)  # (channel, text), not yet in an event

    def speak(self, gained: int) -> None:
        for word in self.voice.words(gained):
            self.said += 1
            self.held.append(self._token(self.said, word))

    def take(self) -> list[Piece]:
        """What is held as pieces, one for each run of one channel."""
        pieces: list[Piece] = []
        generated = self.said - len(self.held)
        for channel, text in self.held:
            generated += 1
            if pieces and pieces[-1].channel == channel != "tool_head":
                last = pieces.pop()
                pieces.append(Piece(channel, [*last.texts, text], generated))
            else:
                pieces.append(Piece(channel, [text], generated))
        self.held.clear()
        if self.said == self.ask.output_tokens:
            last = pieces.pop()
            pieces.append(Piece(last.channel, last.texts, last.generated, self.ask.finish_reason))
        return pieces

    def _token(self, number: int, word: str) -> tuple[str, str]:
        total = self.ask.output_tokens
        ends = self.ask.ends_with == "stop"
        if ends and number == total:
            return "content", ""  # the end-of-sequence token
        if self.ask.tool is not None:
            if number == 1:
                return "tool_head", ""
            if number == 2:
                return "tool", '{"query": "'
            return "tool", '"}' if ends and number == total - 1 else word
        if self.ask.chat and number <= self.ask.overrides.reasoning_tokens:
            return "reasoning", word
        return "content", word


class Choices:
    """The sequences of one request, a speaker for each, and how many still have tokens to come."""

    def __init__(self, ask: Ask, seed: int, number: int, arrival_ns: int) -> None:
        self.speakers: dict[Sequence, Speaker] = {}
        for prompt_tokens in ask.prompts:
            for _ in range(ask.n):
                voice = Voice(seed, number, len(self.speakers))
                sequence = Sequence(prompt_tokens, ask.output_tokens, arrival_ns, arrival_ns, ask.ends_with)
                self.speakers[sequence] = Speaker(ask, len(self.speakers), voice)
        self.sequences = list(self.speakers)
        self.left = len(self.sequences)

    def speak(self, sequence: Sequence, gained: int) -> Speaker:
        speaker = self.speakers[sequence]
        speaker.speak(gained)
        self.left -= sequence.finished
        return speaker
