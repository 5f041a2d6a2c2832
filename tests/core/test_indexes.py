"""The shipped indexes pass the public suite; each has a few cases of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.indexers import (
    ChunkMeanIndex,
    Everything,
    ExactIndex,
    HierarchicalIndex,
    IndexShape,
    ScoringIndex,
)
from tierstore.interfaces import IndexContext, Selection
from tierstore.kernels.element import to_array
from tierstore.memory import Memory
from tierstore.scratch import Scratch
from tierstore.testing import IndexSetting, IndexTests


def shape_of(setting: IndexSetting) -> IndexShape:
    return IndexShape(
        setting.group,
        setting.dim,
        setting.dtype,
        setting.block_tokens,
        setting.scale,
        setting.memory,
        Scratch(setting.memory),
    )


class TestExactIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> ExactIndex:
        return ExactIndex(shape_of(setting))


class TestChunkMeanIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> ChunkMeanIndex:
        return ChunkMeanIndex(shape_of(setting))


class TestHierarchicalIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> HierarchicalIndex:
        return HierarchicalIndex(shape_of(setting))


class TestHierarchicalIndexInShortStretches(IndexTests):
    def make_index(self, setting: IndexSetting) -> HierarchicalIndex:
        return HierarchicalIndex(
            shape_of(setting), tokens_per_centroid=6, segment_tokens=20, iterations=2
        )


class TestEverything(IndexTests):
    ignores_budget = True
    uses_memory = False

    def make_index(self, setting: IndexSetting) -> Everything:
        return Everything(shape_of(setting))


SETTING = IndexSetting(Memory(1 << 24))


def filled(index: ScoringIndex, keys: torch.Tensor) -> ScoringIndex:
    """Keys [R, n, d] in the rows of an empty index."""
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    index.extend(slice(0, len(keys)), keys, keys, IndexContext())
    return index


def selected(index: ScoringIndex, query: torch.Tensor, budget: int) -> list[set[int]]:
    budgets = np.full(len(query), budget, np.int32)
    selection: Selection = index.select(to_array(query), budgets)
    return [set(part.tolist()) for part in np.split(selection.ids, selection.row_ptr[1:-1])]


def masses(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention mass [R, G, blocks] of each block under each query head."""
    weights = (query.double() @ keys.double().transpose(1, 2) * SETTING.scale).softmax(-1)
    return torch.unflatten(weights, 2, (-1, SETTING.block_tokens)).sum(-1)


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 24))
def test_the_exact_index_finds_the_most_attention(seed: int, blocks: int, budget: int) -> None:
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, blocks * SETTING.block_tokens, SETTING.dim, generator=random)
    query = torch.randn(2, SETTING.group, SETTING.dim, generator=random)
    found = selected(filled(ExactIndex(shape_of(SETTING)), keys), query, budget)
    best = masses(query, keys).sum(1).topk(min(budget, blocks)).indices
    assert found == [set(row) for row in best.tolist()]


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 24))
def test_chunk_means_rank_blocks_by_the_largest_mass_over_heads(
    seed: int, blocks: int, budget: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, blocks * SETTING.block_tokens, SETTING.dim, generator=random)
    query = torch.randn(2, SETTING.group, SETTING.dim, generator=random)
    found = selected(filled(ChunkMeanIndex(shape_of(SETTING)), keys), query, budget)
    means = keys.unflatten(1, (-1, SETTING.block_tokens)).double().mean(2)
    mass = (query.double() @ means.transpose(1, 2) * SETTING.scale).softmax(-1).amax(1)
    assert found == [set(row) for row in mass.topk(min(budget, blocks)).indices.tolist()]


def test_the_hierarchical_index_selects_whole_clusters_of_like_blocks() -> None:
    """Blocks point in four directions in turn, so each direction is one cluster."""
    directions = torch.eye(4, SETTING.dim).repeat(3, 1).repeat_interleave(SETTING.block_tokens, 0)
    index = HierarchicalIndex(shape_of(SETTING), tokens_per_centroid=12)
    filled(index, directions[None])
    for direction in range(4):
        query = torch.zeros(1, SETTING.group, SETTING.dim)
        query[..., direction] = 8
        assert selected(index, query, 3) == [{direction, direction + 4, direction + 8}]


@pytest.mark.parametrize(
    "options", [{"tokens_per_centroid": 0.5}, {"segment_tokens": 3}, {"iterations": 0}]
)
def test_options_of_the_hierarchical_index_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        HierarchicalIndex(shape_of(SETTING), **options)  # type: ignore[arg-type]


def test_blocks_without_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_tokens=0"):
        ExactIndex(shape_of(IndexSetting(Memory(1 << 16), block_tokens=0)))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (ChunkMeanIndex, {}),
        (HierarchicalIndex, {}),
        (ExactIndex, {"dim": 4}),
        (ExactIndex, {"block_tokens": 2}),
        (ExactIndex, {"dtype": torch.float16}),
    ],
)
def test_the_state_of_another_kind_of_index_is_refused(
    kind: type[ScoringIndex], changed: dict[str, object]
) -> None:
    state = filled(ExactIndex(shape_of(SETTING)), torch.ones(1, 8, SETTING.dim)).state()
    setting = IndexSetting(Memory(1 << 20), **changed)  # type: ignore[arg-type]
    with pytest.raises(StoreMismatchError, match="another kind of index"):
        kind(shape_of(setting)).restore(state)
