"""The indexes that are compared, and how one is put under measurement."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from tierstore.errors import ConfigError
from tierstore.indexers import (
    ChunkMeanIndex,
    ExactIndex,
    GraphIndex,
    HierarchicalIndex,
    LSHIndex,
    PartialColumnsIndex,
    PQIndex,
    QuestIndex,
    ShadowKVIndex,
    SnapKVIndex,
    StatisticalBoxIndex,
    TokenClustersIndex,
    WeightedPQIndex,
)
from tierstore.interfaces import Ids, Index, IndexContext, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    import torch

    from tierstore.indexers import IndexShape
    from tierstore.kernels.element import Array

BUDGETS = (1 / 64, 1 / 32, 1 / 16, 1 / 8)
SINKS, LOCAL = 4, 64


class Candidate(NamedTuple):
    """An index under comparison.

    make: makes it for a shape. blocks: the block sizes that it is measured with; 1 selects tokens.
    """

    says: str
    make: Callable[[IndexShape], Index]
    blocks: tuple[int, ...] = (1, 4)


INDEXES: dict[str, Candidate] = {
    "exact": Candidate("all keys", ExactIndex),
    "chunk-mean": Candidate(
        "mean key of each block (ShadowKV's landmarks)", ChunkMeanIndex, (4, 8)
    ),
    "hierarchical": Candidate(
        "clusters of block means, 15 tokens for each centroid (KVDrive)", HierarchicalIndex
    ),
    "hierarchical-p2": Candidate(
        "the same over means of two tokens", partial(HierarchicalIndex, page_tokens=2), (4,)
    ),
    "hierarchical-p1": Candidate(
        "the same over single tokens", partial(HierarchicalIndex, page_tokens=1), (4,)
    ),
    "shadowkv": Candidate("chunk means and 48 outliers (ShadowKV)", ShadowKVIndex, (8,)),
    "token-clusters": Candidate("clusters of tokens, 16 in each (RetroInfer)", TokenClustersIndex),
    "quest": Candidate("minima and maxima of blocks (Quest)", QuestIndex, (4, 16)),
    "box": Candidate("statistical boxes of blocks (ArkVale)", StatisticalBoxIndex, (4, 32)),
    "pq": Candidate("2 codes of 6 bits (PQCache)", PQIndex),
    "pq-m8": Candidate("8 codes of 6 bits", partial(PQIndex, parts=8)),
    "weighted-pq": Candidate("9 codes of 6 bits, fitted to queries (best)", WeightedPQIndex),
    "partial-columns": Candidate("a fifth of the skewed columns (InfiniGen)", PartialColumnsIndex),
    "lsh": Candidate("150 hashes of 10 bits (MagicPIG)", LSHIndex),
    "graph": Candidate("nearest keys of prefill's queries (RetrievalAttention)", GraphIndex, (1,)),
    "snapkv": Candidate("attention of the prompt's last queries (SnapKV)", SnapKVIndex),
}
"""By name. To compare an index of your own, add it here, or pass your own table to `measure`."""


class Row(NamedTuple):
    """An index with one block size: a row of the tables."""

    name: str
    block_tokens: int

    def __str__(self) -> str:
        unit = "tokens" if self.block_tokens == 1 else f"blocks of {self.block_tokens}"
        return f"{self.name}, {unit}"

    def at(self, budget: float) -> str:
        """Name of the row at a budget."""
        return f"{self} {100 * budget:.4g}%"


def rows_of(table: Mapping[str, Candidate], names: Sequence[str] | None = None) -> list[Row]:
    """The rows of the indexes called so, of all by default. ConfigError for an unknown name."""
    for name in names or ():
        if name not in table:
            raise ConfigError(f"indexes: {name!r} is unknown: expected some of {', '.join(table)}")
    return [Row(name, size) for name in names or table for size in table[name].blocks]


def blocks_of(budget: float, tokens: int, block_tokens: int) -> int:
    """Blocks that a share of `tokens` is."""
    return max(1, round(budget * tokens / block_tokens))


class Budgeted(Index):
    """An index that selects `blocks` of each row, whatever it is asked for.

    Tokens that are decoded stay outside, up to `refresh_tokens`, so that they are attended.
    """

    def __init__(self, index: Index, refresh_tokens: int) -> None:
        self._index = index
        self._refresh_tokens = refresh_tokens
        self.blocks = 1

    @property
    def gives_scores(self) -> bool:
        return self._index.gives_scores

    @property
    def refresh_tokens(self) -> int:
        return self._refresh_tokens

    @property
    def kept(self) -> Ids | int:
        return self._index.kept

    @property
    def least(self) -> int:
        return self._index.least

    def add_rows(self, segments: Ids) -> None:
        self._index.add_rows(segments)

    def extend(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor, context: IndexContext
    ) -> None:
        self._index.extend(rows, keys, values, context)

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        return self._index.select(query, np.minimum(budgets, np.int32(self.blocks)), beside)

    def truncate(self, rows: slice, blocks: int) -> None:
        self._index.truncate(rows, blocks)

    def arrange_rows(self, rows: Sequence[int], segments: Ids) -> None:
        self._index.arrange_rows(rows, segments)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        return self._index.state()

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        self._index.restore(state)
        return self
