"""The reduced base of indexes: say how keys become representatives, get an index.

A *unit* is what gets a score. It may be finer than a block (single tokens), the block itself, or
coarser (a cluster of blocks); `represent` decides, and the rest is shared: growth, scoring,
selection, state.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from tierstore import kernels
from tierstore.arrays import as_array
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.interfaces import BlockScores, Ids, Index, IndexContext, Pointers, Scores, Selection
from tierstore.kernels.element import is_host, stored_dtype, to_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from tierstore.kernels.element import Array
    from tierstore.memory import Memory
    from tierstore.scratch import Scratch


@dataclass(frozen=True)
class IndexShape:
    """What an index must know about the model and its memory.

    group: query heads per KV head. dim: head dimension. block_tokens: tokens of a block.
    scale: factor of the logits.
    memory, scratch: where representatives live and are scored: the memory of the device.
    table_memory, table_scratch: where lists of blocks live and are selected from: host memory; the
        same as those above by default.
    """

    group: int
    dim: int
    dtype: torch.dtype
    block_tokens: int
    scale: float
    memory: Memory
    scratch: Scratch
    table_memory: Memory | None = None
    table_scratch: Scratch | None = None


_ON_DEVICE = ("_vectors", "_sizes")
_IN_TABLES = ("_counts", "_blocks", "_unit_of", "_costs", "_unit_ptr", "_unit_blocks")


@dataclass(frozen=True)
class Representatives:
    """What `represent` makes of new keys of R' rows.

    vectors: [R', u, d]. sizes: float32 [R', u], tokens that each stands for (0 = stands for none).
    unit_of: int [R', blocks], the unit of each new block, counted from 0; None where units are not
        coarser than blocks.
    """

    vectors: torch.Tensor
    sizes: torch.Tensor
    unit_of: torch.Tensor | None = None


class ScoringIndex(Index):
    """Scores every unit of a row with every query of the row, and takes the best units.

    Heads are combined after the softmax over units: by the sum of their masses, or by the largest.
    """

    aggregate = "sum"
    units_per_block = 1
    """Units of one block where they are finer than blocks."""

    def __init__(self, shape: IndexShape) -> None:
        if shape.block_tokens < 1:
            raise ConfigError(f"block_tokens={shape.block_tokens}: expected at least 1")
        self.shape = shape
        self.segments: Ids = np.empty(0, np.int32)
        self._tables = shape.table_memory or shape.memory
        self._scratch = shape.table_scratch or shape.scratch
        element = stored_dtype(shape.dtype)
        self._vectors: Array = shape.memory.take((0, 0, shape.dim), element, "index")
        self._sizes: Scores = shape.memory.take((0, 0), np.float32, "index")
        take = self._tables.take
        self._counts: Ids = take(0, np.int32, "index")
        self._blocks: Ids = take(0, np.int32, "index")
        self._unit_of: Ids = take((0, 0), np.int32, "index")
        self._costs: Ids = take((0, 0), np.int32, "index")
        self._unit_ptr: Ids = take((0, 0), np.int32, "index")
        self._unit_blocks: Ids = take((0, 0), np.int32, "index")

    @abstractmethod
    def represent(self, keys: torch.Tensor, context: IndexContext) -> Representatives:
        """Representatives of keys [R', n, d], n a multiple of the block's tokens."""

    @property
    def _is_coarse(self) -> bool:
        return self.units_per_block == 0

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _ON_DEVICE + _IN_TABLES)

    def add_rows(self, segments: Ids) -> None:
        rows = len(self.segments) + len(segments)
        self.segments = np.concatenate([self.segments, segments]).astype(np.int32)
        self._grow("_counts", (rows,))
        self._grow("_blocks", (rows,))
        self._reserve(rows, self._vectors.shape[1], self._unit_blocks.shape[1])

    def extend(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor, context: IndexContext
    ) -> None:
        made = self.represent(keys, context)
        units, blocks = made.vectors.shape[1], keys.shape[1] // self.shape.block_tokens
        have_units, have_blocks = int(self._counts[rows][0]), int(self._blocks[rows][0])
        self._reserve(len(self.segments), have_units + units, have_blocks + blocks)
        new_units = slice(have_units, have_units + units)
        vectors = made.vectors.to(self.shape.dtype).contiguous()
        self._vectors[rows, new_units] = as_array(vectors)
        self._sizes[rows, new_units] = as_array(made.sizes.float().to(vectors.device))
        if made.unit_of is not None:
            self._list_members(rows, have_units, have_blocks, units, made.unit_of.cpu().numpy())
        self._counts[rows] += units
        self._blocks[rows] += blocks

    def _list_members(
        self, rows: slice, have_units: int, have_blocks: int, units: int, unit_of: Ids
    ) -> None:
        """Enter new blocks, listed unit by unit after those there are."""
        blocks = slice(have_blocks, have_blocks + unit_of.shape[1])
        self._unit_of[rows, blocks] = unit_of + have_units
        self._unit_blocks[rows, blocks] = np.argsort(unit_of, axis=1, kind="stable") + have_blocks
        costs = np.stack([np.bincount(row, minlength=units) for row in unit_of])
        new_units = slice(have_units, have_units + units)
        self._costs[rows, new_units] = costs
        self._unit_ptr[rows, new_units] = np.cumsum(costs, axis=1) - costs + have_blocks

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        rows, array = len(self.segments), self.shape.scratch.array
        budgets = np.minimum(budgets, self._blocks)
        width = self._vectors.shape[1]
        scores: Scores = array("unit scores", (rows, width), np.float32)
        logits = array("unit logits", (rows, self.shape.group, width), np.float32)
        if beside is None:
            beside = array("nothing beside", (rows, self.shape.group), np.float32)
            beside.fill(-np.inf)
        kernels.score_units(query, self._vectors, self._counts, self._sizes, beside,
                            self.shape.scale, self.aggregate, scores, logits)  # fmt: skip
        scores = scores if is_host(scores) else to_tensor(scores).cpu().numpy()
        array = self._scratch.array
        if self._is_coarse:
            tables = (self._counts, self._costs, self._unit_ptr, self._unit_blocks)
            everything = BlockScores(scores, self._unit_of, self.segments)
        else:
            scores = self._per_block(scores)
            one_each, identity = self._identity(scores.shape[1])
            tables = (self._blocks, one_each, identity, identity)
            everything = BlockScores(scores, identity, self.segments)
        total = int(budgets.sum())
        row_ptr: Pointers = array("row pointers", (rows + 1,), np.int64)
        ids: Ids = array("ids", (total,), np.int32)
        picked: Scores = array("scores", (total,), np.float32)
        order = array("order", (max(1, scores.shape[1]),), np.int32)
        found = kernels.select_blocks(scores, *tables, budgets, order, row_ptr, ids, picked)
        return Selection(row_ptr, ids[:found], picked[:found], everything)

    def _per_block(self, scores: Scores) -> Scores:
        """Log mass of blocks from that of their tokens or sub-pages."""
        if self.units_per_block == 1:
            return scores
        whole = scores.shape[1] // self.units_per_block * self.units_per_block
        parts = torch.from_numpy(scores[:, :whole]).unflatten(1, (-1, self.units_per_block))
        per_block: Scores = parts.logsumexp(-1).numpy()
        return per_block

    def _identity(self, blocks: int) -> tuple[Ids, Ids]:
        """One table for all rows: each unit is one block, at its own number."""
        one_each = self._scratch.array("one each", (1, blocks), np.int32)
        identity = self._scratch.array("identity", (1, blocks), np.int32)
        if blocks and (one_each[0, -1] != 1 or identity[0, -1] != blocks - 1):
            one_each.fill(1)
            identity[0] = np.arange(blocks, dtype=np.int32)
        return one_each, identity

    def truncate(self, rows: slice, blocks: int) -> None:
        for row in range(*rows.indices(len(self.segments))):
            if self._is_coarse:
                self._forget_members(row, blocks)
            else:
                self._counts[row] = min(int(self._counts[row]), blocks * self.units_per_block)
            self._blocks[row] = min(int(self._blocks[row]), blocks)
        if self._is_coarse:
            used = np.flatnonzero(self._costs[rows].any(0))
            self._counts[rows] = used[-1] + 1 if len(used) else 0

    def _forget_members(self, row: int, blocks: int) -> None:
        have = int(self._blocks[row])
        units = int(self._counts[row])
        if blocks >= have:
            return
        unit_of = self._unit_of[row, :blocks]
        costs = np.bincount(unit_of, minlength=units)
        tokens_of_block = self.shape.block_tokens
        self._costs[row, :units] = costs
        self._sizes[row, :units] = costs * tokens_of_block
        self._unit_ptr[row, :units] = np.cumsum(costs) - costs
        self._unit_blocks[row, :blocks] = np.argsort(unit_of, kind="stable")

    def arrange_rows(self, rows: Sequence[int], segments: Ids) -> None:
        chosen = list(rows)
        for name in _ON_DEVICE + _IN_TABLES:
            old = getattr(self, name)
            if len(old):
                self._replace(name, old[chosen])
        self.segments = segments.astype(np.int32)

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        arrays = {name.strip("_"): self._on_host(name) for name in _ON_DEVICE + _IN_TABLES}
        return {"kind": self._kind(), "segments": self.segments.copy(), **arrays}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        found, expected = str(state.get("kind")), str(self._kind())
        if found != expected:
            raise StoreMismatchError(
                f"saved index is {found!r}: expected {expected!r}; "
                "it was saved by another kind of index"
            )
        self.segments = np.array(state["segments"], np.int32)
        for name in _ON_DEVICE + _IN_TABLES:
            self._replace(name, state[name.strip("_")])
        return self

    def _replace(self, name: str, content: Array) -> None:
        """Let the array called `name` be a copy of `content`."""
        memory = self._memory_of(name)
        array = memory.take(content.shape, content.dtype, "index")
        array[...] = content
        memory.give(getattr(self, name))
        setattr(self, name, array)

    def _memory_of(self, name: str) -> Memory:
        return self.shape.memory if name in _ON_DEVICE else self._tables

    def _on_host(self, name: str) -> Array:
        array: Array = getattr(self, name)
        host: Array = array.copy() if is_host(array) else to_tensor(array).cpu().numpy()
        return host

    def _kind(self) -> npt.NDArray[np.str_]:
        """What an index and a saved state must agree in."""
        shape = self.shape
        return np.array(
            f"{type(self).__name__} of {shape.block_tokens} tokens, {shape.dim} x {shape.dtype}"
        )

    def _reserve(self, rows: int, units: int, blocks: int) -> None:
        """Make room for so many rows, units and blocks; growth is by an eighth at a time."""
        old_rows, have_units = self._vectors.shape[:2]
        have_blocks = self._unit_blocks.shape[1]
        if units > have_units:
            units = max(units, have_units + have_units // 8)
        if rows > old_rows or units > have_units:
            want = max(units, have_units)
            self._grow("_vectors", (rows, want, self.shape.dim))
            self._grow("_sizes", (rows, want))
            if self._is_coarse:
                self._grow("_costs", (rows, want))
                self._grow("_unit_ptr", (rows, want))
        if self._is_coarse and (rows > old_rows or blocks > have_blocks):
            want = max(blocks, have_blocks + have_blocks // 8 if blocks > have_blocks else 0)
            self._grow("_unit_of", (rows, max(want, have_blocks)))
            self._grow("_unit_blocks", (rows, max(want, have_blocks)))

    def _grow(self, name: str, shape: tuple[int, ...]) -> None:
        grown = self._memory_of(name).grow(getattr(self, name), shape, "index")
        setattr(self, name, grown)
