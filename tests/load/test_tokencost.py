"""What a file asks, how its template is rendered, and what it costs: with a clock that is turned by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load import asked as asked_
from tapproxy.load import template as template_
from tapproxy.load import tokencost
from tapproxy.load.asked import Asked
from tapproxy.load.template import RefusedError, Template

MS = 1_000_000
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Words:
    """A word is a token and takes its time: as a tokenizer would, on a clock of its own."""

    def __init__(self, per_token_ns: int = 1000, fixed_ns: int = 0) -> None:
        self.now_ns = 0
        self.seen: list[tuple[str, bool]] = []
        self._per_token_ns = per_token_ns
        self._fixed_ns = fixed_ns

    def clock(self) -> int:
        return self.now_ns

    def tokens(self, text: str, special: bool) -> int:
        self.seen.append((text, special))
        count = len(text.split()) + special
        self.now_ns += self._fixed_ns + count * self._per_token_ns
        return count


def measured(
    asked: Sequence[Asked], words: Words, template: Template | None = None, budget_s: float = 60.0
) -> tokencost.Measured:
    *_, last = tokencost.measure(asked, words, template, budget_s=budget_s, now_ns=words.clock, cpu_ns=words.clock)
    return last


def prompts(*lengths: int) -> list[Asked]:
    return [Asked(text=" ".join(["w"] * length)) for length in lengths]


def template(text: str = CHAT, **special: str) -> Template:
    return Template("chat_template.jinja", {"default": text}, special)


# Reading files


def read(tmp_path: Path, text: str, **more: bool) -> asked_.Batch:
    file = tmp_path / "prompts"
    file.write_text(text)
    return asked_.read(file, **more)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('{"messages": [{"role": "user", "content": "hi"}]}', Asked(messages=(USER,)), id="chat request"),
        pytest.param(
            '{"custom_id": "1", "method": "POST", "body": {"messages": [{"role": "user", "content": "hi"}]}}',
            Asked(messages=(USER,)),
            id="a batch file's line",
        ),
        pytest.param('{"input": [{"role": "user", "content": "hi"}]}', Asked(messages=(USER,)), id="responses"),
        pytest.param('{"prompt": "hi there"}', Asked(text="hi there"), id="completion"),
        pytest.param('["hi"]', Asked(text="hi"), id="a list of texts"),
        pytest.param("hi there\n\n", Asked(text="hi there"), id="a line of text"),
        pytest.param(
            '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}]}',
            Asked(messages=(USER,)),
            id="sharegpt",
        ),
        pytest.param(
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"},'
            ' {"type": "text", "text": "b"}]}]}',
            Asked(messages=({"role": "user", "content": "a\nb"},), not_text=1),
            id="parts",
        ),
        pytest.param(
            '{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}',
            Asked(messages=(USER,), tools=({"type": "function"},)),
            id="tools",
        ),
        pytest.param(
            json.dumps(
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "content": None,
                            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
                        }
                    ]
                }
            ),
            Asked(
                messages=(
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
                    },
                )
            ),
            id="arguments of a call are an object to the template",
        ),
    ],
)
def test_each_shape_of_a_request_is_read(tmp_path: Path, text: str, expected: Asked) -> None:
    assert read(tmp_path, text).asked == [expected]


def test_plain_prompts_may_be_taken_as_a_user_s_message(tmp_path: Path) -> None:
    assert read(tmp_path, "hi\n", as_chat=True).asked == [Asked(messages=(USER,))]


def test_lists_of_token_ids_and_empty_prompts_are_counted(tmp_path: Path) -> None:
    batch = read(tmp_path, '{"prompt": [1, 2]}\n{"prompt": [[1], [2]]}\n{"prompt": ""}\n{"prompt": ["a", "b"]}\n')
    assert (batch.token_ids, batch.empty, [each.text for each in batch.asked]) == (2, 1, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no prompt"),
        ("{}", "holds no prompt"),
        ('{"prompt": 5}', "entry 1 holds no prompt"),
        ('{"prompt": "a"}\n{oops\n', "line 2 is no JSON"),
        ("[1, 2", "is no JSON"),
        ("[5]", "is no object"),
        ('{"messages": []}', "messages is no list with a message in it"),
        ('{"messages": ["x"]}', "a message is no object with a role"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content is not text"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "tools is no list of objects"),
    ],
)
def test_what_is_no_request_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, text)


# Rendering templates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(CHAT, "<user>hi<assistant>", id="usual"),
        pytest.param(
            "{{ bos_token }}\n    {% if true %}\nx\n    {% endif %}\n{{ eos_token }}",
            "<s>\nx\n</s>",
            id="blanks are trimmed as transformers does",
        ),
        pytest.param("{{ tools | tojson }}", "null", id="no tools"),
        pytest.param("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}', id="tojson does not escape"),
        pytest.param(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", "hi"
        ),
        pytest.param("{{ strftime_now('%Y')[:2] }}", "20", id="the date"),
        pytest.param("{{ missing }}", "", id="an unknown name is nothing"),
    ],
)
def test_a_template_is_rendered_as_engines_do(text: str, expected: str) -> None:
    made = template(text, bos_token="<s>", eos_token="</s>")
    assert made.render([USER]) == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{{ raise_exception('roles must alternate: ' + messages[0].content) }}", "by its own rules"),
        ("{{ messages.missing.deep }}", "failing with UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "failing with SecurityError"),
        ("{{ messages.append(1) }}", "failing with SecurityError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "failing with OverflowError"),
        ("{% include 'etc' %}", "failing with TypeError"),
    ],
)
def test_what_a_template_does_not_render_is_refused_without_the_prompt_s_words(text: str, kind: str) -> None:
    with pytest.raises(RefusedError, match=kind) as caught:
        template(text).render([USER])
    assert "hi" not in str(caught.value).split()


def test_a_broken_template_says_its_line() -> None:
    with pytest.raises(ConfigError, match=r"is broken \(line 2\)"):
        template("\n{% if %}")


def test_where_a_directory_keeps_its_template(tmp_path: Path) -> None:
    assert template_.of(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    found = template_.of(tmp_path)
    assert found is not None
    assert (found.source, found.render([USER])) == ("tokenizer_config.json", "one <s>")
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = template_.of(tmp_path / "tokenizer.json")  # the file may be named as well
    assert found is not None
    assert (found.render([USER]), found.render([USER], [{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("own file")
    found = template_.of(tmp_path)
    assert found is not None
    assert (found.source, found.render([USER])) == ("chat_template.jinja", "own file")
    config.write_text("no json")
    with pytest.raises(ConfigError, match="is no JSON"):
        template_.of(tmp_path)


# Measuring


def test_a_chat_is_measured_by_way_of_its_template_and_a_plain_prompt_with_special_tokens() -> None:
    words = Words()
    made = template("{{ messages[0].content }} end")
    state = measured([Asked(messages=(USER,)), Asked(text="hi")], words, made)
    by_text = {cost.characters: cost for cost in state.costs}
    assert {("hi end", False), ("hi", True)} == set(words.seen)
    assert by_text[len("hi end")].tokens == 2
    assert by_text[len("hi")].tokens == 2  # the word, and a special one
    assert by_text[len("hi")].template_ns is None
    assert by_text[len("hi end")].template_ns == 0


def test_without_a_template_a_conversation_is_its_contents() -> None:
    words = Words()
    measured([Asked(messages=({"role": "system", "content": "a"}, {"role": "user", "content": None}, USER))], words)
    assert words.seen[-1] == ("a\n\n\n\nhi", False)


def test_the_tools_schemas_are_told_apart() -> None:
    made = template("{{ messages[0].content }}{% for t in tools or [] %} {{ t.name }} x{% endfor %}")
    (cost,) = measured([Asked(messages=(USER,), tools=({"name": "a"}, {"name": "b"}))], Words(), made).costs
    assert (cost.tokens, cost.tool_tokens) == (5, 4)


def test_tools_that_a_template_does_not_render_are_said() -> None:
    state = measured([Asked(messages=(USER,), tools=({"name": "a"},))], Words(), template())
    assert any("renders no tools" in warning for warning in tokencost.result(state)["warnings"])


def test_what_the_template_refuses_is_counted() -> None:
    made = template("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x")
    state = measured([Asked(messages=(USER,)), Asked(messages=({"role": "system", "content": "x"},))], Words(), made)
    assert len(state.costs) == 1
    assert state.refused == {"by its own rules (roles, their order, tools)": 1}


def test_figures_that_can_be_checked_in_the_head() -> None:
    """1 ms a prompt and 1 µs a token, a special token with each: 100, 200, … 2000 tokens."""
    lengths = [100 * each - 1 for each in range(1, 21)]
    found = tokencost.result(measured(prompts(*lengths), Words(per_token_ns=1000, fixed_ns=MS)))
    assert found["tokens"] == {"p50": 1000, "p95": 1900, "max": 2000, "mean": 1050, "total": 21000}
    assert found["tokenize_ms"] == {"p50": 2.0, "p95": 2.9, "max": 3.0, "mean": 2.05}
    assert found["template_ms"] is None
    assert found["fit"] == {"fixed_ms": 1.0, "per_token_us": 1.0}
    assert (found["tokens_per_s"], found["prompts_per_s"]) == (round(21000 / 0.041), 487.8)
    assert found["warnings"] == []


def test_nothing_is_told_beyond_the_longest_prompt() -> None:
    found = tokencost.result(measured(prompts(*range(1000, 10_000, 1000)), Words()))
    assert found["at_tokens"]["8192"] == {"ms": 8.192, "why": None}
    assert found["at_tokens"]["32768"] == {"ms": None, "why": "the longest prompt measured has 9001 tokens"}


@pytest.mark.parametrize("lengths", [range(100, 107), [50] * 30], ids=["too few", "all of one length"])
def test_no_line_is_drawn_through_too_little(lengths: Sequence[int]) -> None:
    found = tokencost.result(measured(prompts(*lengths), Words()))
    assert found["fit"] is None
    assert "no line could be fitted" in found["at_tokens"]["8192"]["why"]


def test_a_few_interrupted_prompts_bend_no_line() -> None:
    points = [(tokens, tokens * 1000 + (50 * MS if tokens % 10 == 0 else 0)) for tokens in range(100, 1000, 7)]
    line = tokencost.fit(points)
    assert line is not None
    assert line.per_token_ns == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("power", "said"), [(1, False), (2, True)])
def test_a_cost_that_grows_faster_than_the_prompt_is_said(power: int, said: bool) -> None:
    state = tokencost.Measured([tokencost.Cost(n, n, None, 900_000 + n**power) for n in range(1, 4000, 100)])
    warnings = tokencost.result(state)["warnings"]
    assert any("does not grow evenly" in warning for warning in warnings) == said


def test_the_budget_ends_it_and_what_is_left_is_said() -> None:
    state = measured(prompts(*[999] * 40), Words(per_token_ns=1000), budget_s=0.0095)
    assert (len(state.costs), state.left) == (10, 30)
    warnings = tokencost.result(state)["warnings"]
    assert "30 prompts were not measured: the time was up (--budget)" in warnings
    assert "10 more prompts are needed for a 95th percentile" in warnings
    assert tokencost.result(state)["tokens"]["p95"] is None


def test_a_busy_host_is_said() -> None:
    state = tokencost.Measured([tokencost.Cost(5, 5, None, 5)], wall_ns=100, cpu_ns=50)
    (warning, _) = tokencost.result(state)["warnings"]
    assert "for 50% of the time this process had no core" in warning


def test_nothing_measured_is_no_number() -> None:
    found: dict[str, Any] = tokencost.result(tokencost.Measured())
    assert (found["measured"], found["tokens_per_s"], found["fit"], found["characters_per_token"]) == (
        0,
        None,
        None,
        None,
    )
