"""Clusters of block means: what must hold after any history, and what they select."""

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
    extend,
    make_index,
    rounded,
    select,
)
from oracles import exactly, unit_scores

from tierstore.indexers import ChunkMeanIndex, HierarchicalIndex, ScoringIndex


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def members_of(index: ScoringIndex, row: int) -> list[list[int]]:
    """Blocks of each unit of a row, as the member lists have them."""
    state = index.state()
    units = int(state["units"][row])
    starts, costs = state["starts"][row, :units].tolist(), state["costs"][row, :units].tolist()
    listed = state["members"][row].tolist()
    return [listed[start : start + cost] for start, cost in zip(starts, costs, strict=True)]


def assert_clusters_are_consistent(index: ScoringIndex, blocks: list[int]) -> None:
    """Each block stands in the list of one cluster, and all tables agree with the lists."""
    state = index.state()
    assert state["blocks"].tolist() == blocks
    for row, count in enumerate(blocks):
        members = members_of(index, row)
        assert sorted(block for unit in members for block in unit) == list(range(count))
        for unit, own in enumerate(members):
            assert own == sorted(own)
            assert (state["unit_of"][row, own] == unit).all()
            assert state["sizes"][row, unit] == len(own) * BLOCK_TOKENS


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Operations on sequences of two rows each: name, which sequence, how much."""
    names = st.sampled_from(["extend", "extend", "truncate", "repeat", "drop"])
    return draw(st.lists(st.tuples(names, st.integers(0, 9), st.integers(0, 30)), max_size=10))


@given(histories(), st.sampled_from([4.0, 15.0, 1000.0]), st.integers(0, 2**32 - 1))
def test_clusters_stay_consistent_whatever_happens(
    history: list[tuple[str, int, int]], tokens_per_centroid: float, seed: int
) -> None:
    """The model is the number of blocks of each row; a full budget selects them all at the end."""
    index = make_index(
        HierarchicalIndex, tokens_per_centroid=tokens_per_centroid, segment_tokens=64
    )
    index.add_rows(np.arange(4, dtype=np.int32))
    blocks = [0, 0, 0, 0]
    for step, (name, which, amount) in enumerate(history):
        sequences = len(blocks) // 2
        first = 2 * (which % sequences)
        rows = slice(first, first + 2)
        if name == "extend":
            extend(index, rows, randn(2, (amount + 1) * BLOCK_TOKENS, DIM, seed=seed + step))
            blocks[rows] = [blocks[first] + amount + 1] * 2
        elif name == "truncate":
            index.truncate(rows, amount)
            blocks[rows] = [min(blocks[first], amount)] * 2
        else:
            order = list(range(len(blocks)))[::-1]
            order = order[:-2] if name == "drop" and sequences > 1 else [*order, *order[rows]]
            index.arrange_rows(order, np.arange(len(order), dtype=np.int32))
            blocks = [blocks[row] for row in order]
        assert_clusters_are_consistent(index, blocks)

    found = select(index, randn(len(blocks), 2, DIM, seed=seed), [1000] * len(blocks))

    assert [sorted(ids) for ids, _ in found] == [list(range(count)) for count in blocks]


def test_centroids_are_means_of_their_blocks_stretch_by_stretch() -> None:
    """100 blocks in stretches of 32: no cluster crosses a stretch, each has its share of them."""
    keys = randn(100 * BLOCK_TOKENS, DIM, seed=0)
    stretch = 32 * BLOCK_TOKENS
    index = make_index(HierarchicalIndex, tokens_per_centroid=16, segment_tokens=stretch)
    add_rows(index, [keys])
    means = keys.double().reshape(100, BLOCK_TOKENS, DIM).mean(1).numpy()
    state = index.state()

    members = members_of(index, 0)

    assert len(members) == 8 + 8 + 8 + 1
    for unit, own in enumerate(members):
        assert len({block // 32 for block in own}) <= 1
        if own:
            centroid = exactly(state["vectors"][0, unit], torch.float32)
            np.testing.assert_allclose(centroid, means[own].mean(0), atol=1e-5)


@given(st.integers(1, 30), st.integers(0, 31), st.integers(0, 2**32 - 1))
def test_a_centroid_for_each_block_scores_block_means_by_the_sum_over_heads(
    blocks: int, budget: int, seed: int
) -> None:
    keys, query = randn(2, blocks * BLOCK_TOKENS, DIM, seed=seed), randn(2, 2, DIM, seed=seed + 1)
    index = add_rows(make_index(HierarchicalIndex, tokens_per_centroid=BLOCK_TOKENS), list(keys))

    found = select(index, query, [budget, budget])

    for row, (ids, scores) in enumerate(found):
        means = keys[row].double().reshape(blocks, BLOCK_TOKENS, DIM).mean(1).numpy()
        sizes = np.full(blocks, float(BLOCK_TOKENS))
        own = rounded(query[row], torch.float32)
        expected = unit_scores(own, means, sizes, DIM**-0.5, "sum")
        assert_best(ids, expected, budget, tolerance=1e-4)
        np.testing.assert_allclose(scores, expected[ids], atol=1e-5, rtol=1e-5)


def test_forgotten_blocks_no_longer_weigh() -> None:
    """Blocks 4 to 7 point where the query does; without them their cluster counts for nothing."""
    index = make_index(HierarchicalIndex, tokens_per_centroid=16)
    keys = torch.zeros(8 * BLOCK_TOKENS, DIM)
    keys[: 4 * BLOCK_TOKENS, 0], keys[4 * BLOCK_TOKENS :, 1] = 1, 1
    add_rows(index, [keys])
    query = torch.zeros(1, 2, DIM)
    query[..., 1] = 40
    assert sorted(select(index, query, [4])[0][0]) == [4, 5, 6, 7]

    index.truncate(slice(0, 1), 4)
    [(ids, scores)] = select(index, query, [3])

    assert ids == [0, 1, 2]
    np.testing.assert_allclose(scores, np.log(2 / 16), rtol=1e-5)


@pytest.mark.parametrize("kind", [HierarchicalIndex, ChunkMeanIndex])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_that_comes_late_is_found_when_it_matters(
    kind: type[ScoringIndex], dtype: torch.dtype
) -> None:
    """As in decoding: a prompt of 256 blocks, then eight at a time; one of these is sought."""
    index = add_rows(make_index(kind, dtype=dtype), [randn(256 * BLOCK_TOKENS, DIM, seed=1)])
    query = randn(1, 2, DIM, seed=2)
    query[0, 1] = query[0, 0]
    for batch in range(4):
        keys = randn(1, 8 * BLOCK_TOKENS, DIM, seed=10 + batch)
        if batch == 2:
            keys[0, 5 * BLOCK_TOKENS : 6 * BLOCK_TOKENS] = 2 * query[0, :1]
        extend(index, slice(0, 1), keys)

    [(ids, _)] = select(index, query, [8])

    assert 256 + 2 * 8 + 5 in ids


def test_its_bytes_are_centroids_and_member_lists() -> None:
    """A centroid has a vector, a size and two table entries, a block two; an eighth is spare."""
    index = make_index(HierarchicalIndex, dtype=torch.bfloat16, tokens_per_centroid=16)
    add_rows(index, [randn(4096, DIM, seed=3)])
    tokens, blocks, centroids, rows = 4096, 1024, 256, 1

    needed = centroids * (2 * DIM + 8) + blocks * 4 + rows * 8

    assert needed <= index.nbytes <= needed * 1.125
    by_block = add_rows(
        make_index(ChunkMeanIndex, dtype=torch.bfloat16), [randn(tokens, DIM, seed=3)]
    )
    assert index.nbytes < by_block.nbytes / 2


def test_lists_have_16_bits_until_there_are_too_many_blocks() -> None:
    """32,768 blocks need more; clusters, which are fewer, do not."""
    per, blocks = BLOCK_TOKENS, np.iinfo(np.int16).max
    keys = randn(1, (blocks + 1) * per, DIM, seed=9)
    index = make_index(HierarchicalIndex, tokens_per_centroid=1000)
    index.add_rows(np.arange(1, dtype=np.int32))
    extend(index, slice(0, 1), keys[:, : blocks * per])
    assert {index.data[name].dtype for name in ("members", "costs", "starts")} == {np.dtype("i2")}
    saved = index.state()

    extend(index, slice(0, 1), keys[:, blocks * per :])

    assert index.data["members"].dtype == np.int32
    assert index.data["unit_of"].dtype == np.int16
    assert_clusters_are_consistent(index, [blocks + 1])
    short = make_index(HierarchicalIndex, tokens_per_centroid=1000).restore(saved)
    long = make_index(HierarchicalIndex, tokens_per_centroid=1000).restore(index.state())
    extend(short, slice(0, 1), keys[:, blocks * per :])
    query = randn(1, 2, DIM, seed=10)
    assert select(short, query, [500]) == select(long, query, [500])
