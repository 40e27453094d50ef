"""`tapproxy tokens` with a tokenizer of words, made here."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tapproxy import cli
from tapproxy.load import limits
from tapproxy.load import tokens as tokens_

tokenizers = pytest.importorskip("tokenizers", reason="the optional library")

SECRET = "xylophone"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A word is a token, saved to stop at eight, as some are."""
    found = tmp_path / "model"
    found.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(8)
    made.save(str(found / "tokenizer.json"))
    (found / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% for t in tools or [] %}{{ t | tojson }}"
        "{% endfor %}"
    )
    return found


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": " ".join([SECRET] * n)}]} for n in range(10, 40)]
    lines[0]["tools"] = [{"name": "f"}]  # type: ignore[list-item]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["tokens", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return running


def test_the_prompts_of_a_file_are_counted_and_timed(directory: Path, chats: Path, run: Run) -> None:
    code, out, err = run(str(chats), "--tokenizer", str(directory), "--json", "-")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "tapproxy.tokens/1"
    assert found["prompts"] == {"read": 30, "chat": 30, "plain": 0, "with_tools": 1, "not_measured": {}}
    # 10 to 39 words, and the role before them; the file's own limit of eight does not count.
    assert found["tokens"]["max"] == 40
    assert found["tool_tokens"] == {"p50": 2, "p95": None, "max": 2, "mean": 2, "prompts": 1}
    assert found["total_ms"]["p50"] > 0
    assert found["fit"]["per_token_us"] > 0
    assert SECRET not in out


def test_the_screen_shows_no_prompt(directory: Path, chats: Path, run: Run) -> None:
    code, out, err = run(str(chats), "--tokenizer", str(directory))
    assert code == 0
    assert "30 of 30 prompts measured (30 conversations, 0 plain, 1 with tools)" in out
    assert "  131,072 tokens: not told: the longest prompt measured has 40 tokens" in out
    assert SECRET not in out + err


def test_plain_text_goes_without_a_template_unless_told(directory: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one two three\n" * 5)
    _, out, _ = run(str(file), "--tokenizer", str(directory), "--json", "-")
    assert json.loads(out)["tokens"]["max"] == 3
    _, out, _ = run(str(file), "--tokenizer", str(directory), "--as-chat", "--json", "-")
    assert json.loads(out)["tokens"]["max"] == 4


def test_prompts_that_cannot_be_measured_end_with_why(directory: Path, tmp_path: Path, chats: Path, run: Run) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"prompt": [1, 2, 3]}\n')
    code, _, err = run(str(ids), "--tokenizer", str(directory))
    assert (code, "lists of token ids" in err) == (3, True)
    (directory / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    code, out, err = run(str(chats), "--tokenizer", str(directory))
    assert code == 3
    assert "no prompt could be measured: 30: the chat template refused them" in err
    assert SECRET not in out + err


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "taking more than 0.2 s"),
        # Computed while it is compiled, and while it is rendered.
        ("{{ 'a' * 10**11 }}", "asking for more memory than any prompt wants"),
        ("{{ 'a' * (10**11 + messages | length) }}", "asking for more memory than any prompt wants"),
        ("{{ 'a' * (10**8 + messages | length) }}", "asking for more memory than any prompt wants"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failing with SecurityError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failing with RecursionError"),
    ],
)
def test_a_hostile_template_is_bounded(
    directory: Path, chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch, template: str, why: str
) -> None:
    monkeypatch.setattr("tapproxy.commands.tokens.bounded", partial(limits.bounded, tick_s=0.05))
    monkeypatch.setattr("tapproxy.commands.tokens.Running", partial(limits.Running, 0.2))
    chats.write_text(chats.read_text().splitlines(keepends=True)[1])
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    (directory / "chat_template.jinja").write_text(template)
    code, _, err = run(str(chats), "--tokenizer", str(directory))
    assert (code, err.count("\n")) == (3, 1)
    assert why in err
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, chats: Path, run: Run) -> None:
    code, _, err = run(str(chats), "--tokenizer", str(tmp_path))
    assert code == 2
    assert "is no tokenizer.json" in err


def test_a_missing_library_is_one_sentence(
    directory: Path, chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_, "Tokenizer", None)
    code, _, err = run(str(chats), "--tokenizer", str(directory))
    assert code == 2
    assert err == "tapproxy: --tokenizer wants the library tokenizers: pip install 'tapproxy[tokens]'\n"
