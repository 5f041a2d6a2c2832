"""No index: every block is critical (full attention on the same store and kernels)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Self

import numpy as np

from tierstore.errors import StoreMismatchError
from tierstore.interfaces import Ids, Index, IndexContext, Pointers, Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch

    from tierstore.indexers.scoring import IndexShape
    from tierstore.kernels.element import Array
    from tierstore.scratch import Scratch


class Everything(Index):
    """Selects all blocks of each row, whatever the budget."""

    def __init__(self, shape: IndexShape) -> None:
        self.shape = shape
        self._blocks: Ids = np.empty(0, np.int32)

    @property
    def gives_scores(self) -> bool:
        return False

    def add_rows(self, segments: Ids) -> None:
        self._blocks = np.concatenate([self._blocks, np.zeros(len(segments), np.int32)])

    def extend(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor, context: IndexContext
    ) -> None:
        self._blocks[rows] += keys.shape[1] // self.shape.block_tokens

    @property
    def least(self) -> int:
        return int(self._blocks.max(initial=0))

    def part(self, rows: slice, scratch: Scratch, table_scratch: Scratch) -> Self:
        part = copy.copy(self)
        part._blocks = self._blocks[rows]
        return part

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        row_ptr: Pointers = np.concatenate([[0], np.cumsum(self._blocks)]).astype(np.int64)
        ids: Ids = np.concatenate(
            [np.arange(n, dtype=np.int32) for n in self._blocks.tolist()] or [self._blocks]
        )
        return Selection(row_ptr, ids, np.zeros(len(ids), np.float32))

    def truncate(self, rows: slice, blocks: int) -> None:
        self._blocks[rows] = np.minimum(self._blocks[rows], blocks)

    def arrange_rows(self, rows: Sequence[int], segments: Ids) -> None:
        self._blocks = self._blocks[list(rows)]

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        return {"blocks": self._blocks.copy()}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        if state.keys() != {"blocks"}:
            raise StoreMismatchError(
                f"saved index has {sorted(state)}: expected ['blocks']; "
                "it was saved by another kind of index"
            )
        self._blocks = np.array(state["blocks"], np.int32)
        return self
