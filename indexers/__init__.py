"""How critical blocks are found: one index per file."""

from tierstore.indexers.box import StatisticalBoxIndex
from tierstore.indexers.chunk_mean import ChunkMeanIndex
from tierstore.indexers.columns import Column
from tierstore.indexers.everything import Everything
from tierstore.indexers.exact import ExactIndex
from tierstore.indexers.graph import GraphIndex
from tierstore.indexers.hierarchical import HierarchicalIndex
from tierstore.indexers.low_rank import LowRankKeys
from tierstore.indexers.lsh import LSHIndex
from tierstore.indexers.partial_columns import PartialColumnsIndex, skew
from tierstore.indexers.pq import PQIndex
from tierstore.indexers.quest import QuestIndex
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.indexers.shadow import ShadowKVIndex
from tierstore.indexers.snapkv import SnapKVIndex, window_scores
from tierstore.indexers.token_clusters import TokenClustersIndex
from tierstore.indexers.weighted_pq import WeightedPQIndex

__all__ = [
    "ChunkMeanIndex",
    "Column",
    "Everything",
    "ExactIndex",
    "GraphIndex",
    "HierarchicalIndex",
    "IndexShape",
    "LSHIndex",
    "LowRankKeys",
    "NewTokens",
    "PQIndex",
    "PartialColumnsIndex",
    "QuestIndex",
    "Representatives",
    "Rule",
    "ScoringIndex",
    "ShadowKVIndex",
    "SnapKVIndex",
    "StatisticalBoxIndex",
    "TokenClustersIndex",
    "WeightedPQIndex",
    "skew",
    "window_scores",
]
