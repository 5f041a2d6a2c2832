"""What ``tierstore generate`` prints in the end: what moved, how fast it was, what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tierstore.adapters.cli.outcome import ratio
from tierstore.adapters.cli.text import visible
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.adapters.cli.outcome import Outcome
    from tierstore.adapters.generate import Comparison, Generation

_WIDTH = 110  # columns, where no terminal says how many there are
_NONE = "–"


def print_summary(outcome: Outcome) -> None:
    """Print the tables and findings of a run on standard output."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH
    ours = outcome.result.generation
    console.print()
    console.print(outcome.result.report.table())
    console.print()
    console.print(
        f"{outcome.model}, {outcome.dtype}, on {outcome.device}: {ours.prompt_tokens:,} tokens of "
        f"prompt, {len(ours.tokens):,} new",
        soft_wrap=True,
    )
    if loaded := outcome.result.loaded_tokens:
        console.print(
            f"prefixes: {loaded:,} tokens of the prompt were loaded, "
            f"{ours.prompt_tokens - loaded:,} computed",
            soft_wrap=True,
        )
    console.print(_speeds(outcome))
    for finding in _findings(outcome):
        console.print(finding, soft_wrap=True)


def _speeds(outcome: Outcome) -> Table:
    ours, comparison = outcome.result.generation, outcome.result.comparison
    bounded = (tier for tier in outcome.result.report.tiers if tier.limit_bytes is not None)
    columns = {
        "": (
            "prefill",
            "first decoding step",
            "decode after it",
            "median of a token",
            "KV cache in memory",
        ),
        "tierstore": _cells(ours, sum(tier.peak_bytes for tier in bounded)),
    }
    if comparison is not None:
        columns["full attention"] = _cells(comparison.full, comparison.full_kv_bytes)
        columns["tierstore is"] = _ratios(ours, comparison.full)
    table = Table()
    for heading in columns:
        table.add_column(heading, justify="right" if heading else "left")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _cells(generation: Generation, kv_bytes: int) -> tuple[str, ...]:
    return (
        f"{generation.prefill_rate:,.0f} tokens/s",
        _milliseconds(generation.first_step_seconds),
        _NONE if generation.decode_rate is None else f"{generation.decode_rate:,.1f} tokens/s",
        _milliseconds(generation.median_step_seconds),
        format_size(kv_bytes),
    )


def _ratios(ours: Generation, full: Generation) -> tuple[str, ...]:
    return (
        _speed(ratio(ours.prefill_rate, full.prefill_rate)),
        _speed(ratio(full.first_step_seconds, ours.first_step_seconds)),
        _speed(ratio(ours.decode_rate, full.decode_rate)),
        _speed(ratio(full.median_step_seconds, ours.median_step_seconds)),
        "",
    )


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:,.1f} ms"


def _speed(times: float | None) -> str:
    return _NONE if times is None else f"{times:.2f}× as fast"


def _findings(outcome: Outcome) -> Iterator[str]:
    comparison = outcome.result.comparison
    if comparison is not None:
        yield from _differences(comparison)
    if outcome.document.answer:
        yield from _verdicts(outcome)


def _differences(comparison: Comparison) -> Iterator[str]:
    total, difference = len(comparison.full.tokens), comparison.first_difference
    if difference is None:
        yield f"same tokens: yes, all {total}"
    else:
        yield f"same tokens: no, they differ from new token {difference + 1} of {total} on"
    if comparison.mean_kl is not None:
        yield (
            f"KL(full || tierstore) of the next token: mean {comparison.mean_kl:.4f} nats, largest "
            f"{max(comparison.kl):.4f}, over {len(comparison.kl)} tokens of full attention's text"
        )


def _verdicts(outcome: Outcome) -> Iterator[str]:
    answers = {"tierstore": outcome.answer, "full attention": outcome.full_answer}
    for who, answer in answers.items():
        if answer is not None:
            verdict = "right" if outcome.is_right(answer) else "wrong"
            shown = " ".join(visible(answer).split())
            yield f"planted fact {outcome.document.answer}: {who} is {verdict}: {shown!r}"
