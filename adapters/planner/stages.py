"""One layer of the engine taken apart, so that each stage of a step is timed alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.adapters.attention.capacity import fit_top_tier, reserve_backing
from tierstore.adapters.attention.layer import Layer
from tierstore.arrays import as_array
from tierstore.indexers import IndexShape
from tierstore.interfaces import Completion, IndexContext
from tierstore.layout import BlockLayout
from tierstore.scratch import Scratch
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, FileTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path
    from typing import Self

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Bytes, Ids
    from tierstore.kernels.element import Array


_WORK_BYTES = 64 << 20


@dataclass(frozen=True)
class Times:
    """Seconds of the stages of one step in one layer. missed: share of blocks fetched."""

    select: float
    judge: float
    fetch: float
    attend: float
    missed: float

    @classmethod
    def median(cls, steps: Sequence[Self]) -> Self:
        """Of each stage by itself."""
        columns = zip(*(vars(step).values() for step in steps), strict=True)
        return cls(*(float(np.median(column)) for column in columns))


class _Timed:
    """A tier that counts the seconds for which its reads keep the caller."""

    seconds = 0.0

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        start = time.perf_counter()
        completion: Completion = super().read(slots, out, rows, parts)  # type: ignore[misc]
        self.seconds += time.perf_counter() - start
        return _Waited(completion, self)


class _Waited:
    def __init__(self, completion: Completion, tier: _Timed) -> None:
        self._completion, self._tier = completion, tier

    def wait(self) -> None:
        start = time.perf_counter()
        self._completion.wait()
        self._tier.seconds += time.perf_counter() - start


class _TimedDram(_Timed, PinnedTier):
    pass


class _TimedDisk(_Timed, FileTier):
    pass


class LayerStages:
    """A layer of some sequences with equal keys, in a fast tier over DRAM or over files.

    Parameters
    ----------
    geometry: sizes of the model. preset: its index, policy and block size count.
    key, value: [Hkv, n, .] of one sequence. last_queries: [Hkv, G, w, d] of its end.
    budget: tokens that a step selects for each KV head.
    window: capacity of the fast tier in budgets.
    files: directory for a tier of files; without one, DRAM is under the fast tier.
    """

    def __init__(
        self,
        geometry: Geometry,
        preset: Preset,
        key: torch.Tensor,
        value: torch.Tensor,
        last_queries: torch.Tensor | None,
        *,
        budget: int,
        window: float,
        sequences: int = 1,
        scale: float,
        files: Path | None = None,
    ) -> None:
        layout = BlockLayout.kv(
            preset.block_tokens, geometry.head_dim, geometry.dtype, geometry.value_size
        )
        rows, blocks = sequences * geometry.kv_heads, key.shape[1] // preset.block_tokens + 1
        kv = rows * blocks * layout.block_bytes
        fast = DeviceTier(layout, 2 * kv + _WORK_BYTES, device=geometry.device)
        self._below: _TimedDram | _TimedDisk
        if files is None:
            self._below = _TimedDram(layout, 2 * kv + _WORK_BYTES)
        else:
            self._below = _TimedDisk(layout, files / "blocks")
        self.store = BlockStore(
            layout, [fast, self._below], [preset.policy()], segments=rows, blocks_each=blocks
        )
        memory = fast.memory
        self._scratch = Scratch(memory)
        self._shape = kernels.BlockShape(
            preset.block_tokens, geometry.head_dim, geometry.value_size,
            preset.block_tokens * geometry.head_dim,
        )  # fmt: skip
        shape = IndexShape(
            geometry.group, geometry.head_dim, geometry.dtype, preset.block_tokens, scale, memory,
            self._scratch, self.store.memory, Scratch(self.store.memory), geometry.kv_heads,
        )  # fmt: skip
        self._layer = layer = Layer(
            geometry, preset, self.store, preset.index(shape), memory, sequences
        )
        self._geometry, self._scale = geometry, scale
        reserve_backing(self.store, rows * blocks)
        self._fill(key, value, last_queries)
        selected = -(-budget // preset.block_tokens)
        self._budgets: Ids = np.minimum(layer.blocks, selected).astype(np.int32)
        self.resize(window)
        self._lse = np.empty((rows, geometry.group), np.float32)
        width = blocks * preset.block_tokens + layer.strip_room
        self._weights = np.empty((rows, geometry.group, width), np.float32)

    def _fill(
        self, key: torch.Tensor, value: torch.Tensor, last_queries: torch.Tensor | None
    ) -> None:
        """The same tokens for every sequence."""
        layer = self._layer
        for sequence in range(layer.sequences):
            sealed = layer.absorb(sequence, key, value)
            assert sealed is not None
            layer.index_tokens(sealed, IndexContext(0, last_queries))
            layer.store_tokens(sealed, None)

    @property
    def blocks(self) -> int:
        """Blocks of each row."""
        return int(self._layer.blocks[0])

    def resize(self, window: float) -> None:
        """Have a fast tier of so many budgets."""
        wanted = np.minimum(np.ceil(self._budgets * window), self._layer.blocks).astype(np.int64)
        fit_top_tier(self.store, self._layer.segments, wanted, 0)

    def step(self, query: torch.Tensor) -> Times:
        """Select, judge, fetch and attend for queries [B * Hkv, G, d]."""
        layer, q = self._layer, as_array(query.contiguous())
        beside = self._scratch.array("beside", q.shape[:2], np.float32)
        fetched, self._below.seconds = self.store.metrics.fetched, 0.0
        start = time.perf_counter()
        kernels.weigh_strips(q, layer.strip_key, layer.strip_length, self._scale, beside)
        selection = layer.index.select(q, self._budgets, beside)
        selected = time.perf_counter()
        attend = 0.0
        out = torch.empty((*q.shape[:2], self._geometry.value_size))
        for i, visit in enumerate(self.store.visit(selection, layer.segments)):
            begin = time.perf_counter()
            self._attend(q, visit.row_ptr, visit.slots, visit.valid, out, merge=i > 0)
            attend += time.perf_counter() - begin
        end = time.perf_counter()
        missed = (self.store.metrics.fetched - fetched) / max(1, len(selection.ids))
        fetch = self._below.seconds
        judge = end - selected - attend - fetch
        return Times(selected - start, judge, fetch, attend, missed)

    def _attend(
        self,
        query: Array,
        row_ptr: Array,
        slots: Ids,
        valid: Bytes,
        out: torch.Tensor,
        *,
        merge: bool,
    ) -> None:
        layer = self._layer
        pool = self.store.tiers[0].view.view(layer.strip_key.dtype)
        strip = np.zeros_like(layer.strip_length) if merge else layer.strip_length
        kernels.attend_blocks(
            query, pool, self._shape, row_ptr, slots, valid, layer.strip_key, layer.strip_value,
            strip, self._scale, as_array(out), self._lse, self._weights, merge=merge,
        )  # fmt: skip

    def selected(self, query: torch.Tensor) -> list[Ids]:
        """Numbers of the blocks that each row selects."""
        selection = self._layer.index.select(as_array(query.contiguous()), self._budgets)
        cuts = selection.row_ptr
        return [selection.ids[a:b].copy() for a, b in pairwise(cuts.tolist())]

    def close(self) -> None:
        """Free memory and files."""
        self.store.close()
