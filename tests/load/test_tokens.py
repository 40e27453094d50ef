"""A tokenizer on this host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load import prompts
from tapproxy.load.plan import WORDS

tokenizers = pytest.importorskip("tokenizers", reason="the optional library")
tokens = pytest.importorskip("tapproxy.load.tokens")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Every word of the list is a token, but for those that begin with a, which are unknown and so a token too."""
    known = [word for word in WORDS if not word.startswith("a")]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(["?", *known])}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokens_are_counted_by_its_file(directory: Path) -> None:
    counter = tokens.Local(directory)
    assert asyncio.run(counter.count("ball bank able base")) == 4
    assert counter.name == f"tokenizer {directory.name}"
    made = asyncio.run(prompts.synthetic(3, 40, 1, counter))
    assert [prompt.tokens for prompt in made] == [40, 40, 40]


@pytest.mark.parametrize("content", [None, "", "{}", "not json"], ids=["no file", "empty", "another JSON", "no JSON"])
def test_a_directory_without_one_is_said(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json"):
        tokens.Local(tmp_path)
