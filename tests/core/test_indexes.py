"""The shipped indexes pass the public suite; `tests/indexers` has what each of them is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.indexers import (
    ChunkMeanIndex,
    Everything,
    ExactIndex,
    GraphIndex,
    HierarchicalIndex,
    IndexShape,
    LSHIndex,
    PartialColumnsIndex,
    PQIndex,
    QuestIndex,
    Rule,
    ScoringIndex,
    ShadowKVIndex,
    SnapKVIndex,
    StatisticalBoxIndex,
    TokenClustersIndex,
    WeightedPQIndex,
)
from tierstore.interfaces import IndexContext
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


class TestQuestIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> QuestIndex:
        return QuestIndex(shape_of(setting))


class TestQuestIndexInSmallPages(IndexTests):
    def make_index(self, setting: IndexSetting) -> QuestIndex:
        rule = Rule("mean_group", softmax=False)
        return QuestIndex(shape_of(setting), page_tokens=2, rule=rule)


class TestStatisticalBoxIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> StatisticalBoxIndex:
        return StatisticalBoxIndex(shape_of(setting))


class TestShadowKVIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> ShadowKVIndex:
        return ShadowKVIndex(shape_of(setting))


class TestShadowKVIndexInSmallPages(IndexTests):
    def make_index(self, setting: IndexSetting) -> ShadowKVIndex:
        return ShadowKVIndex(shape_of(setting), page_tokens=2, outliers=3)


class TestSnapKVIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> SnapKVIndex:
        return SnapKVIndex(shape_of(setting))


class TestPartialColumnsIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> PartialColumnsIndex:
        return PartialColumnsIndex(shape_of(setting), rule=Rule("mean_group", softmax=False))


class TestPQIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> PQIndex:
        return PQIndex(shape_of(setting))


class TestPQIndexByInnerProducts(IndexTests):
    def make_index(self, setting: IndexSetting) -> PQIndex:
        return PQIndex(shape_of(setting), parts=4, bits=8, metric="inner", training_tokens=100)


class TestWeightedPQIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> WeightedPQIndex:
        return WeightedPQIndex(shape_of(setting))


class TestTokenClustersIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> TokenClustersIndex:
        return TokenClustersIndex(shape_of(setting), segment_tokens=40, value_dim=setting.dim)


class TestTokenClustersIndexAsInClusterKV(IndexTests):
    def make_index(self, setting: IndexSetting) -> TokenClustersIndex:
        return TokenClustersIndex(
            shape_of(setting),
            tokens_per_cluster=80,
            new_tokens_per_cluster=40,
            segment_tokens=None,
            iterations=20,
            metric="cosine",
            init="random",
            is_global=False,
            refresh=320,
            rule=Rule("per_query", softmax=False),
        )


class TestLSHIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> LSHIndex:
        return LSHIndex(shape_of(setting), bits=4, tables=20)


class TestGraphIndex(IndexTests):
    def make_index(self, setting: IndexSetting) -> GraphIndex:
        return GraphIndex(shape_of(setting), degree=8, neighbours=8)


class TestEverything(IndexTests):
    ignores_budget = True
    reads_keys = False
    uses_memory = False

    def make_index(self, setting: IndexSetting) -> Everything:
        return Everything(shape_of(setting))


SETTING = IndexSetting(Memory(1 << 24))


def filled(index: ScoringIndex, keys: torch.Tensor) -> ScoringIndex:
    """Keys [R, n, d] in the rows of an empty index."""
    index.add_rows(np.arange(len(keys), dtype=np.int32))
    index.extend(slice(0, len(keys)), keys, keys, IndexContext())
    return index


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
