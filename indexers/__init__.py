"""How critical blocks are found: one index per file."""

from tierstore.indexers.chunk_mean import ChunkMeanIndex
from tierstore.indexers.everything import Everything
from tierstore.indexers.exact import ExactIndex
from tierstore.indexers.hierarchical import HierarchicalIndex
from tierstore.indexers.scoring import IndexShape, Representatives, ScoringIndex

__all__ = [
    "ChunkMeanIndex",
    "Everything",
    "ExactIndex",
    "HierarchicalIndex",
    "IndexShape",
    "Representatives",
    "ScoringIndex",
]
