"""Where blocks are used: the choice against every possible one, counted here once more."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.costs import PlaceCosts
from tierstore.hardware import PRESETS

seconds = st.floats(0, 10)
rows = st.lists(st.tuples(st.integers(0, 40), st.floats(1, 50)), min_size=1, max_size=6)


def spent(costs: PlaceCosts, row: tuple[int, float], *, stays: bool) -> float:
    misses, uses = row
    return misses * (uses * costs.far if stays else costs.move + uses * costs.near)


def brute_force(costs: PlaceCosts, table: list[tuple[int, float]]) -> float:
    best = float("inf")
    for choice in product([False, True], repeat=len(table)):
        total = sum(
            spent(costs, row, stays=stays) for row, stays in zip(table, choice, strict=True)
        )
        moved = any(row[0] and not stays for row, stays in zip(table, choice, strict=True))
        stayed = any(row[0] and stays for row, stays in zip(table, choice, strict=True))
        best = min(best, total + costs.fetch_call * moved + costs.far_call * stayed)
    return best


@given(seconds, seconds, seconds, seconds, seconds, rows)
def test_the_choice_costs_as_little_as_any(
    move: float, near: float, far: float, fetch: float, call: float, table: list[tuple[int, float]]
) -> None:
    costs = PlaceCosts(move, near, far, fetch, call)
    misses = np.array([row[0] for row in table], np.int64)
    uses = np.array([row[1] for row in table])
    chosen = costs.stays(misses, uses)
    assert costs.total(misses, uses, chosen) == pytest.approx(brute_force(costs, table), rel=1e-9)


@pytest.mark.parametrize(("fetch", "call", "stays"), [(0, 9, False), (9, 0, True)])
def test_a_call_that_costs_more_than_it_saves_is_not_made(
    fetch: float, call: float, stays: bool
) -> None:
    # The first row would go one way, the second the other.
    costs = PlaceCosts(2.0, 1.0, 1.5, fetch, call)
    misses, uses = np.array([1, 1]), np.array([1.0, 10.0])
    assert costs.stays(misses, uses).tolist() == [stays, stays]


def test_heads_that_wander_stay_and_heads_that_return_are_fetched() -> None:
    # Over a PCIe link a block pays for its way once it is used a few times.
    costs = PlaceCosts.of(replace(PRESETS["h200"], admit=1e-9), 2048, 8192.0)
    uses = np.array([1.0, 2.0, 20.0, 50.0])
    stays = costs.stays(np.full(4, 10_000), uses)
    assert stays.tolist() == [True, True, False, False]


def test_blocks_are_fetched_where_all_of_the_fast_tier_is_used_anyway() -> None:
    costs = PlaceCosts.of(PRESETS["reference"], 2048, 8192.0, uses_all_near=True)
    assert costs.near == 0
    misses = np.array([5000, 5000])
    assert not costs.stays(misses, np.array([20.0, 50.0])).any()


def test_one_processor_over_one_memory_never_moves_many_blocks() -> None:
    costs = PlaceCosts.of(PRESETS["reference"], 2048, 8192.0)
    assert costs.near == costs.far
    assert costs.stays(np.array([5000, 5000]), np.array([1.0, 50.0])).all()
