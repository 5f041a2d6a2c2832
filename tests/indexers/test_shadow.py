"""ShadowKV's outliers: which chunks they are, that they stay, and that nothing else sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import BLOCK_TOKENS, DIM, add_rows, assert_best, extend, make_index, rounded, select
from oracles import unit_scores

from tierstore.errors import ConfigError
from tierstore.indexers import ShadowKVIndex


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_outliers_come_beside_the_budget_and_are_not_scored(
    blocks: int, outliers: int, budget: int, seed: int
) -> None:
    """The chunks with the smallest cosine of a key to the mean; the rest is normalised alone."""
    keys, query = randn(blocks * BLOCK_TOKENS, DIM, seed=seed), randn(1, 2, DIM, seed=seed + 1)
    index = add_rows(make_index(ShadowKVIndex, outliers=outliers), [keys])

    [(ids, scores)] = select(index, query, [budget])

    chunks = keys.double().numpy().reshape(blocks, BLOCK_TOKENS, DIM)
    means = chunks.mean(1)
    norms = np.linalg.norm(chunks, axis=2) * np.linalg.norm(means, axis=1)[:, None]
    cosines = ((chunks * means[:, None]).sum(2) / norms).min(1)
    expected = np.argsort(cosines)[:outliers]
    rest = np.delete(np.arange(blocks), expected)
    assert set(expected) <= set(ids)
    assert np.asarray(index.kept).tolist() == [len(expected)]
    others = [at for at in ids if at not in expected]
    sizes = np.full(len(rest), float(BLOCK_TOKENS))
    masses = unit_scores(rounded(query[0], torch.float32), means[rest], sizes, DIM**-0.5, "max")
    assert_best([rest.tolist().index(at) for at in others], masses, budget, tolerance=1e-5)
    for at, score in zip(ids, scores, strict=True):
        if at in rest:
            np.testing.assert_allclose(score, masses[rest.tolist().index(at)], atol=1e-4)


def test_outliers_are_fixed_at_the_build() -> None:
    """Later chunks are scattered far more, and ranked like all others."""
    keys = torch.ones(8 * BLOCK_TOKENS, DIM)
    keys[:: 2 * BLOCK_TOKENS, 0] = -5
    index = add_rows(make_index(ShadowKVIndex, outliers=4), [keys])

    extend(index, slice(0, 1), randn(1, 8 * BLOCK_TOKENS, DIM, seed=0))
    [(ids, _)] = select(index, torch.ones(1, 2, DIM), [0])

    assert sorted(ids) == [0, 2, 4, 6]
    assert np.asarray(index.kept).tolist() == [4]
    index.truncate(slice(0, 1), 3)
    assert np.asarray(index.kept).tolist() == [2]


def test_a_chunk_of_equal_keys_is_its_mean_and_no_outlier() -> None:
    keys = randn(6, DIM, seed=1).repeat_interleave(BLOCK_TOKENS, 0)
    keys[2 * BLOCK_TOKENS] *= -1

    index = add_rows(make_index(ShadowKVIndex, outliers=1), [keys])

    assert index.state()["kept"][0, :6].tolist() == [at == 2 for at in range(6)]
    constant = [0, 1, 3, 4, 5]
    means = torch.from_numpy(index.state()["vectors"][0, constant])
    assert (means == keys[::BLOCK_TOKENS][constant]).all()


def test_an_outlier_keeps_the_whole_block_and_none_of_its_chunks_is_scored() -> None:
    keys = torch.ones(6 * BLOCK_TOKENS, DIM)
    keys[2 * BLOCK_TOKENS + 1] = -1

    index = add_rows(make_index(ShadowKVIndex, outliers=1, page_tokens=2), [keys])

    state = index.state()
    assert state["kept"][0, :6].tolist() == [at == 2 for at in range(6)]
    assert state["scored_tokens"][0, :12].tolist() == [2.0] * 4 + [0.0] * 2 + [2.0] * 6


def test_its_bytes_are_means_flags_and_counts() -> None:
    """Of each chunk: a vector, a float32, a flag."""
    index = add_rows(make_index(ShadowKVIndex, dtype=torch.bfloat16), [randn(4096, DIM, seed=3)])

    assert index.nbytes == 1024 * (2 * DIM + 4 + 1) + 3 * 4


def test_a_negative_number_of_outliers_is_refused() -> None:
    with pytest.raises(ConfigError, match="outliers=-1"):
        make_index(ShadowKVIndex, outliers=-1)
