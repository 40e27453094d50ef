"""What may be kept of a run: everything but prompts, completions and credentials.

Rules here: whoever keeps something passes it through here, also where it should hold nothing of the kind: a key in a
URL, a flag of the engine or an error's words is as much a key as one in a header. Texts are replaced by their length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

LEFT_OUT: Final = "…"
# Keys whose texts somebody wrote for, or got from, a model. "prompts" is one where it is a list: as a word it says
# where they come from.
_TEXTS: Final = frozenset(
    ("prompt", "prompts", "messages", "content", "completion", "completions", "input", "text", "reasoning", "body")
)
_TEXTS_AS_LISTS: Final = frozenset(("prompts", "completions", "input"))
_SECRET_NAME: Final = re.compile(
    r"(api[-_]?keys?|authori[sz]ation|bearer|cookie|credentials?|pass(word|wd|phrase)|secret|(private|pair)[-_]?key"
    r"|(access|admin|auth|hf|hub|bearer|session|refresh|api)[-_]?token)s?\Z",
    re.IGNORECASE,
)
_LEAST_TEXT: Final = 16
_USERINFO: Final = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY: Final = re.compile(r"(://[^\s?]*)\?\S*")
# How keys are told from words: a scheme of HTTP before them, or a prefix that providers give theirs.
_TOKENS: Final = re.compile(
    r"\b(Bearer|Basic)\s+\S+|\b(sk|pk|hf|gsk|nvapi|ghp|xai)[-_][A-Za-z0-9_-]{8,}", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a header, a flag or a key of that name holds a credential."""
    return _SECRET_NAME.search(name.lstrip("-")) is not None


class Redactor:
    """Takes out what may not be kept.

    ``secrets``: values that are known to be secret, wherever they stand; ``texts``: strings that are known to be
    prompts, under whatever key.
    """

    def __init__(self, secrets: Iterable[str] = (), texts: Iterable[str] = ()) -> None:
        # A short one may as well be a name: roles, paths.
        self._texts = frozenset(each for each in texts if len(each) >= _LEAST_TEXT)
        # A short one would tear words apart, and is none.
        self._secrets = sorted({each for each in secrets if len(each) >= 8}, key=len, reverse=True)

    def text(self, value: str) -> str:
        """A string without credentials."""
        for secret in self._secrets:
            value = value.replace(secret, LEFT_OUT)
        if "://" in value:
            value = _QUERY.sub(r"\1?" + LEFT_OUT, _USERINFO.sub("", value))
        return _TOKENS.sub(lambda match: (match[1] or match[2]) + " " + LEFT_OUT, value)

    def value(self, value: Any) -> Any:
        """Any JSON value, objects and lists all the way down. A new one: nothing is changed in place."""
        if isinstance(value, str):
            return _left_out(value) if value in self._texts else self.text(value)
        if isinstance(value, Mapping):
            return {str(key): self._of(str(key), each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _of(self, key: str, value: Any) -> Any:
        if is_secret(key):
            return None if value is None else LEFT_OUT
        name = key.lower()
        if name == "headers" and isinstance(value, Mapping):
            # The names of what was sent; values of the response headers that records keep are on an allow-list there.
            return {each: LEFT_OUT if is_secret(each) else self.value(kept) for each, kept in value.items()}
        if name in _TEXTS:
            # A list or an object of numbers is none.
            if isinstance(value, list | tuple | Mapping) and _characters(value):
                return _left_out(value)
            if isinstance(value, str) and name not in _TEXTS_AS_LISTS:
                return _left_out(value)
        return self.value(value)

    def arguments(self, words: Sequence[str]) -> list[str]:
        """A command line; the value after a secret flag, or after its ``=``, is left out."""
        kept: list[str] = []
        hide = False
        for word in words:
            flag, equals, _ = word.partition("=")
            if hide and not word.startswith("-"):
                kept.append(LEFT_OUT)
                continue  # some flags take several values
            hide = word.startswith("-") and not equals and is_secret(flag)
            kept.append(f"{flag}={LEFT_OUT}" if equals and is_secret(flag) else self.text(word))
        return kept


def _left_out(value: Any) -> dict[str, Any]:
    return {"left_out": _characters(value), "unit": "characters"}


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(_characters(each) for each in value)
    return 0


def texts(value: Any, *, inside: bool = False) -> list[str]:
    """Every prompt of a plan, in its order: for a digest that tells whether two runs asked the same.

    ``inside``: the value stands under a key of a text.
    """
    if isinstance(value, str):
        return [value] if inside else []
    if isinstance(value, Mapping):
        return [found for key, each in value.items() for found in texts(each, inside=inside or _holds_text(key, each))]
    if isinstance(value, list | tuple):
        return [found for each in value for found in texts(each, inside=inside)]
    return []


def _holds_text(key: Any, value: Any) -> bool:
    name = str(key).lower()
    return name in _TEXTS and not (isinstance(value, str) and name in _TEXTS_AS_LISTS)
