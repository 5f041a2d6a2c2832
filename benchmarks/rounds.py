"""Paired measuring: everything in turn, and ratios within a round."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

T = TypeVar("T")

Say = Callable[[str], None]
"""Is told how far a benchmark is."""


class Spread(NamedTuple):
    """How some values lie."""

    min: float
    median: float
    mean: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of at least one value."""
        return cls(min(values), statistics.median(values), statistics.fmean(values), max(values))


@dataclass(frozen=True, slots=True)
class Measure:
    """One quantity, measured for several configurations.

    Attributes
    ----------
    values: by configuration; those at the same place belong to one round or one position of a text.
    """

    unit: str
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient of two configurations, pair by pair, and what it should be.

    Attributes
    ----------
    says: what it compares.
    measure, numerator, denominator: names of a measure and of two configurations.
    at_least, at_most, stretch: targets of the median; None for none.
    """

    says: str
    measure: str
    numerator: str
    denominator: str
    at_least: float | None = None
    at_most: float | None = None
    stretch: float | None = None

    def quotients(self, measures: Mapping[str, Measure]) -> list[float]:
        """One for each pair."""
        values = measures[self.measure].values
        pairs = zip(values[self.numerator], values[self.denominator], strict=True)
        return [above / below for above, below in pairs]

    def is_met(self, median: float) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.at_least is not None:
            return median >= self.at_least
        return None if self.at_most is None else median <= self.at_most

    @property
    def target(self) -> str:
        """The targets in words; empty where there are none."""
        bounds = (("at least", self.at_least), ("at most", self.at_most), ("stretch", self.stretch))
        return ", ".join(f"{word} {bound:.2f}" for word, bound in bounds if bound is not None)


def alternate(
    runs: Mapping[str, Callable[[int], T]],
    rounds: int,
    after_round: Callable[[int, Mapping[str, T]], None],
    *,
    warm_up: int = 1,
) -> dict[str, list[T]]:
    """Results of every run in every round: A B C, A B C, and so on.

    So whatever slows the machine down for a while slows all down alike. A run is told the number of
    the round; the first `warm_up` rounds do not count, and are neither reported nor returned. The
    garbage collector works between rounds only, as with `timeit`.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(warm_up + rounds):
        with _without_collector():
            latest = {name: run(number) for name, run in runs.items()}
        if number < warm_up:
            continue
        for name, result in latest.items():
            results[name].append(result)
        after_round(number - warm_up + 1, latest)
    return results


@contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def listed(values: Mapping[str, float]) -> str:
    """Names and numbers on one line."""
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())
