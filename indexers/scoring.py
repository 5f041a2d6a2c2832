"""The reduced base of indexes: say how keys become representatives, get an index.

A *page* is what the index looks at: a block, or an equal part of one. A *unit* is what gets a
score: a page, or, where `is_coarse`, a cluster of pages. `represent` says what stands for a unit;
the rest is shared: growth, scoring, selection, state.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from tierstore import kernels
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.indexers.columns import Column, Columns
from tierstore.indexers.rules import Rule
from tierstore.interfaces import BlockScores, Ids, Index, IndexContext, Pointers, Scores, Selection
from tierstore.kernels.element import is_host, stored_dtype, to_array, to_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from tierstore.kernels.element import Array
    from tierstore.memory import Memory
    from tierstore.scratch import Scratch

_MOST_SHORT = np.iinfo(np.int16).max
"""Numbers up to here need 16 bits."""


@dataclass(frozen=True)
class IndexShape:
    """What an index must know about the model and its memory.

    group: query heads per KV head. dim: head dimension. block_tokens: tokens of a block.
    scale: factor of the logits. heads: rows of a sequence, which stand next to each other.
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
    heads: int = 1


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Tokens to represent, whole blocks of rows that have equally many.

    rows: which. keys: [R', n, d]. values: [R', n, e]. first_unit: units that the rows have already;
    0 at their build.
    """

    rows: slice
    keys: torch.Tensor
    values: torch.Tensor
    context: IndexContext
    first_unit: int

    def pages(self, tokens: int) -> torch.Tensor:
        """The keys by pages, [R', n / tokens, tokens, d]."""
        pages: torch.Tensor = self.keys.unflatten(1, (-1, tokens))
        return pages

    def page_means(self, tokens: int) -> torch.Tensor:
        """The mean key of each page, float32 [R', n / tokens, d]."""
        means = self._for_each_page(tokens, torch.float32)
        kernels.page_means(to_array(self.keys), tokens, to_array(means))
        return means

    def page_bounds(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The extremes of the keys of each page by channel, largest first, [R', n / tokens, d]."""
        high, low = (self._for_each_page(tokens, self.keys.dtype) for _ in range(2))
        kernels.page_bounds(to_array(self.keys), tokens, to_array(high), to_array(low))
        return high, low

    def _for_each_page(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        rows, n, dim = self.keys.shape
        return self.keys.new_empty((rows, n // tokens, dim), dtype=dtype)


@dataclass(frozen=True, eq=False)
class Representatives:
    """What `represent` makes of new tokens.

    units: for each column of units, its new places [R', u, ...].
    sizes: float32 [R', u], tokens that each unit stands for; None where units are pages.
    unit_of: int [R', pages], the new unit of each new page, counted from 0; None where units are
        pages.
    rows: for columns of rows, new contents [R', ...]; columns not named stay as they are.
    kept: bool [R', blocks], blocks that every step selects beside its budget; needs `keeps_blocks`.
    """

    units: Mapping[str, torch.Tensor]
    sizes: torch.Tensor | None = None
    unit_of: torch.Tensor | None = None
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    kept: torch.Tensor | None = None


class ScoringIndex(Index):
    """Scores every unit of a row with every query of the row, and takes the best units.

    Parameters
    ----------
    page_tokens: tokens of a page, a divisor of the block's; the block's by default.
    rule: how the heads are combined; that of the system by default.
    """

    rule = Rule()
    is_coarse = False
    """Whether a unit may have several pages, as `Representatives.unit_of` says."""
    keeps_blocks = False
    """Whether some blocks are selected always."""

    def __init__(
        self, shape: IndexShape, *, page_tokens: int | None = None, rule: Rule | None = None
    ) -> None:
        if shape.block_tokens < 1:
            raise ConfigError(f"block_tokens={shape.block_tokens}: expected at least 1")
        self.page_tokens = shape.block_tokens if page_tokens is None else page_tokens
        if self.page_tokens < 1 or shape.block_tokens % self.page_tokens:
            raise ConfigError(
                f"page_tokens={page_tokens}: expected a divisor of block_tokens="
                f"{shape.block_tokens}"
            )
        self.shape = shape
        self.rule = rule or self.rule
        if self.is_coarse and self.rule.aggregate == "mean_all":
            raise ConfigError(
                "aggregate='mean_all': heads cannot share clusters that are their own"
            )
        self.segments: Ids = np.empty(0, np.int32)
        self._scratch = shape.table_scratch or shape.scratch
        columns = {**self.columns(), **self._lists()}
        self.data = Columns(columns, shape.memory, shape.table_memory or shape.memory)

    def columns(self) -> dict[str, Column]:
        """The arrays that `represent` fills; one vector for each unit by default."""
        return {"vectors": Column("unit", (self.shape.dim,), stored_dtype(self.shape.dtype))}

    @abstractmethod
    def represent(self, new: NewTokens) -> Representatives:
        """What stands for new tokens."""

    def logits(self, query: Array, out: Array) -> None:
        """Logits float32 [R, G, u] of every unit for queries [R, G, d]; places behind are free."""
        kernels.dot_logits(query, self.data["vectors"], self.units, self.shape.scale, out)

    @property
    def sizes(self) -> Array | None:
        """float32 [R, u] tokens of each unit, 0 for one not to be scored; None if all are pages."""
        return self.data["sizes"] if self.is_coarse else None

    @property
    def units(self) -> Ids:
        """Units of each row."""
        return self.data["units"]

    @property
    def blocks(self) -> Ids:
        """Blocks of each row."""
        return self.data["blocks"]

    @property
    def pages_per_block(self) -> int:
        """Pages that a block is divided into."""
        return self.shape.block_tokens // self.page_tokens

    @property
    def _takes_whole_units(self) -> bool:
        """Whether blocks are selected cluster by cluster."""
        return self.is_coarse and self.pages_per_block == 1

    def _lists(self) -> dict[str, Column]:
        """What every index of its kind knows about rows, units and blocks."""
        lists = {
            "units": Column("row", (), np.int32, on_host=True),
            "blocks": Column("row", (), np.int32, on_host=True),
        }
        if self.keeps_blocks:
            lists["kept"] = Column("block", (), np.bool_, on_host=True)
            lists["kept_blocks"] = Column("row", (), np.int32, on_host=True)
        if self.is_coarse:
            lists["sizes"] = Column("unit", (), np.float32)
            lists["unit_of"] = Column("page", (), np.int16, on_host=True)
        if self._takes_whole_units:
            lists["members"] = Column("page", (), np.int16, on_host=True)
            lists["costs"] = Column("unit", (), np.int16, on_host=True)
            lists["starts"] = Column("unit", (), np.int16, on_host=True)
        return lists

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def grown_bytes(self, rows: int, blocks: int, memory: Memory) -> int:
        pages, have = blocks * self.pages_per_block, int(self.blocks.max(initial=0))
        units = pages
        if self.is_coarse:
            # In proportion to what is indexed already.
            units = int(self.units.max(initial=0)) * blocks // have if have else 0
        return self.data.grown_bytes(memory, rows, unit=units, page=pages, block=blocks)

    @property
    def kept(self) -> Ids | int:
        return self.data["kept_blocks"] if self.keeps_blocks else 0

    def clusters(self, rows: slice, first_block: int) -> Ids | None:
        if not self.is_coarse:
            return None
        each, blocks = self.pages_per_block, int(self.blocks[rows][0])
        clusters: Ids = self.data["unit_of"][rows, first_block * each : blocks * each : each]
        return clusters

    def add_rows(self, segments: Ids) -> None:
        self.data.reserve(len(self.segments) + len(segments))
        self.segments = np.concatenate([self.segments, segments]).astype(np.int32)

    def extend(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor, context: IndexContext
    ) -> None:
        # Two extremes take one look at the keys; isfinite() of all took 40 times as long.
        if keys.numel() and not bool(torch.stack(torch.aminmax(keys)).isfinite().all()):
            raise ConfigError(
                f"keys {tuple(keys.shape)} with NaN or infinity: expected finite numbers; no index "
                "can rank them, and the attention over them is as broken"
            )
        have = int(self.units[rows][0])
        made = self.represent(NewTokens(rows, keys, values, context, have))
        units = next(iter(made.units.values())).shape[1]
        blocks = keys.shape[1] // self.shape.block_tokens
        have_blocks = int(self.blocks[rows][0])
        have_pages = have_blocks * self.pages_per_block
        self.data.reserve(
            unit=have + units,
            page=have_pages + blocks * self.pages_per_block,
            block=have_blocks + blocks,
        )
        if self.is_coarse:
            self._widen_lists(have + units, have_pages + blocks * self.pages_per_block)
        for name, content in made.units.items():
            self._put(name, (rows, slice(have, have + units)), content)
        for name, content in made.rows.items():
            self._put(name, (rows,), content)
        if made.unit_of is not None:
            assert made.sizes is not None
            self._put("sizes", (rows, slice(have, have + units)), made.sizes.float())
            self._list_members(rows, have, have_pages, units, made.unit_of.cpu().numpy())
        if made.kept is not None:
            self._put("kept", (rows, slice(have_blocks, have_blocks + blocks)), made.kept)
            self.data["kept_blocks"][rows] += made.kept.sum(1).cpu().numpy()
        self.units[rows] += units
        self.blocks[rows] += blocks

    def _put(self, name: str, where: tuple[slice, ...], content: torch.Tensor) -> None:
        to_tensor(self.data[name][where]).copy_(content)

    def _widen_lists(self, units: int, pages: int) -> None:
        """Lists hold 16 bits for each number until there are too many units, or pages."""
        if units > _MOST_SHORT:
            self.data.widen("unit_of", np.int32)
        if self._takes_whole_units and pages > _MOST_SHORT:
            for name in ("members", "costs", "starts"):
                self.data.widen(name, np.int32)

    def _list_members(
        self, rows: slice, have_units: int, have_pages: int, units: int, unit_of: Ids
    ) -> None:
        """Enter new pages, listed unit by unit after those there are."""
        pages = slice(have_pages, have_pages + unit_of.shape[1])
        new_units = slice(have_units, have_units + units)
        self.data["unit_of"][rows, pages] = unit_of + have_units
        if not self._takes_whole_units:
            return
        self.data["members"][rows, pages] = np.argsort(unit_of, axis=1, kind="stable") + have_pages
        costs = np.stack([np.bincount(row, minlength=units) for row in unit_of])
        self.data["costs"][rows, new_units] = costs
        self.data["starts"][rows, new_units] = np.cumsum(costs, axis=1) - costs + have_pages

    def part(self, rows: slice, scratch: Scratch, table_scratch: Scratch) -> Self:
        part = copy.copy(self)
        part.shape = replace(self.shape, scratch=scratch, table_scratch=table_scratch)
        part.segments = self.segments[rows]
        part._scratch = table_scratch
        part.data = self.data.part(rows)
        return part

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        unit_scores = self._unit_scores(query, beside)
        array = self._scratch.array
        if self._takes_whole_units:
            data = self.data
            scores, unit_of = unit_scores, data["unit_of"]
            tables = (self.units, data["costs"], data["starts"], data["members"])
        else:
            scores = self._block_scores(unit_scores)
            one_each, unit_of = self._identity(scores.shape[1])
            tables = (self.blocks, one_each, unit_of, unit_of)
        if self.rule.threshold is not None:
            budgets = self._within(self.rule.threshold, scores, tables[0], tables[1], budgets)
        budgets = np.minimum(np.maximum(budgets, self.least) + self.kept, self.blocks)
        total = int(budgets.sum())
        row_ptr: Pointers = array("row pointers", (len(budgets) + 1,), np.int64)
        ids: Ids = array("ids", (total,), np.int32)
        picked: Scores = array("scores", (total,), np.float32)
        order = array("order", (max(1, scores.shape[1]),), np.int32)
        found = kernels.select_blocks(scores, *tables, budgets, order, row_ptr, ids, picked)
        everything = BlockScores(scores, unit_of, self.segments)
        return Selection(row_ptr, ids[:found], picked[:found], everything)

    def _unit_scores(self, query: Array, beside: Array | None) -> Scores:
        """Scores of units [R, u] on the host."""
        rows, array = len(self.segments), self.shape.scratch.array
        width = self.data.places("unit")
        logits = array("unit logits", (rows, self.shape.group, width), np.float32)
        self.logits(query, logits)
        scores: Scores = array("unit scores", (rows, width), np.float32)
        sizes = self.sizes
        if sizes is not None and not self.rule.by_size:
            once = array("units once", sizes.shape, np.float32)
            torch.clamp(to_tensor(sizes), max=1, out=to_tensor(once))
            sizes = once
        kernels.combine_heads(
            logits, self.units, sizes, float(self.page_tokens), beside, self.rule.aggregate,
            self.rule.softmax, self.shape.heads, scores,
        )  # fmt: skip
        return scores if is_host(scores) else to_tensor(scores).cpu().numpy()

    def _block_scores(self, unit_scores: Scores) -> Scores:
        """Scores of blocks [R, b] from those of their pages: masses add up, of logits the best."""
        if self.pages_per_block == 1 and not self.keeps_blocks:
            return unit_scores
        pages = self.data.places("page" if self.is_coarse else "unit")
        blocks = pages // self.pages_per_block
        scores: Scores = self._scratch.array("block scores", (len(unit_scores), blocks), np.float32)
        unit_of = self.data["unit_of"] if self.is_coarse else None
        kept = self.data["kept"] if self.keeps_blocks else None
        kernels.pool_pages(
            unit_scores, unit_of, kept, self.blocks, self.pages_per_block, self.rule.softmax, scores
        )
        return scores

    def _within(
        self, threshold: float, scores: Scores, counts: Ids, costs: Ids, budgets: Ids
    ) -> Ids:
        """Budgets [R] cut to what scores near the best, in the mean over a sequence's heads."""
        live = np.arange(scores.shape[1]) < counts[:, None]
        ranked = np.where(live, scores, -np.inf)
        near = ranked >= ranked.max(1, keepdims=True, initial=-np.inf) - threshold
        counted = np.where(near & live, costs, 0).sum(1).reshape(-1, self.shape.heads)
        mean = np.rint(counted.mean(1)).astype(np.int32).repeat(self.shape.heads)
        cut: Ids = np.minimum(budgets, np.maximum(mean, 1))
        return cut

    def _identity(self, blocks: int) -> tuple[Ids, Ids]:
        """Tables for units that are blocks: every one costs one block, itself."""
        one_each = self._scratch.array("one each", (1, blocks), np.int32)
        identity = self._scratch.array("identity", (1, blocks), np.int32)
        if blocks and (one_each[0, -1] != 1 or identity[0, -1] != blocks - 1):
            one_each.fill(1)
            identity[0] = np.arange(blocks, dtype=np.int32)
        return one_each, identity

    def truncate(self, rows: slice, blocks: int) -> None:
        for row in range(*rows.indices(len(self.segments))):
            pages = min(int(self.blocks[row]), blocks) * self.pages_per_block
            if not self.is_coarse:
                self.units[row] = pages
            elif blocks < self.blocks[row]:
                self._forget_members(row, pages)
            if self.keeps_blocks:
                self.data["kept"][row, blocks:] = False
                self.data["kept_blocks"][row] = self.data["kept"][row].sum()
            self.blocks[row] = min(int(self.blocks[row]), blocks)
        if self.is_coarse:
            # Rows that are made by the same calls go on having equally many units.
            used = to_tensor(self.data["sizes"][rows]).any(0).nonzero()
            self.units[rows] = int(used.max()) + 1 if len(used) else 0

    def _forget_members(self, row: int, pages: int) -> None:
        units = int(self.units[row])
        unit_of = self.data["unit_of"][row, :pages]
        costs = np.bincount(unit_of, minlength=units)
        sizes = torch.from_numpy(costs * float(self.page_tokens))
        self._put("sizes", (slice(row, row + 1), slice(0, units)), sizes[None])
        if self._takes_whole_units:
            listed = self.data["members"][row, : int(self.blocks[row])]
            self.data["costs"][row, :units] = costs
            self.data["starts"][row, :units] = np.cumsum(costs) - costs
            self.data["members"][row, :pages] = listed[listed < pages]

    def arrange_rows(self, rows: Sequence[int], segments: Ids) -> None:
        self.data.arrange(rows)
        self.segments = segments.astype(np.int32)

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        return {"kind": self._kind(), "segments": self.segments.copy(), **self.data.state()}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> Self:
        found, expected = str(state.get("kind")), str(self._kind())
        if found != expected:
            raise StoreMismatchError(
                f"saved index is {found!r}: expected {expected!r}; "
                "it was saved by another kind of index"
            )
        self.data.restore(state)
        self.segments = np.array(state["segments"], np.int32)
        return self

    def _kind(self) -> npt.NDArray[np.str_]:
        """What an index and a saved state must agree in."""
        shape = self.shape
        pages = "" if self.pages_per_block == 1 else f" in pages of {self.page_tokens}"
        return np.array(
            f"{type(self).__name__} of {shape.block_tokens} tokens{pages}, "
            f"{shape.dim} x {shape.dtype}"
        )
