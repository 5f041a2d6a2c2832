"""How critical blocks are found: one index per file."""

from tierstore.indexers.chunk_mean import ChunkMeanIndex
from tierstore.indexers.columns import Column
from tierstore.indexers.everything import Everything
from tierstore.indexers.exact import ExactIndex
from tierstore.indexers.hierarchical import HierarchicalIndex
from tierstore.indexers.pq import PQIndex
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.indexers.weighted_pq import WeightedPQIndex

__all__ = [
    "ChunkMeanIndex",
    "Column",
    "Everything",
    "ExactIndex",
    "HierarchicalIndex",
    "IndexShape",
    "NewTokens",
    "PQIndex",
    "Representatives",
    "Rule",
    "ScoringIndex",
    "WeightedPQIndex",
]
