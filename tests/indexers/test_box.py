"""ArkVale's boxes against their definition, and the one selection that all heads share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from index_rows import BLOCK_TOKENS, DIM, add_rows, assert_best, make_index, rounded, select
from oracles import ROUNDING, exactly

from tierstore.indexers import IndexShape, StatisticalBoxIndex
from tierstore.interfaces import IndexContext
from tierstore.memory import Memory
from tierstore.scratch import Scratch


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_box_is_the_middle_and_the_mean_distance_from_it(dtype: torch.dtype) -> None:
    keys = randn(12 * BLOCK_TOKENS, DIM, seed=0)

    index = add_rows(make_index(StatisticalBoxIndex, dtype=dtype), [keys])

    pages = rounded(keys, dtype).reshape(12, BLOCK_TOKENS, DIM)
    centre = (pages.max(1) + pages.min(1)) / 2
    radius = abs(pages - centre[:, None]).mean(1)
    for name, side in (("high", centre + radius), ("low", centre - radius)):
        found = exactly(index.state()[name][0, :12], dtype)
        np.testing.assert_allclose(found, side, rtol=1.01 * ROUNDING[dtype], atol=5e-7)


def test_a_box_is_no_bound() -> None:
    """One key far out: the mean distance does not reach it."""
    keys = torch.zeros(BLOCK_TOKENS, DIM)
    keys[0] = 1

    index = add_rows(make_index(StatisticalBoxIndex), [keys])

    assert exactly(index.state()["high"][0, 0], torch.float32).max() <= 1
    keys[1] = 0.5
    index = add_rows(make_index(StatisticalBoxIndex), [keys])
    assert exactly(index.state()["high"][0, 0], torch.float32).max() < 1


def test_all_heads_of_a_sequence_select_alike_by_the_mean_of_raw_scores() -> None:
    """Two sequences of two rows with three query heads each."""
    memory = Memory(1 << 24)
    scale = DIM**-0.5
    shape = IndexShape(3, DIM, torch.float32, BLOCK_TOKENS, scale, memory, Scratch(memory), heads=2)
    index = StatisticalBoxIndex(shape)
    index.add_rows(np.arange(4, dtype=np.int32))
    lengths, keys = [20, 11], []
    for sequence, blocks in enumerate(lengths):
        own = randn(2, blocks * BLOCK_TOKENS, DIM, seed=sequence)
        index.extend(slice(2 * sequence, 2 * sequence + 2), own, own, IndexContext())
        keys.append(own.double().numpy())
    query = randn(4, 3, DIM, seed=9)

    found = select(index, query, [5, 5, 4, 4])

    for sequence, blocks in enumerate(lengths):
        pages = keys[sequence].reshape(2, 1, blocks, BLOCK_TOKENS, DIM)
        centre = (pages.max(3) + pages.min(3)) / 2
        radius = abs(pages - centre[..., None, :]).mean(3)
        q = query[2 * sequence : 2 * sequence + 2].double().numpy()[:, :, None]
        scores = np.maximum(q * (centre + radius), q * (centre - radius)).sum(-1).mean((0, 1))
        first, second = found[2 * sequence : 2 * sequence + 2]
        assert first == second
        ids, picked = first
        assert_best(ids, scores * scale, [5, 4][sequence], tolerance=1e-5)
        np.testing.assert_allclose(picked, scores[ids] * scale, atol=1e-5)
