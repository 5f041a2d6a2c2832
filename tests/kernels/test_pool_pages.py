"""Scores of blocks from those of their pages, against float64 NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import log_sum_exp

from tierstore import kernels
from tierstore.kernels import reference

if TYPE_CHECKING:
    from types import ModuleType

both_backends = pytest.mark.parametrize("operations", [kernels, reference], ids=["numba", "torch"])
softmax_or_not = pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "raw"])


@both_backends
@softmax_or_not
@pytest.mark.parametrize("coarse", [True, False], ids=["clusters", "pages"])
@pytest.mark.parametrize("keeps", [True, False], ids=["keeps", "keeps-none"])
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.sampled_from([1, 2, 5]),
    st.integers(0, 2**32 - 1),
)
def test_blocks_score_what_their_pages_score_together(
    operations: ModuleType,
    softmax: bool,
    coarse: bool,
    keeps: bool,
    blocks: list[int],
    pages_per_block: int,
    seed: int,
) -> None:
    """A fifth of the units has nothing; what stands behind a row's pages is no number of a unit."""
    random = np.random.default_rng(seed)
    rows, room = len(blocks), max(blocks) + 1
    units = 7 if coarse else room * pages_per_block
    scores = (random.standard_normal((rows, units)) * 8).astype(np.float32)
    scores[random.random(scores.shape) < 0.2] = -np.inf
    unit_of = random.integers(0, units, (rows, room * pages_per_block)).astype(np.int32)
    for row, count in enumerate(blocks):
        unit_of[row, count * pages_per_block :] = 1_000_000
    kept = random.random((rows, room)) < 0.3
    out = np.full((rows, room), np.nan, np.float32)

    operations.pool_pages(
        scores, unit_of if coarse else None, kept if keeps else None, np.array(blocks, np.int32),
        pages_per_block, softmax, out,
    )  # fmt: skip

    for row, count in enumerate(blocks):
        of = unit_of[row] if coarse else np.arange(units)
        own = scores[row].astype(np.float64)[of[: count * pages_per_block]]
        pages = own.reshape(count, pages_per_block)
        expected = log_sum_exp(pages, axis=1) if softmax else pages.max(1)
        if keeps and count:
            expected = np.where(kept[row, :count], max(expected.max(), -3e38) + 1, expected)
        np.testing.assert_allclose(out[row, :count], expected, rtol=1e-6, atol=2e-6)
        assert np.isnan(out[row, count:]).all()


@both_backends
@softmax_or_not
def test_kept_blocks_come_first_also_where_nothing_scores(
    operations: ModuleType, softmax: bool
) -> None:
    out = np.empty((1, 3), np.float32)
    kept = np.array([[False, True, False]])

    operations.pool_pages(
        np.full((1, 3), -np.inf, np.float32), None, kept, np.array([3], np.int32), 1, softmax, out
    )

    assert np.isneginf(out[0, [0, 2]]).all()
    assert np.isfinite(out[0, 1])
