"""What a benchmark found, for people and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tierstore.benchmarks.rounds import Measure, Ratio, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.benchmarks.machine import Machine

SCHEMA = 1
"""Version of the form of `Findings.to_dict`: raised when a field changes its meaning or goes."""

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Findings:
    """Measures of some configurations against a baseline.

    Attributes
    ----------
    baseline: the configuration that the others are compared with.
    settings: numbers and names that the benchmark ran with.
    configurations: what each name stands for.
    notes: sentences that a reader of the ratios needs.
    details: anything else worth keeping, as plain data.
    tables: printed instead of the measures, where there are any.
    """

    benchmark: str
    machine: Machine
    baseline: str
    settings: Mapping[str, object]
    configurations: Mapping[str, str]
    measures: Mapping[str, Measure]
    ratios: Sequence[Ratio] = ()
    notes: Sequence[str] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON.

        ====================  =====================================================================
        ``schema``            version of this form
        ``benchmark``         its name
        ``machine``           `Machine.to_dict`
        ``baseline``          name of a configuration
        ``settings``          what it ran with
        ``configurations``    name to description
        ``measures``          name to ``unit``, ``values`` (configuration to one number for each
                              round, or for each position of the text) and ``spread``
                              (configuration to ``min``, ``median``, ``mean``, ``max``)
        ``ratios``            list of ``says``, ``measure``, ``numerator``, ``denominator``,
                              ``values`` (one for each pair), ``spread``, ``at_least``, ``at_most``,
                              ``stretch`` (targets of the median, or null), ``is_met`` (or null)
        ``notes``             sentences
        ``details``           depends on the benchmark
        ====================  =====================================================================
        """
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "machine": self.machine.to_dict(),
            "baseline": self.baseline,
            "settings": dict(self.settings),
            "configurations": dict(self.configurations),
            "measures": {name: _measure(each) for name, each in self.measures.items()},
            "ratios": [self._ratio(each) for each in self.ratios],
            "notes": list(self.notes),
            "details": dict(self.details),
        }

    def print(self, console: Console | None = None) -> None:
        """Show it, by default on standard output."""
        console = console or Console(width=_WIDTH)
        console.print(f"\n{self.machine}", highlight=False, markup=False)
        settings = "; ".join(f"{name} {value}" for name, value in self.settings.items())
        console.print(settings, highlight=False, markup=False)
        for table in self.tables:
            console.print()
            console.print(table)
        for name, measure in self.measures.items() if not self.tables else ():
            console.print(f"\n{name}, {measure.unit}", highlight=False)
            console.print(self._measure_table(measure))
        if self.ratios:
            console.print("\nratios, pair by pair")
            console.print(self._ratio_table())
        for note in self.notes:
            console.print(f"\n{note}", highlight=False)

    def _ratio(self, ratio: Ratio) -> dict[str, object]:
        values = ratio.quotients(self.measures)
        spread = Spread.of(values)
        found = {
            "values": values,
            "spread": spread._asdict(),
            "is_met": ratio.is_met(spread.median),
        }
        return asdict(ratio) | found

    def _measure_table(self, measure: Measure) -> Table:
        table = _table("configuration", "min", "median", "mean", "max")
        for configuration, values in measure.values.items():
            label = configuration + (" (baseline)" if configuration == self.baseline else "")
            table.add_row(label, *(_number(value) for value in Spread.of(values)))
        return table

    def _ratio_table(self) -> Table:
        table = _table("", "min", "median", "max", "target", "met")
        for ratio in self.ratios:
            spread = Spread.of(ratio.quotients(self.measures))
            met = {True: "yes", False: "no", None: ""}[ratio.is_met(spread.median)]
            numbers = (f"{value:.2f}" for value in (spread.min, spread.median, spread.max))
            table.add_row(ratio.says, *numbers, ratio.target, met)
        return table


def _measure(measure: Measure) -> dict[str, object]:
    spreads = {name: Spread.of(values)._asdict() for name, values in measure.values.items()}
    values = {name: list(values) for name, values in measure.values.items()}
    return {"unit": measure.unit, "values": values, "spread": spreads}


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _number(value: float) -> str:
    """Four significant digits, without an exponent where people would not write one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
