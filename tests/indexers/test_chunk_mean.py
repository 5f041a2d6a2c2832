"""Block means against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import BLOCK_TOKENS, DIM, add_rows, assert_best, make_index, rounded, select
from oracles import ROUNDING, exactly, unit_scores

from tierstore.indexers import ChunkMeanIndex


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_representatives_are_means_rounded_once(dtype: torch.dtype) -> None:
    keys = torch.randn(12 * BLOCK_TOKENS, DIM, generator=torch.Generator().manual_seed(0))

    index = add_rows(make_index(ChunkMeanIndex, dtype=dtype), [keys])

    means = rounded(keys, dtype).reshape(12, BLOCK_TOKENS, DIM).mean(1)
    found = exactly(index.state()["vectors"][0, :12], dtype)
    np.testing.assert_allclose(found, means, rtol=1.01 * ROUNDING[dtype], atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_block_of_equal_keys_is_represented_by_that_key(dtype: torch.dtype) -> None:
    """Nothing is lost where keys do not differ, bit for bit."""
    keys = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)

    index = add_rows(
        make_index(ChunkMeanIndex, dtype=dtype), [keys.repeat_interleave(BLOCK_TOKENS, 0)]
    )

    assert (exactly(index.state()["vectors"][0, :6], dtype) == keys.double().numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 22)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_it_selects_by_the_largest_mass_over_heads(
    dtype: torch.dtype, rows: list[tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(n * BLOCK_TOKENS, DIM, generator=generator) for n, _ in rows]
    query = torch.randn(len(rows), 3, DIM, generator=generator) * 3
    index = add_rows(make_index(ChunkMeanIndex, group=3, dtype=dtype), keys)

    found = select(index, query, [budget for _, budget in rows])

    for row, (ids, scores) in enumerate(found):
        means = exactly(index.state()["vectors"][row, : rows[row][0]], dtype)
        sizes = np.full(len(means), float(BLOCK_TOKENS))
        expected = unit_scores(rounded(query[row], dtype), means, sizes, DIM**-0.5, "max")
        assert_best(ids, expected, rows[row][1], tolerance=1e-4)
        np.testing.assert_allclose(scores, expected[ids], atol=1e-5, rtol=1e-5)


def test_mass_is_the_largest_over_heads_and_not_the_sum() -> None:
    """Block 0 takes nearly all of one head; block 1 half of each of the others."""
    keys = torch.zeros(3 * BLOCK_TOKENS, DIM)
    keys[:BLOCK_TOKENS, 0], keys[BLOCK_TOKENS:, 1] = 1, 1
    query = torch.zeros(1, 3, DIM)
    query[0, 0, 0] = query[0, 1, 1] = query[0, 2, 1] = 30

    index = add_rows(make_index(ChunkMeanIndex, group=3, scale=1.0), [keys])

    assert select(index, query, [1])[0][0] == [0]
