"""Counting tokens by a tokenizer on this host, or by the engine's own ``/tokenize``.

``tokenizers`` is optional and this module is its only home: import it only where a directory was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load.sender import Fetches

try:
    import tokenizers

    Tokenizer: Any = tokenizers.Tokenizer
except ImportError:
    Tokenizer = None


class Local:
    """A ``tokenizer.json`` in a directory, as Hugging Face's models have it."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError where the library or the file is not there."""
        if Tokenizer is None:
            raise ConfigError("--tokenizer wants the library tokenizers: pip install 'tapproxy[tokens]'")
        file = directory / "tokenizer.json" if directory.is_dir() else directory
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
            # What a file was saved with for training: a count that stops at 512 is none.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(f"--tokenizer {quote(str(file))} is no tokenizer.json: {str(error)[:120]}") from None
        self.name = f"tokenizer {directory.name}"

    def tokens(self, text: str, special: bool) -> int:
        """Tokens of the text; ``special``: with those that the model wants around a plain prompt."""
        return len(self._tokenizer.encode(text, add_special_tokens=special).ids)

    async def count(self, text: str) -> int:
        """Tokens of the text itself, without a model's special ones."""
        return self.tokens(text, False)


class Remote:
    """The engine's ``/tokenize``: vLLM answers ``count``, SGLang and llama.cpp the list of tokens."""

    name = "the engine's /tokenize"

    def __init__(
        self, client: Fetches, target: str, model: str | None, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self._client = client
        self._target = target
        self._model = model
        self._headers = [(b"Content-Type", b"application/json"), *headers]

    async def try_count(self, text: str) -> int | None:
        """None where the engine does not tell."""
        body: dict[str, Any] = {"prompt": text, "content": text, "add_special_tokens": False}
        if self._model is not None:
            body["model"] = self._model
        fetched = await self._client.fetch("POST", self._target, self._headers, orjson.dumps(body))
        if fetched.error is not None or fetched.status != 200:
            return None
        try:
            said = orjson.loads(fetched.body)
            found = said["count"] if "count" in said else len(said["tokens"])
        except (ValueError, KeyError, TypeError):
            return None
        return found if type(found) is int and found > 0 else None

    async def count(self, text: str) -> int:
        """Raises ConfigError where the engine, which told before, no longer does."""
        found = await self.try_count(text)
        if found is None:
            raise ConfigError("the engine's /tokenize answers no more: give --tokenizer DIR, or try again")
        return found
