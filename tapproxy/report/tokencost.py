"""`tapproxy tokens` for a terminal."""

from __future__ import annotations

from typing import Any


def lines(shown: dict[str, Any]) -> list[str]:
    """The result, line by line. No prompt is in it."""
    prompts = shown["prompts"]
    about = f"{shown['measured']} of {prompts['read']} prompts measured"
    about += f" ({prompts['chat']} conversations, {prompts['plain']} plain"
    about += f", {prompts['with_tools']} with tools)" if prompts["with_tools"] else ")"
    found = [about, f"tokenizer {shown['tokenizer']}, chat template {shown['template'] or 'none'}", ""]
    found.append(f"{'':<22}{'P50':>10}{'P95':>10}{'max':>10}{'mean':>10}")
    for name, key, digits in (
        ("tokens", "tokens", 0),
        ("  of them tools", "tool_tokens", 0),
        ("template, CPU ms", "template_ms", 3),
        ("tokenising, CPU ms", "tokenize_ms", 3),
        ("both, CPU ms", "total_ms", 3),
    ):
        if shown[key] is not None:
            found.append(f"{name:<22}" + "".join(f"{_number(shown[key][p], digits):>10}" for p in _COLUMNS))
    found += ["", *_rates(shown)]
    for word, number in prompts["not_measured"].items():
        found.append(f"note: {number} not measured: {word}")
    return found + [f"note: {warning}" for warning in shown["warnings"]]


_COLUMNS = ("p50", "p95", "max", "mean")


def _rates(shown: dict[str, Any]) -> list[str]:
    found = []
    if shown["tokens_per_s"] is not None:
        found.append(
            f"{shown['tokens_per_s']:,} tokens/s, {shown['prompts_per_s']:,} prompts like these a second, on one core"
        )
    line = shown["fit"]
    if line is not None:
        found.append(f"a prompt costs {line['fixed_ms']:.3f} ms + {line['per_token_us']:.3f} µs a token")
    for tokens, at in shown["at_tokens"].items():
        what = f"{int(tokens):>9,} tokens: "
        found.append(what + (f"{at['ms']:.1f} ms" if at["ms"] is not None else f"not told: {at['why']}"))
    return found


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
