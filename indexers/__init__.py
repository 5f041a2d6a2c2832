"""How critical blocks are found: one index per file."""

from tierstore.indexers.chunk_mean import ChunkMeanIndex
from tierstore.indexers.columns import Column
from tierstore.indexers.everything import Everything
from tierstore.indexers.exact import ExactIndex
from tierstore.indexers.graph import GraphIndex
from tierstore.indexers.hierarchical import HierarchicalIndex
from tierstore.indexers.lsh import LSHIndex
from tierstore.indexers.rules import Rule
from tierstore.indexers.scoring import IndexShape, NewTokens, Representatives, ScoringIndex
from tierstore.indexers.token_clusters import TokenClustersIndex

__all__ = [
    "ChunkMeanIndex",
    "Column",
    "Everything",
    "ExactIndex",
    "GraphIndex",
    "HierarchicalIndex",
    "IndexShape",
    "LSHIndex",
    "NewTokens",
    "Representatives",
    "Rule",
    "ScoringIndex",
    "TokenClustersIndex",
]
