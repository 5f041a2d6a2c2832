"""The exact index against float64 attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import (
    BLOCK_TOKENS,
    DIM,
    add_rows,
    assert_best,
    block_masses,
    make_index,
    rounded,
    select,
)

from tierstore.indexers import ExactIndex


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 22)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 4.0]),
)
def test_it_selects_the_blocks_of_most_attention_mass_over_all_heads(
    dtype: torch.dtype, rows: list[tuple[int, int]], seed: int, spread: float
) -> None:
    """Rows of different lengths, so that tables are wider than most rows."""
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn(n * BLOCK_TOKENS, DIM, generator=generator) for n, _ in rows]
    query = torch.randn(len(rows), 3, DIM, generator=generator)
    scale = spread * DIM**-0.5
    index = add_rows(make_index(ExactIndex, group=3, dtype=dtype, scale=scale), keys)

    found = select(index, query, [budget for _, budget in rows])

    for row, (ids, scores) in enumerate(found):
        mass = np.log(block_masses(rounded(query[row], dtype), rounded(keys[row], dtype), scale))
        assert_best(ids, mass, rows[row][1], tolerance=1e-4)
        np.testing.assert_allclose(scores, mass[ids], atol=1e-5 * max(1.0, spread), rtol=1e-5)


def test_mass_is_summed_over_heads_and_not_the_largest() -> None:
    """Block 0 takes nearly all of one head; block 1 of the two others."""
    keys = torch.zeros(3 * BLOCK_TOKENS, DIM)
    keys[:BLOCK_TOKENS, 0], keys[BLOCK_TOKENS : 2 * BLOCK_TOKENS, 1] = 1, 1
    query = torch.zeros(1, 3, DIM)
    query[0, 0, 0] = query[0, 1, 1] = query[0, 2, 1] = 30

    index = add_rows(make_index(ExactIndex, group=3, scale=1.0), [keys])

    assert select(index, query, [1])[0][0] == [1]
