"""Attention of a layer's rows over their strips and the blocks of a visit, with its work space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore import kernels
from tierstore.adapters.attention import attended
from tierstore.visits import Visit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.layer import Layer
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Ids
    from tierstore.kernels.element import Array
    from tierstore.scratch import Scratch
    from tierstore.store import BlockStore

ALL = slice(None)


class Attending:
    """Computes attention in place over the top tier; notes what was attended if it should.

    scale: factor on the logits. scratch: of the device.
    """

    def __init__(self, store: BlockStore, rules: Rules, scale: float, scratch: Scratch) -> None:
        geometry, preset = rules.geometry, rules.preset
        self.scale = scale
        self.positions: dict[int, list[list[int]]] = {}
        """Tokens that each row of a layer attended to in its last step, if they are recorded."""
        self._store, self._rules, self._scratch = store, rules, scratch
        self.shape = kernels.BlockShape(
            preset.block_tokens,
            geometry.head_dim,
            geometry.value_size,
            preset.block_tokens * geometry.head_dim,
        )
        self.lse: Array = np.empty((0, 0), np.float32)
        """float32 [R, G], log-sum-exp of what the rows attended to last."""
        self._weights: Array = np.empty((0, 0, 0), np.float32)

    def beside(self, query: Array) -> Array:
        """float32 [R, G], for what the strips weigh; valid until it is asked for again."""
        return self._scratch.array("beside", query.shape[:2], np.float32)

    def result(self, query: Array) -> Array:
        """float32 [R, G, e], for attention that is merged from parts; valid until asked again."""
        shape = (*query.shape[:2], self._rules.geometry.value_size)
        return self._scratch.array("attended", shape, np.float32)

    def has_work_space(self, layer: Layer, blocks: int) -> bool:
        """Whether there is room for the weights of rows of so many blocks."""
        rows, _, width = self._weights.shape
        return bool(rows == len(layer.segments) and width >= self._width(layer, blocks))

    def _width(self, layer: Layer, blocks: int) -> int:
        return blocks * self._rules.preset.block_tokens + layer.strip_room

    def take_work_space(self, layer: Layer, blocks: int) -> None:
        """Room for the weights of rows of so many blocks.

        A visit pins blocks, so this comes before it: taking memory may move some.
        """
        if not self.has_work_space(layer, blocks):
            rows, group = len(layer.segments), self._rules.geometry.group
            width, array = self._width(layer, blocks), self._scratch.array
            self.lse = array("lse", (rows, group), np.float32)
            self._weights = array("weights", (rows, group, width), np.float32)

    def attend(
        self,
        layer: Layer,
        query: Array,
        visit: Visit,
        out: Array,
        *,
        rows: slice = ALL,
        merge: bool = False,
        strips: bool = True,
    ) -> None:
        """Blocks of a visit of some rows, with their strips; may be merged into `out`."""
        strip = layer.strip_length[rows]
        kernels.attend_blocks(
            query[rows], self._pool(layer), self.shape, visit.row_ptr, visit.slots, visit.valid,
            layer.strip_key[rows], layer.strip_value[rows],
            strip if strips else np.zeros_like(strip), self.scale,
            out[rows], self.lse[rows], self._weights[rows], merge=merge,
        )  # fmt: skip

    def _pool(self, layer: Layer) -> Array:
        """The top tier's slots as elements."""
        return self._store.tiers[0].view.view(layer.strip_key.dtype)

    def note(
        self, number: int, layer: Layer, visit: Visit, *, first_row: int = 0, is_first: bool
    ) -> None:
        """Remember the token positions that rows of a layer attend to, from `first_row` on."""
        if not self._rules.record:
            return
        sinks = self._rules.preset.sinks
        rows = slice(first_row, first_row + len(visit.row_ptr) - 1)
        if is_first:
            known = list(self.positions.get(number, [[]] * len(layer.segments)))
            known[rows] = attended.in_strips(layer, sinks)[rows]
            self.positions[number] = known
        segments = layer.segments[rows]
        in_blocks = attended.in_blocks(self._store, segments, visit, sinks)
        for row, positions in enumerate(in_blocks, first_row):
            self.positions[number][row].extend(positions)


def nothing(rows: int) -> Visit:
    """A visit of no block by so many rows."""
    none: Ids = np.empty(0, np.int32)
    return Visit(np.zeros(rows + 1, np.int64), none, none.astype(np.uint8), none, is_whole=True)


def joined(visits: Sequence[Visit]) -> Visit:
    """Visits of rows that follow each other, as one."""
    if len(visits) == 1:
        return visits[0]
    starts = np.cumsum([0, *(len(visit.handles) for visit in visits)])
    pointers = [visit.row_ptr[:-1] + start for visit, start in zip(visits, starts, strict=False)]
    return Visit(
        np.concatenate([*pointers, starts[-1:]]),
        np.concatenate([visit.slots for visit in visits]),
        np.concatenate([visit.valid for visit in visits]),
        np.concatenate([visit.handles for visit in visits]),
    )
