"""Bounds of pages: never below a key of theirs, and the pages that Quest takes by them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from index_rows import BLOCK_TOKENS, DIM, add_rows, extend, make_index, rounded, select
from oracles import Floats, stored

from tierstore.indexers import QuestIndex, Rule, ScoringIndex

RAW = Rule("max", softmax=False)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bounds(index: ScoringIndex, query: torch.Tensor) -> Floats:
    """Logits [G, u] of the units of row 0."""
    units = int(index.units[0])
    out = np.full((len(query), query.shape[1], index.data.places("unit")), np.nan, np.float32)
    index.logits(stored(query, index.shape.dtype), out)
    logits: Floats = out[0, :, :units].astype(np.float64)
    return logits


@DTYPES
@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 100.0]))
def test_no_key_scores_more_than_its_page(
    dtype: torch.dtype, blocks: int, seed: int, spread: float
) -> None:
    keys, query = randn(blocks * BLOCK_TOKENS, DIM, seed=seed) * spread, randn(1, 2, DIM, seed=seed)
    index = add_rows(make_index(QuestIndex, dtype=dtype), [keys])

    found = bounds(index, query)

    logits = rounded(query[0], dtype) @ rounded(keys, dtype).T * DIM**-0.5
    best = logits.reshape(2, blocks, BLOCK_TOKENS).max(2)
    assert (found >= best - 1e-5 * spread).all()


@DTYPES
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_a_page_of_one_key_scores_what_the_key_does(
    dtype: torch.dtype, blocks: int, seed: int
) -> None:
    keys, query = randn(blocks * BLOCK_TOKENS, DIM, seed=seed), randn(1, 2, DIM, seed=seed + 1)
    index = add_rows(make_index(QuestIndex, dtype=dtype, page_tokens=1), [keys])

    found = bounds(index, query)

    logits = rounded(query[0], dtype) @ rounded(keys, dtype).T * DIM**-0.5
    np.testing.assert_allclose(found, logits, atol=1e-5)


def page_bounds(query: Floats, keys: Floats) -> Floats:
    pages = keys.reshape(-1, BLOCK_TOKENS, DIM)
    corners = np.stack([query[:, None] * pages.max(1), query[:, None] * pages.min(1)])
    scores: Floats = corners.max(0).sum(-1) * DIM**-0.5
    return scores


@given(st.integers(1, 30), st.integers(0, 31), st.integers(0, 2**32 - 1))
def test_each_head_takes_its_best_pages_and_all_take_the_last(
    blocks: int, budget: int, seed: int
) -> None:
    """Down all rankings at once: no page left out ranks above the worst one taken, in any head."""
    keys, query = randn(blocks * BLOCK_TOKENS, DIM, seed=seed), randn(1, 2, DIM, seed=seed + 1)
    index = add_rows(make_index(QuestIndex), [keys])

    [(ids, _)] = select(index, query, [budget])

    wanted = min(max(budget, 3), blocks)
    assert len(ids) == len(set(ids)) == wanted
    assert blocks - 1 in ids
    scores = page_bounds(rounded(query[0], torch.float32), rounded(keys, torch.float32))
    ranks = (-scores).argsort(1).argsort(1).min(0)
    ranks[blocks - 1] = -1
    others = np.delete(ranks, ids)
    assert not len(others) or others.min() >= ranks[ids].max()


@pytest.mark.parametrize("rule", [None, RAW, Rule("sum")])
def test_the_last_page_comes_first_as_pages_come_and_go(rule: Rule | None) -> None:
    """Rows of other lengths, and one without pages; the last page is the worst by its keys."""
    keys = [randn(n * BLOCK_TOKENS, DIM, seed=n) for n in (9, 5)]
    for own in keys:
        own[-BLOCK_TOKENS:] = 0
    index = add_rows(make_index(partial(QuestIndex, rule=rule)), keys)
    index.add_rows(np.array([2], np.int32))
    query = randn(3, 2, DIM, seed=0)

    before = select(index, query, [3, 3, 3])
    extend(index, slice(0, 1), randn(1, 2 * BLOCK_TOKENS, DIM, seed=1))
    index.truncate(slice(1, 2), 4)
    after = select(index, query, [1, 1, 1])

    for found, lasts in ((before, [8, 4]), (after, [10, 3])):
        assert [ids[int(np.argmax(scores))] for ids, scores in found[:2]] == lasts
        assert [len(ids) for ids, _ in found] == [3, 3, 0]


def test_its_bytes_are_two_vectors_a_page() -> None:
    """32 bytes a token for pages of 16 at 128 dimensions; here pages of 4 at 32."""
    index = add_rows(make_index(QuestIndex, dtype=torch.bfloat16), [randn(4096, DIM, seed=3)])

    assert index.nbytes == 4096 // BLOCK_TOKENS * 2 * 2 * DIM + 2 * 4
