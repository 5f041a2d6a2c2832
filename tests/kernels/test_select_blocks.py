"""Choosing the best units within a budget: both CPU backends against sorting all blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import kernels
from tierstore.kernels import reference

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tables:
    """Scores [R, u], and the blocks of each unit for each row or once for all."""

    scores: npt.NDArray[np.float32]
    counts: Ints
    costs: Ints
    unit_ptr: Ints
    unit_blocks: Ints

    @classmethod
    def of(cls, scores: list[list[float]], blocks: list[list[list[int]]]) -> Tables:
        """Spare places hold what must not be read."""
        units = max(map(len, scores)) + 1
        width = max(sum(map(len, row)) for row in blocks) + 1
        table = cls(
            np.full((len(scores), units), np.nan, np.float32),
            np.array([len(row) for row in scores], np.int32),
            np.full((len(blocks), units), 1000, np.int32),
            np.full((len(blocks), units), -1000, np.int32),
            np.full((len(blocks), width), -1000, np.int32),
        )
        for row, values in enumerate(scores):
            table.scores[row, : len(values)] = values
        for row, members in enumerate(blocks):
            costs = np.array([len(unit) for unit in members], np.int32)
            flat = [block for unit in members for block in unit]
            table.costs[row, : len(costs)] = costs
            table.unit_ptr[row, : len(costs)] = np.cumsum(costs) - costs
            table.unit_blocks[row, : len(flat)] = flat
        return table

    def select(self, backend: str, budgets: list[int]) -> tuple[list[list[int]], list[list[float]]]:
        """Selected ids and scores of each row."""
        total = sum(budgets)
        ids, scores = np.full(total, -1, np.int32), np.full(total, np.nan, np.float32)
        row_ptr = np.full(len(budgets) + 1, -1, np.int64)
        tables = (self.scores, self.counts, self.costs, self.unit_ptr, self.unit_blocks)
        wanted = np.array(budgets, np.int32)
        if backend == "torch":
            found = reference.select_blocks(*tables, wanted, row_ptr, ids, scores)
        else:
            order = np.full(self.scores.shape[1], -1, np.int32)
            found = kernels.select_blocks(*tables, wanted, order, row_ptr, ids, scores)
        assert found == row_ptr[-1]
        assert row_ptr[0] == 0
        assert (ids[found:] == -1).all()
        cuts = row_ptr[1:-1].tolist()
        return (
            [part.tolist() for part in np.split(ids[:found], cuts)],
            [part.tolist() for part in np.split(scores[:found], cuts)],
        )


def best_blocks(
    scores: list[float], members: list[list[int]], budget: int
) -> tuple[list[int], list[float]]:
    """The best of all (score, unit, place) triples; those at the cut stand last.

    The cut is the lowest score that the budget reaches; beyond all blocks, the lowest there is.
    """
    everything = sorted(
        (-score, unit, place)
        for unit, score in enumerate(scores)
        for place in range(len(members[unit]))
    )
    best = everything[:budget]
    cut = -best[-1][0] if 0 < budget <= len(everything) else min(scores, default=0.0)
    ordered = sorted(best, key=lambda triple: (triple[0] == -cut, *triple[1:]))
    return [members[unit][place] for _, unit, place in ordered], [-s for s, _, _ in ordered]


both_backends = pytest.mark.parametrize("backend", ["numba", "torch"])

# Few different values, so that ties abound; -inf is the score of an empty unit.
some_scores = st.sampled_from([-np.inf, -87.5, -3.0, -1.0, -0.5, 0.0]) | st.floats(-50, 0, width=32)


@st.composite
def rows_of_units(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[int]]], list[int]]:
    rows = draw(st.integers(1, 3))
    scores, blocks, budgets = [], [], []
    for _ in range(rows):
        values = draw(st.lists(some_scores, max_size=24))
        costs = draw(st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
        shuffled = iter(draw(st.permutations(range(sum(costs)))))
        scores.append(values)
        blocks.append([[next(shuffled) for _ in range(cost)] for cost in costs])
        budgets.append(draw(st.integers(0, sum(costs) + 3)))
    return scores, blocks, budgets


@both_backends
@given(rows_of_units())
def test_selection_is_the_best_blocks_in_a_fixed_order(
    backend: str, case: tuple[list[list[float]], list[list[list[int]]], list[int]]
) -> None:
    scores, blocks, budgets = case

    ids, picked = Tables.of(scores, blocks).select(backend, budgets)

    expected = [best_blocks(*row) for row in zip(scores, blocks, budgets, strict=True)]
    assert ids == [row_ids for row_ids, _ in expected]
    assert picked == [np.array(row_scores, np.float32).tolist() for _, row_scores in expected]


@both_backends
@given(
    st.lists(st.lists(some_scores, min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_tables_of_one_row_serve_all_rows(
    backend: str, scores: list[list[float]], budget: int
) -> None:
    one_each = [[[block] for block in range(6)]]

    ids, _ = Tables.of(scores, one_each).select(backend, [budget] * len(scores))

    assert ids == [best_blocks(row, one_each[0], budget)[0] for row in scores]


@both_backends
def test_the_last_unit_is_cut_to_meet_the_budget(backend: str) -> None:
    tables = Tables.of([[-2.0, -1.0, -3.0]], [[[7, 8, 9], [4, 5], [0, 1]]])

    ids, scores = tables.select(backend, [4])

    assert ids == [[4, 5, 7, 8]]
    assert scores == [[-1.0, -1.0, -2.0, -2.0]]


@both_backends
def test_ties_go_to_the_earlier_unit(backend: str) -> None:
    tables = Tables.of([[-1.0, -5.0, -1.0, -1.0]], [[[3], [2], [1], [0]]])

    assert tables.select(backend, [2])[0] == [[3, 1]]


@both_backends
def test_budget_beyond_the_blocks_takes_all_of_them(backend: str) -> None:
    tables = Tables.of([[-2.0, -1.0], [-1.0]], [[[0, 1], [2]], [[0]]])

    assert tables.select(backend, [9, 9])[0] == [[2, 0, 1], [0]]


@both_backends
def test_budget_of_nothing_and_rows_of_nothing_select_nothing(backend: str) -> None:
    tables = Tables.of([[-2.0], [], [-1.0]], [[[0]], [], [[5]]])

    assert tables.select(backend, [0, 3, 1])[0] == [[], [], [5]]


@pytest.mark.parametrize(("budget", "expected"), [(1, [1]), (2, [1, 3]), (4, [1, 2, 3, 0])])
def test_what_is_no_number_comes_first(budget: int, expected: list[int]) -> None:
    """Its logit was beyond float32."""
    scores = np.array([-1.0, np.nan, np.inf, -np.nan, -2.0] + 70 * [-3.0], np.float32)
    tables = Tables.of([scores.tolist()], [[[block] for block in range(75)]])

    assert tables.select("numba", [budget])[0] == [expected]


@pytest.mark.parametrize("step", [2, -1])
def test_scores_may_be_a_part_of_an_array(step: int) -> None:
    values = np.random.default_rng(1).standard_normal(300).astype(np.float32)[::step]
    blocks = [[block] for block in range(len(values))]
    tables = Tables.of([values.tolist()], [blocks])
    wide = np.zeros((1, 600), np.float32)[:, ::step][:, : len(values) + 1]
    wide[:] = tables.scores
    tables = replace(tables, scores=wide)

    assert tables.select("numba", [9])[0] == [best_blocks(values.tolist(), blocks, 9)[0]]


@pytest.mark.parametrize(
    "arrangement", ["random", "ascending", "descending", "all equal", "two values"]
)
def test_thousands_of_units_in_any_arrangement(arrangement: str) -> None:
    random = np.random.default_rng(0)
    units = 5_000
    values = {
        "random": random.standard_normal(units),
        "ascending": np.arange(units),
        "descending": -np.arange(units),
        "all equal": np.zeros(units),
        "two values": random.integers(0, 2, units),
    }[arrangement].astype(np.float32)
    costs = random.integers(0, 9, units)
    starts = np.cumsum(costs) - costs
    blocks = [list(range(start, start + cost)) for start, cost in zip(starts, costs, strict=True)]
    tables = Tables.of([values.tolist()], [blocks])

    ids, _ = tables.select("numba", [1_250])

    assert ids == [best_blocks(values.tolist(), blocks, 1_250)[0]]


@pytest.mark.parametrize("most", [1, 5], ids=["one block each", "clusters"])
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.sampled_from([1, 40, 700, 20_000]))
def test_of_many_units_a_sample_does_not_change_the_answer(
    most: int, seed: int, kind: int, budget: int
) -> None:
    """Also where the best ones stand just where the sample looks, or nowhere near it."""
    random = np.random.default_rng(seed)
    units = int(random.integers(2000, 4000))
    scores = random.normal(size=units).astype(np.float32)
    if kind == 1:
        scores[::64] += 10
    elif kind == 2:
        scores[1::64] += 10
    elif kind == 3:
        scores[random.random(units) < 0.9] = -np.inf
    scores = np.round(scores, 1)
    costs = random.integers(1, most + 1, units) if most > 1 else np.ones(units, int)
    ends = np.cumsum(costs).tolist()
    members = [list(range(end - cost, end)) for end, cost in zip(ends, costs, strict=True)]

    ids, picked = Tables.of([scores.tolist()], [members]).select("numba", [budget])

    expected, expected_scores = best_blocks(scores.tolist(), members, budget)
    assert ids == [expected]
    assert picked == [expected_scores]
