"""Scores of index units, both CPU backends against float64 NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Floats, Stored, exactly, stored, unit_scores

from tierstore import kernels
from tierstore.kernels import reference

# (query heads per row, dim, element type): each is compiled once.
SHAPES = [
    (1, 64, torch.bfloat16),
    (3, 64, torch.float32),
    (4, 128, torch.bfloat16),
    (5, 80, torch.float16),
    (7, 96, torch.float32),
    (8, 256, torch.float16),
]

Counts = npt.NDArray[np.int32]
Sizes = npt.NDArray[np.float32]


def run(
    backend: str,
    query: Stored,
    units: Stored,
    counts: Counts,
    sizes: Sizes,
    scale: float,
    aggregate: str,
) -> npt.NDArray[np.float32]:
    out = np.full(units.shape[:2], np.nan, np.float32)
    logits = np.full((len(query), query.shape[1], units.shape[1]), np.nan, np.float32)
    operations = reference if backend == "torch" else kernels
    operations.dot_logits(query, units, counts, scale, logits)
    operations.combine_heads(logits, counts, sizes, 1.0, None, aggregate, True, 1, out)
    return out


def assert_scores_close(found: npt.NDArray[np.float32], expected: Floats, spread: float) -> None:
    """Scores are logits: their error grows with the spread of the logits."""
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-6 * max(1.0, spread))


both_backends = pytest.mark.parametrize("backend", ["numba", "torch"])
both_aggregates = pytest.mark.parametrize("aggregate", ["sum", "max"])


@both_backends
@both_aggregates
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"G{s[0]}-d{s[1]}-{s[2]}")
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1.0, 30.0]),
)
def test_score_is_log_mass_of_one_token_of_the_unit(
    shape: tuple[int, int, torch.dtype],
    aggregate: str,
    backend: str,
    units_of_row: list[int],
    seed: int,
    spread: float,
) -> None:
    """Places behind a row's units are NaN, and a third of the units is empty."""
    group, dim, dtype = shape
    random = np.random.default_rng(seed)
    rows, room, scale = len(units_of_row), max(units_of_row) + 1, spread * dim**-0.5
    query = stored(random.standard_normal((rows, group, dim)), dtype)
    values = random.standard_normal((rows, room, dim))
    sizes = random.choice([0, 0, 1, 4, 5, 60], (rows, room)).astype(np.float32)
    for row, count in enumerate(units_of_row):
        values[row, count:], sizes[row, count:] = np.nan, np.nan
    units, counts = stored(values, dtype), np.array(units_of_row, np.int32)

    found = run(backend, query, units, counts, sizes, scale, aggregate)

    for row, count in enumerate(units_of_row):
        expected = unit_scores(
            exactly(query[row], dtype),
            exactly(units[row, :count], dtype),
            sizes[row, :count].astype(np.float64),
            scale,
            aggregate,
        )
        assert_scores_close(found[row, :count], expected, spread)
        assert np.isnan(found[row, count:]).all()


@both_backends
@both_aggregates
def test_empty_units_get_nothing_and_take_nothing(backend: str, aggregate: str) -> None:
    """The empty unit has by far the largest logit: it must not enter the normaliser either."""
    query = np.array([[[1.0, 0.0]]], np.float32)
    units = np.array([[[500.0, 0.0], [0.0, 0.0], [0.0, 0.0]]], np.float32)
    sizes = np.array([[0.0, 1.0, 3.0]], np.float32)

    found = run(backend, query, units, np.array([3], np.int32), sizes, 1.0, aggregate)

    np.testing.assert_allclose(found, [[-np.inf, -np.log(4), -np.log(4)]], rtol=1e-6)


@both_backends
@both_aggregates
def test_all_units_empty_all_get_nothing(backend: str, aggregate: str) -> None:
    query, units = np.ones((1, 3, 2), np.float32), np.ones((1, 5, 2), np.float32)

    found = run(
        backend, query, units, np.array([4], np.int32), np.zeros((1, 5), np.float32), 1.0, aggregate
    )

    assert np.isneginf(found[0, :4]).all()


@both_backends
def test_size_weighs_in_the_normaliser_but_not_in_the_score(backend: str) -> None:
    """Two units with the same vector score alike, however many tokens each stands for."""
    query = np.array([[[1.0, 0.0]]], np.float32)
    units = np.array([[[2.0, 1.0], [2.0, -1.0]]], np.float32)
    sizes = np.array([[1.0, 63.0]], np.float32)

    found = run(backend, query, units, np.array([2], np.int32), sizes, 1.0, "sum")

    np.testing.assert_allclose(found, [[-np.log(64), -np.log(64)]], rtol=1e-6)


@both_backends
@pytest.mark.parametrize(
    ("aggregate", "expected"), [("sum", np.log([1.5, 0.5])), ("max", np.log([1.0, 0.5]))]
)
def test_heads_are_normalised_before_they_are_combined(
    backend: str, aggregate: str, expected: npt.NDArray[np.float64]
) -> None:
    """One head sees unit 0 alone, the other sees both alike; logits summed first would differ."""
    query = np.array([[[200.0, 0.0], [0.0, 0.0]]], np.float32)
    units = np.array([[[1.0, 0.0], [0.0, 1.0]]], np.float32)
    sizes = np.ones((1, 2), np.float32)

    found = run(backend, query, units, np.array([2], np.int32), sizes, 1.0, aggregate)

    np.testing.assert_allclose(found, [expected], rtol=1e-6, atol=1e-7)


@both_backends
@both_aggregates
def test_huge_logits_do_not_overflow(backend: str, aggregate: str) -> None:
    query = np.array([[[1e5]]], np.float32)
    units = np.array([[[-1.0], [1.0], [0.5]]], np.float32)

    found = run(
        backend, query, units, np.array([3], np.int32), np.ones((1, 3), np.float32), 1.0, aggregate
    )

    np.testing.assert_allclose(found, [[-2e5, 0.0, -0.5e5]])
