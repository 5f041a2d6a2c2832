"""Everything takes its turn in every round, and ratios are taken within rounds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tierstore.benchmarks.rounds import Measure, Ratio, Spread, alternate, listed

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_runs_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[tuple[str, int]] = []
    told: list[tuple[int, dict[str, int]]] = []

    def run(name: str, number: int) -> int:
        order.append((name, number))
        return 10 * number

    def after_round(number: int, latest: Mapping[str, int]) -> None:
        told.append((number, dict(latest)))

    results = alternate({name: partial(run, name) for name in "AB"}, 2, after_round)

    assert order == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 2), ("B", 2)]
    assert results == {"A": [10, 20], "B": [10, 20]}
    assert told == [(1, {"A": 10, "B": 10}), (2, {"A": 20, "B": 20})]


def test_ratios_are_those_of_pairs() -> None:
    """On a machine that slows down, the quotient of medians would be 1."""
    times = {"own": [1.0, 4.0, 8.0], "new": [4.0, 2.0, 4.0]}
    ratio = Ratio("speed", "time", "own", "new")
    quotients = ratio.quotients({"time": Measure("s", times)})
    assert quotients == [0.25, 2.0, 2.0]
    assert Spread.of(quotients) == Spread(0.25, 2.0, 4.25 / 3, 2.0)


@pytest.mark.parametrize(
    ("ratio", "median", "is_met"),
    [
        (Ratio("", "m", "a", "b", at_least=3.0), 3.0, True),
        (Ratio("", "m", "a", "b", at_least=3.0, stretch=9.0), 2.9, False),
        (Ratio("", "m", "a", "b", at_most=1.1), 1.1, True),
        (Ratio("", "m", "a", "b", at_most=1.1), 1.2, False),
        (Ratio("", "m", "a", "b"), 1.0, None),
    ],
)
def test_a_target_is_for_the_median(ratio: Ratio, median: float, is_met: bool | None) -> None:
    assert ratio.is_met(median) is is_met


def test_targets_are_named() -> None:
    assert Ratio("", "m", "a", "b", at_least=1.15, stretch=1.25).target == (
        "at least 1.15, stretch 1.25"
    )
    assert Ratio("", "m", "a", "b").target == ""


def test_values_are_listed_on_one_line() -> None:
    assert listed({"own": 1.0, "new": 2.345}) == "own 1.00, new 2.35"
