"""Where prompts come from: a file of conversations, or made-up text of a wanted length.

Rules here: one seed gives one list of prompts; a file is read whole before anything is sent, and what is wrong with
it is said with its line. What prompts say is never shown.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load.plan import PREFIX_WORDS, words

_MAX_FILE_BYTES: Final = 1 << 30
_EXPECTED: Final = (
    'expected an object with "messages" (OpenAI), "conversations" (ShareGPT), "prompt" or "text" on every line'
)
# ShareGPT's names of who speaks.
ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# A correction by the number of missing tokens is right at once where a word is a token; odd vocabularies take a few.
_CORRECTIONS: Final = 6


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``messages``: (role, text); ``text`` is the same as one text; ``tokens``: where somebody counted.

    ``max_tokens``: the length of its answer, where the source says one.
    """

    text: str
    messages: tuple[tuple[str, str], ...] = ()
    tokens: int | None = None
    max_tokens: int | None = None


class Counter(Protocol):
    """Counts the tokens of a text. ``name`` says how, for the result."""

    @property
    def name(self) -> str: ...

    async def count(self, text: str) -> int: ...


class Characters:
    """No tokenizer at hand: a token for every five characters, as a common word of four letters with its space is."""

    name = "no tokenizer: estimated as five characters a token"

    async def count(self, text: str) -> int:
        return max(1, round((len(text) + 1) / 5))


def refuse_too_short(tokens: int) -> None:
    """Raises ConfigError for a length that a prompt's own prefix alone exceeds."""
    if tokens <= PREFIX_WORDS:
        raise ConfigError(
            f"a prompt of {tokens} tokens is too short: its unique prefix alone has {PREFIX_WORDS};"
            f" ask for at least {PREFIX_WORDS + 1}"
        )


async def synthetic(count: int, tokens: int, seed: int, counter: Counter) -> list[Prompt]:
    """``count`` texts, each with ``tokens`` tokens together with a prefix of its own (which is put before it later).

    As near as the vocabulary allows. Raises ConfigError for a length that the prefix alone exceeds.
    """
    refuse_too_short(tokens)
    chance = random.Random(f"{seed}:{tokens}")
    return [await _sized(chance, tokens, counter) for _ in range(count)]


async def _sized(chance: random.Random, tokens: int, counter: Counter) -> Prompt:
    prefix = words(chance, PREFIX_WORDS)
    own = words(chance, tokens - PREFIX_WORDS).split(" ")
    best: tuple[int, int, str] | None = None
    for _ in range(_CORRECTIONS):
        text = " ".join(own)
        found = await counter.count(f"{prefix} {text}")
        if best is None or abs(found - tokens) < best[0]:
            best = (abs(found - tokens), found, text)
        if found == tokens:
            break
        if found > tokens:
            del own[max(1, len(own) - max(1, (found - tokens) * len(own) // found)) :]
        else:
            own += words(chance, max(1, (tokens - found) * len(own) // found)).split(" ")
    assert best is not None
    return Prompt(best[2], tokens=best[1])


def digest(prompts: Sequence[Prompt]) -> str:
    """Names a list of prompts without telling it: two runs with the same name sent the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(orjson.dumps([prompt.text, list(prompt.messages), prompt.max_tokens]))
    return digest.hexdigest()[:16]


def read(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file, or of a JSON array as ShareGPT's are published.

    Raises ConfigError where the file cannot be read or an entry is none.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--prompts {quote(str(path))} is larger than 1 GiB: give a part of it")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {quote(str(path))} cannot be read: {error.strerror}") from None
    found = []
    for where, entry in _entries(path, data):
        prompt = _prompt(entry, where)
        if prompt is not None:
            found.append(prompt)
    if not found:
        raise ConfigError(f"--prompts {quote(str(path))} holds no prompt: {_EXPECTED}")
    return found


def _entries(path: Path, data: bytes) -> list[tuple[str, Any]]:
    """(where it stands, value) of each."""
    name = f"--prompts {quote(str(path))}"
    if data.lstrip()[:1] == b"[":
        try:
            values = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{name} is no JSON (line {error.lineno}): {_EXPECTED}") from None
        return [(f"{name}, entry {number}", value) for number, value in enumerate(values, 1)]
    return json_lines(name, data, _EXPECTED)


def json_lines(name: str, data: bytes, expected: str) -> list[tuple[str, Any]]:
    """(where it stands, value) of each line that is not empty. Raises ConfigError where one is no JSON."""
    out = []
    # By line feeds alone: JSON strings may hold the other line ends of Unicode.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                out.append((f"{name}, line {number}", orjson.loads(line)))
            except orjson.JSONDecodeError:
                raise ConfigError(f"{name}, line {number} is no JSON: {expected}") from None
    return out


def _prompt(entry: Any, where: str) -> Prompt | None:
    """None: a conversation that nobody but the assistant opens, of which ShareGPT has some."""
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no object: {_EXPECTED}")
    limit = _limit(entry, where)
    if "messages" in entry or "conversations" in entry:
        messages = _openai(entry["messages"], where) if "messages" in entry else _sharegpt(entry, where)
        if not messages:
            return None
        return Prompt("\n\n".join(text for _, text in messages), messages, max_tokens=limit)
    text = entry.get("prompt", entry.get("text"))
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where} holds no prompt: {_EXPECTED}")
    return Prompt(text, max_tokens=limit)


def _limit(entry: dict[str, Any], where: str) -> int | None:
    for key in ("max_tokens", "max_completion_tokens", "output_tokens"):
        value = entry.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ConfigError(f"{where}: {key} is {quote(str(value)[:40])}: expected a whole number from 1 on")
            return value
    return None


def _openai(messages: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is no list with a message in it")
    out = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: a message is no object with a role")
        out.append((message["role"], _text(message.get("content"), where)))
    return tuple(out)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts or len(texts) < len(parts):
        raise ConfigError(f"{where}: a message's content is not text: expected a string or a list of text parts")
    return "\n".join(texts)


def _sharegpt(entry: dict[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    """What comes before the assistant's first turn: the rest is what the engine is to say itself."""
    turns = entry["conversations"]
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: conversations is no list")
    out = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ConfigError(f"{where}: a turn of the conversation is no object with a value")
        role = ROLES.get(str(turn.get("from")), "user")
        if role == "assistant":
            break
        if turn["value"]:
            out.append((role, turn["value"]))
    return tuple(out)
