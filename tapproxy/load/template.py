"""A model's chat template, rendered as the transformers library does, which is what engines render it with.

Rules here: the template is somebody else's program and runs in jinja's sandbox, with nothing but the conversation.
What it refuses is counted by whoever asked; its words, which may hold the prompt's, are not repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load.limits import Running, TooLongError

_FILE: Final = "chat_template.jinja"
_MOST_BYTES: Final = 8 << 20
# Ten million tokens: no model takes them, and a tokenizer would be at it for minutes.
_MOST_CHARACTERS: Final = 40_000_000
# Special tokens that templates name; all others are of no use to them.
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class RefusedError(Exception):
    """The template cannot render that conversation: its own rules, or a fault of it. ``kind``: which, in a word."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training: rendered as what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """``source``: the file it is from."""

    def __init__(
        self, source: str, texts: Mapping[str, str], special: Mapping[str, str], running: Running | None = None
    ) -> None:
        """``texts``: by name; ``default``, and ``tool_use`` where there is one. Raises ConfigError for a broken one."""
        self.source = source
        self.running = running or Running()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            # Constants are computed here already, however large they are.
            self.running.began_s = time.monotonic()
            self._made = {name: environment.from_string(text) for name, text in texts.items()}
        except (TooLongError, RecursionError):
            raise ConfigError(
                f"the chat template of {quote(source)} takes more time or memory than any wants"
            ) from None
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ConfigError(f"the chat template of {quote(source)} is broken (line {line})") from None
        finally:
            self.running.began_s = None
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text that the model gets, up to where it is to answer. Raises RefusedError."""
        name = "tool_use" if tools and "tool_use" in self._made else "default"
        try:
            self.running.began_s = time.monotonic()
            text = self._made[name].render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=True, **self._special
            )
            if len(text) > _MOST_CHARACTERS:
                raise MemoryError
            return text
        except TooLongError:
            raise RefusedError(f"taking more than {self.running.most_s:g} s") from None
        except MemoryError:
            raise RefusedError("asking for more memory than any prompt wants") from None
        except _OwnRulesError:
            raise RefusedError("by its own rules (roles, their order, tools)") from None
        except Exception as error:  # a template is a program, and fails in every way
            raise RefusedError(f"failing with {type(error).__name__}") from None
        finally:
            self.running.began_s = None


class _OwnRulesError(jinja2.TemplateError):
    pass


def _raise(message: str) -> None:
    raise _OwnRulesError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own one escapes what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def of(directory: Path, running: Running | None = None) -> Template | None:
    """The template in a model's directory: ``chat_template.jinja``, else that of ``tokenizer_config.json``; None where
    it has none. Raises ConfigError where a file cannot be read.
    ``running``: what looks after its time.
    """
    if not directory.is_dir():
        directory = directory.parent
    config = _json_file(directory / "tokenizer_config.json")
    special = _special(_json_file(directory / "special_tokens_map.json")) | _special(config)
    file = directory / _FILE
    if file.is_file():
        texts = {"default": _text(file)}
        extra = directory / "additional_chat_templates" / "tool_use.jinja"
        if extra.is_file():
            texts["tool_use"] = _text(extra)
        return Template(_FILE, texts, special, running)
    for name, found in (
        ("tokenizer_config.json", config.get("chat_template")),
        ("chat_template.json", _json_file(directory / "chat_template.json").get("chat_template")),
    ):
        if isinstance(found, str):
            return Template(name, {"default": found}, special, running)
        if isinstance(found, list):
            texts = _named(found)
            if "default" in texts:
                return Template(name, texts, special, running)
    return None


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """Token name → text."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _named(found: list[Any]) -> dict[str, str]:
    """A list of templates with names, as older files have it."""
    texts = {}
    for each in found:
        if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str):
            texts[each["name"]] = each["template"]
    return texts


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{quote(str(file))} is larger than {_MOST_BYTES >> 20} MiB: no chat template is")
        return file.read_text("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{quote(str(file))} cannot be read: {error.strerror}") from None


def _json_file(file: Path) -> dict[str, Any]:
    """Empty where there is none. Raises ConfigError where it is no JSON."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError):
        raise ConfigError(f"{quote(str(file))} is no JSON: expected the file as the model was published") from None
    return found if isinstance(found, dict) else {}
