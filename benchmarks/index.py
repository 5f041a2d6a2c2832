"""Every index at four budgets: what it finds, what that does to the model, and what it costs."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from tierstore.adapters.cli.pictures import new_figure
from tierstore.adapters.documents import beginning, read_document
from tierstore.adapters.models import DEMO_MODEL, load_model
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.index_plot import draw
from tierstore.benchmarks.index_quality import FULL, answers, distances, questions
from tierstore.benchmarks.indexes import BUDGETS, INDEXES, LOCAL, SINKS, Row, rows_of
from tierstore.benchmarks.language import check_window, real_text
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.recall import Truth, measure_recall
from tierstore.benchmarks.rounds import Measure
from tierstore.errors import ConfigError
from tierstore.traces.capture import Capture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.adapters.models import LoadedModel
    from tierstore.benchmarks.indexes import Candidate
    from tierstore.benchmarks.rounds import Say

PARTS = ("mass", "kl", "numbers")
STEPS = 64
STARTS = (0, 240_000)
"""Characters of the built-in text that the documents begin at."""

NUMBERS_TOKENS = 1_000
_BASELINE = Row("exact", 1)
_PER_BUDGET = {
    "mass": "attention captured / that of perfect selection of tokens, one per layer and KV head",
    "recall": "share of the best units that were selected, one per layer and KV head",
    "selected": "tokens selected / budget, one per layer and KV head",
    "KL": "nats, KL(full || sparse) of the next token",
    "exact match": "1 where the number was the likeliest answer",
    "log-probability": "nats per token of the right answer",
}
_COSTS = {
    "bytes": "bytes of the index per token and KV head, one per text",
    "build": "seconds for all KV heads of a layer",
    "select": "seconds per step, all layers, at the smallest budget",
}

Values = dict[str, dict[str, list[float]]]


class Plan(NamedTuple):
    """What is compared: rows of a table of indexes, and the parts to measure."""

    rows: Sequence[Row]
    table: Mapping[str, Candidate] = INDEXES
    parts: Sequence[str] = PARTS
    budgets: Sequence[float] = BUDGETS


def run(
    say: Say,
    *,
    tokens: int = 6_000,
    steps: int = STEPS,
    parts: str | None = None,
    indexes: str | None = None,
    documents: str | None = None,
    captures: str | None = None,
    model: str = DEMO_MODEL,
    plot: str | None = None,
) -> Findings:
    """Measure a model, or captures of one."""
    plan = Plan(rows_of(INDEXES, _listed(indexes)), parts=_parts(parts, captures))
    if plot is not None:
        new_figure(1, 1, plot)  # Refuses what could not be drawn after all the work.
    if captures is not None:
        seen = [_loaded(name) for name in _listed(captures) or ()]
        findings = measure_captures(say, seen, plan)
    else:
        texts = [read_document(name).text for name in _listed(documents) or ()]
        say(f"loading {model}")
        loaded = load_model(model)
        read = token_lists(loaded, tokens + steps, texts)
        findings = measure(say, loaded, read, plan, steps=steps)
    if plot is not None:
        draw(findings, plan.rows, plan.budgets, plot)
    return findings


def measure(
    say: Say,
    loaded: LoadedModel,
    texts: Sequence[Sequence[int]],
    plan: Plan,
    *,
    steps: int = STEPS,
    numbers_tokens: int = NUMBERS_TOKENS,
    numbers_texts: int = 6,
) -> Findings:
    """Measure a model on texts, of each the last `steps` tokens, and on planted numbers."""
    machine, values = Machine.here(), _no_values()
    rows, table, parts, budgets = plan
    for text in texts if {"mass", "kl"} & set(parts) else ():
        check_window(loaded.model, len(text))
        asked = rows if "kl" in parts else ()
        kl, seen = distances(say, loaded, text, steps, asked, table, budgets)
        for name, found in kl.items():
            values["KL"].setdefault(name, []).extend(found)
        if "mass" in parts:
            _add_recall(say, seen, plan, values)
    if "numbers" in parts:
        wanted = questions(loaded, numbers_tokens, numbers_texts)
        given = answers(say, loaded, wanted, rows, table, budgets)
        values["exact match"], values["log-probability"] = given
    settings: dict[str, object] = {
        "model": loaded.name,
        "dtype": str(loaded.model.dtype),
        "context tokens": ", ".join(f"{len(text) - steps:,}" for text in texts),
        "steps of each": steps,
    }
    if "numbers" in parts:
        settings["numbers asked for"] = len(values["exact match"][FULL])
    return _findings(machine, settings, plan, values)


def measure_captures(say: Say, captures: Sequence[Capture], plan: Plan) -> Findings:
    """Measure what was captured of a model: everything that needs no model."""
    machine, values = Machine.here(), _no_values()
    for capture in captures:
        _add_recall(say, capture, plan, values)
    settings: dict[str, object] = {
        "model": ", ".join(dict.fromkeys(str(each.facts.get("model")) for each in captures)),
        "context tokens": ", ".join(f"{each.prompt_tokens:,}" for each in captures),
        "steps of each": ", ".join(str(each.steps) for each in captures),
    }
    return _findings(machine, settings, plan, values)


def _add_recall(say: Say, capture: Capture, plan: Plan, values: Values) -> None:
    truth = Truth(capture)
    for row in plan.rows:
        found = measure_recall(truth, plan.table[row.name], row.block_tokens, plan.budgets)
        for measure in ("mass", "recall", "selected"):
            for budget, numbers in getattr(found, measure).items():
                values[measure].setdefault(row.at(budget), []).extend(numbers)
        values["bytes"].setdefault(str(row), []).append(found.nbytes)
        values["build"].setdefault(str(row), []).extend(found.build_seconds)
        values["select"].setdefault(str(row), []).extend(found.select_seconds)
        mass = ", ".join(f"{fmean(found.mass[budget]):.3f}" for budget in plan.budgets)
        say(f"{row}: {found.nbytes:.1f} bytes per token, mass {mass}")


def _findings(
    machine: Machine, settings: Mapping[str, object], plan: Plan, values: Values
) -> Findings:
    units = _PER_BUDGET | _COSTS
    measures = {name: Measure(units[name], found) for name, found in values.items() if found}
    configurations = {str(row): plan.table[row.name].says for row in plan.rows}
    return Findings(
        benchmark="index",
        machine=machine,
        baseline=str(_BASELINE),
        settings={**settings, "always attended": f"{SINKS} first, {LOCAL} last, and new tokens"},
        configurations={str(_BASELINE): INDEXES["exact"].says} | configurations,
        measures=measures,
        notes=["KL has a floor: the same sums are rounded differently in another order."],
        tables=_tables(plan, measures),
    )


def _tables(plan: Plan, measures: Mapping[str, Measure]) -> list[Table]:
    tables = [_budget_table(name, measures[name], plan) for name in _PER_BUDGET if name in measures]
    if "bytes" in measures:
        tables.append(_cost_table(measures, plan))
    return tables


def _budget_table(name: str, measure: Measure, plan: Plan) -> Table:
    table = _table(f"{name}, mean of {measure.unit}", *(f"{each:.2%}" for each in plan.budgets))
    if FULL in measure.values:
        table.add_row(FULL, *[_number(fmean(measure.values[FULL]))] * len(plan.budgets))
    for row in plan.rows:
        means = (fmean(measure.values[row.at(budget)]) for budget in plan.budgets)
        table.add_row(str(row), *map(_number, means))
    return table


def _cost_table(measures: Mapping[str, Measure], plan: Plan) -> Table:
    table = _table(
        "cost", "bytes per token and KV head", "build of a layer, ms", "select of a step, ms"
    )
    for row in plan.rows:
        nbytes, build, select = (fmean(measures[name].values[str(row)]) for name in _COSTS)
        table.add_row(str(row), f"{nbytes:.1f}", f"{1e3 * build:.1f}", f"{1e3 * select:.2f}")
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("index")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3f}"


def _no_values() -> Values:
    return {name: {} for name in _PER_BUDGET | _COSTS}


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


def _loaded(name: str) -> Capture:
    try:
        return Capture.load(Path(name))
    except OSError as error:
        raise ConfigError(
            f"capture={name!r}: {error.strerror}; pass a file of tierstore capture"
        ) from error


def _parts(parts: str | None, captures: str | None) -> Sequence[str]:
    """The parts that were named, or all that can be measured."""
    able = PARTS if captures is None else PARTS[:1]
    chosen = _listed(parts) or able
    for part in chosen:
        if part not in able:
            where = "" if captures is None else " of captures"
            raise ConfigError(
                f"parts: {part!r} cannot be measured{where}: expected {', '.join(able)}"
            )
    return chosen


def token_lists(loaded: LoadedModel, tokens: int, texts: Sequence[str]) -> list[list[int]]:
    """The first `tokens` tokens of each text, by default of two places of the built-in one."""
    if not texts:
        return [real_text(loaded.tokenizer, tokens, start) for start in STARTS]
    return [beginning(loaded.tokenizer, text, tokens) for text in texts]
