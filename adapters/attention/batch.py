"""What exists while sequences are stored: block store, layers, work space; and a step's stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.adapters.attention import attended, exact, sync
from tierstore.adapters.attention.capacity import (
    fit_middle_tiers,
    fit_top_tier,
    reserve_backing,
)
from tierstore.adapters.attention.layer import Layer, Sealed
from tierstore.adapters.attention.planning import live_plan
from tierstore.adapters.attention.warm_up import WarmUp
from tierstore.arrays import as_array
from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.policies import LRU
from tierstore.policies.profile import ReuseProfile
from tierstore.scratch import Scratch
from tierstore.store import BlockStore, Visit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Pointers, Tier
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout
    from tierstore.policies.profile import Amounts

_STAGING_BLOCKS = 64
"""Blocks per KV head that a later turn reads at once."""


class Batch:
    """The stored past of some sequences.

    Parameters
    ----------
    tokens: tokens of the longest sequence in the first call, to reserve room.
    scale: factor on the logits.
    """

    def __init__(
        self,
        rules: Rules,
        layout: BlockLayout,
        tiers: Sequence[Tier],
        sequences: int,
        tokens: int,
        scale: float,
    ) -> None:
        geometry, preset = rules.geometry, rules.preset
        self.rules, self.scale = rules, scale
        self.tokens: Pointers = np.zeros(sequences, np.int64)
        self.attended: dict[int, list[list[int]]] = {}
        rows = geometry.layers * sequences * geometry.kv_heads
        blocks = max(0, tokens - preset.sinks - preset.local) // preset.block_tokens
        policies: list[EvictionPolicy] = [LRU() for _ in tiers[1:]]
        self._profile: ReuseProfile | None = None
        if rules.recalibrate is not None:
            policies[0] = self._profile = ReuseProfile(preset.policy(), rules.recalibrate // 4)
        elif policies:
            policies[0] = preset.policy()
        self.plan = rules.plan
        """How window and budget are shared out now; None for alike."""
        self.store = BlockStore(
            layout, tiers, policies, segments=rows, blocks_each=blocks,
            partitioned=2 if rules.sync is not None and rules.sync.pinned else 1,
        )  # fmt: skip
        self._device_memory = device_memory = tiers[0].memory or self.store.memory
        self._scratch = Scratch(self.store.memory)
        self._device_scratch = (
            self._scratch if device_memory is self.store.memory else Scratch(device_memory)
        )
        self._shape = kernels.BlockShape(
            preset.block_tokens,
            geometry.head_dim,
            geometry.value_size,
            preset.block_tokens * geometry.head_dim,
        )
        index_shape = IndexShape(
            geometry.group, geometry.head_dim, geometry.dtype, preset.block_tokens, scale,
            device_memory, self._device_scratch, self.store.memory, self._scratch,
            geometry.kv_heads,
        )  # fmt: skip
        self.layers = [
            Layer(geometry, preset, self.store, preset.index(index_shape), device_memory, sequences)
            for _ in range(geometry.layers)
        ]
        self._warm_up = WarmUp(self.store, preset, self.layers, scale)
        reserve_backing(self.store, rows * blocks)
        if rules.sync is None:
            fit_middle_tiers(self.store, rows * blocks)
        self._is_fitted = False
        self._most_residents = 0
        self._fetched: int | None = None
        """Blocks fetched before the running step; None before the first that selects."""
        self._lse: Array = np.empty((0, 0), np.float32)
        self._weights: Array = np.empty((0, 0, 0), np.float32)

    @property
    def index_bytes(self) -> int:
        """Bytes of all layers' indexes."""
        return sum(layer.index.nbytes for layer in self.layers)

    # Many new tokens

    def extend(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Exact attention of new tokens [B, ., T, .] over past and themselves; then store them."""
        layer, new = self.layers[number], query.shape[2]
        starts = layer.is_empty
        if number == 0:
            counts = new if valid is None else valid.sum(1).cpu().numpy()
            self.tokens = self.tokens + counts
        if starts and (valid is None or bool(valid.all())):
            out = exact.causal(query, key, value, self.scale).transpose(1, 2)
            for sequence in range(layer.sequences):
                self._store(number, sequence, query[sequence], key[sequence], value[sequence])
            return out
        out = query.new_zeros(layer.sequences, new, query.shape[1], value.shape[-1])
        for sequence in range(layer.sequences):
            chosen = slice(None) if valid is None else valid[sequence].nonzero()[:, 0]
            q, k, v = (
                query[sequence][:, chosen],
                key[sequence][:, chosen],
                value[sequence][:, chosen],
            )
            if starts:
                part = exact.causal(q[None], k[None], v[None], self.scale)[0]
            else:
                part = exact.over_past(q, k, v, layer.past(sequence, self._staging()), self.scale)
            out[sequence, chosen] = part.transpose(0, 1).to(out.dtype)
            self._store(number, sequence, q, k, v)
        return out

    def absorb(
        self, number: int, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor | None
    ) -> None:
        """Store new tokens [B, ., T, .] without attending; `query`: the last ones', if known."""
        if number == 0:
            self.tokens = self.tokens + key.shape[2]
        for sequence in range(self.layers[number].sequences):
            last = None if query is None else query[sequence]
            self._store(number, sequence, last, key[sequence], value[sequence])

    def _staging(self) -> Bytes:
        shape = (self.rules.geometry.kv_heads * _STAGING_BLOCKS, self.store.layout.block_bytes)
        staging: Bytes = self._scratch.array("staging", shape, np.uint8)
        return staging

    def _store(
        self,
        number: int,
        sequence: int,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Take tokens [., n, .] in; blocks start where the last queries' attention ranks them."""
        layer, geometry = self.layers[number], self.rules.geometry
        sealed = layer.absorb(sequence, key, value)
        if sealed is None:
            return
        last = None
        if query is not None:
            last = query[:, -self.rules.preset.observation :].unflatten(
                0, (geometry.kv_heads, geometry.group)
            )
        self._index(number, sealed, last)
        homes = None if last is None else self._warm_up.homes(number, sealed, last)
        layer.store_tokens(sealed, homes)
        self._warm_up.after(number, sequence)

    def _index(self, number: int, sealed: Sealed, last: torch.Tensor | None) -> None:
        layer = self.layers[number]
        first_block = int(layer.blocks[layer.rows(sealed.sequence)][0])
        layer.index_tokens(sealed, IndexContext(first_block, last))
        if self.store.backing > 0 and (number == 0 or not self._is_fitted):
            self._fit_tiers(0 if self._is_fitted else self._index_to_come(layer, sealed))
            self._is_fitted = True

    def _index_to_come(self, layer: Layer, sealed: Sealed) -> int:
        """Device bytes that the index of all other layers and sequences will take, by the first."""
        indexed = sealed.keys.shape[1] * layer.heads
        expected = int(self.tokens.sum()) * layer.heads * len(self.layers)
        so_far = self._device_memory.by_purpose().get("index", 0)
        return so_far * (expected - indexed) // indexed

    def _fit_tiers(self, index_to_come: int) -> None:
        """Share the tiers out anew, as the context has grown."""
        rules, layer = self.rules, self.layers[0]
        stored = self.tokens // rules.preset.block_tokens + 1
        useful = self._per_head(stored)
        if rules.window is not None:
            windows = rules.window if self.plan is None else self.plan.windows[:, None]
            useful = np.minimum(np.ceil(self._per_head(self.budgets()) * windows), useful)
        wanted = useful.astype(np.int64).reshape(-1)
        self._most_residents = int(wanted.max()) if rules.attends_residents else 0
        fit_top_tier(self.store, self._segments(), wanted, index_to_come)
        blocks = (
            int(self.tokens.sum()) // rules.preset.block_tokens * layer.heads * len(self.layers)
        )
        if rules.sync is None:
            fit_middle_tiers(self.store, blocks)
        else:
            stored = self._per_head(stored).astype(np.int64)
            sync.fit_dram(self.store, rules.sync, self._segments(), rules.stalls, stored)

    def _segments(self) -> Ids:
        """Segments of all layers: (layer, sequence, KV head), the last changing fastest."""
        return np.concatenate([layer.segments for layer in self.layers])

    def _per_head(self, per_sequence: Pointers) -> Amounts:
        """A number of each sequence for all its heads: float64 [layers, sequences, KV heads]."""
        shape = len(self.layers), len(per_sequence), self.layers[0].heads
        return np.broadcast_to(per_sequence[:, None].astype(np.float64), shape)

    def stalls(self) -> Amounts:
        """How often each head had to wait for the disk, float64 [layers, KV heads]."""
        shape = len(self.layers), -1, self.layers[0].heads
        stalls: Amounts = sync.stalls_of(self.store, self._segments()).reshape(shape).sum(1)
        return stalls

    # One new token per sequence

    def budgets(self) -> Pointers:
        """Blocks that a row of each sequence may select, at least one and at most all."""
        budget, size = self.rules.budget, self.rules.preset.block_tokens
        share = (
            self.tokens * budget if isinstance(budget, float) else self.tokens * 0 + float(budget)
        )
        blocks: Pointers = np.clip(np.ceil(share / size - 1e-9), 1, self.tokens // size + 1)
        return blocks.astype(np.int64)

    def step(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Select, judge, fetch, attend, update: one token [B, ., 1, .] in every sequence."""
        layer, geometry = self.layers[number], self.rules.geometry
        if number == 0:
            self._begin_step(valid)
        rows = len(layer.segments)
        layer.append_token(
            as_array(key.reshape(rows, -1)), as_array(value.reshape(rows, -1)), self._keep
        )
        out = query.new_empty((rows, geometry.group, geometry.value_size))
        q = as_array(query.reshape(rows, geometry.group, geometry.head_dim))
        if self._has_blocks:
            self._attend_blocks(number, q, out)
        else:
            self._take_work_space(layer, 0)
            self._attend(layer, q, _nothing(rows), out, merge=False)
            self._note(number, _nothing(rows), is_first=True)
        for sequence in self._full:
            sealed = layer.absorb(sequence, key[sequence, :, :0], value[sequence, :, :0])
            assert sealed is not None
            self._index(number, sealed, None)
            layer.store_tokens(sealed, None)
        return out.view(layer.sequences, 1, geometry.query_heads, geometry.value_size)

    def _begin_step(self, valid: torch.Tensor | None) -> None:
        """What is the same in every layer of a step; the layers are in the same state."""
        layer = self.layers[0]
        self._keep = (
            np.ones(layer.sequences, np.bool_) if valid is None else valid[:, 0].cpu().numpy()
        )
        self.tokens = self.tokens + self._keep
        self._recalibrate()
        budgets = self._per_head(self.budgets())
        if self.plan is not None:
            budgets = np.maximum(np.rint(budgets * self.plan.shares[:, None]), 1)
        rows = budgets.reshape(len(self.layers), -1)
        self._budgets: Ids = np.minimum(rows, layer.blocks).astype(np.int32)
        self._has_blocks = bool(layer.blocks.any())
        fetched = self.store.metrics.fetched
        if self._fetched is not None:
            size = self.store.layout.block_bytes
            self.rules.hysteresis.after_step((fetched - self._fetched) * size)
        self._fetched = fetched if self._has_blocks else None
        self._full = layer.full_sequences(self._keep)
        if self.rules.sync is not None:
            sync.fit_page_cache(self.store)

    def _recalibrate(self) -> None:
        """Once enough steps were counted, share the windows out by what they selected."""
        profile, rules = self._profile, self.rules
        if profile is None or rules.recalibrate is None or profile.steps < rules.recalibrate:
            return
        profile.is_counting = False
        self._profile = None
        self.plan = live_plan(
            profile, self._segments(), self._per_head(self.budgets()), rules, self.plan
        )
        self._fit_tiers(0)

    def _attend_blocks(self, number: int, query: Array, out: torch.Tensor) -> None:
        """Attend to what the index selects, in one visit, or in several merged in float32."""
        layer = self.layers[number]
        beside = self._device_scratch.array("beside", query.shape[:2], np.float32)
        kernels.weigh_strips(query, layer.strip_key, layer.strip_length, self.scale, beside)
        selection = layer.index.select(query, self._budgets[number], beside)
        if self.rules.on_selection is not None:
            self.rules.on_selection(number, layer.blocks, selection)
        longest = int((selection.row_ptr[1:] - selection.row_ptr[:-1]).max())
        if self.rules.sync is not None:
            sync.before_fetch(self.store, self.rules.sync, layer, selection, self._scratch)
        # A visit pins blocks, so the work space must be there before: taking it may move some.
        self._take_work_space(layer, max(longest, self._most_residents))
        partial: torch.Tensor | None = None
        delta = self.rules.hysteresis.delta
        visits = self.store.visit(selection, layer.segments, hysteresis=delta)
        for i, visit in enumerate(visits):
            if visit.is_whole and self.rules.attends_residents:
                visit = self.store.residents(layer.segments)
            elif not visit.is_whole and partial is None:
                partial = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
            self._attend(layer, query, visit, out if partial is None else partial, merge=i > 0)
            self._note(number, visit, is_first=i == 0)
        if partial is not None:
            out.copy_(partial)

    def _attend(
        self, layer: Layer, query: Array, visit: Visit, out: torch.Tensor, *, merge: bool
    ) -> None:
        """Blocks of a visit, and at the first visit the strips."""
        strip = np.zeros_like(layer.strip_length) if merge else layer.strip_length
        kernels.attend_blocks(
            query, self._pool(), self._shape, visit.row_ptr, visit.slots, visit.valid,
            layer.strip_key, layer.strip_value, strip, self.scale,
            as_array(out), self._lse, self._weights, merge=merge,
        )  # fmt: skip

    def _take_work_space(self, layer: Layer, blocks: int) -> None:
        """Room for the weights of rows of so many blocks."""
        rows, group = len(layer.segments), self.rules.geometry.group
        width = blocks * self.rules.preset.block_tokens + layer.strip_room
        if self._weights.shape[0] != rows or self._weights.shape[2] < width:
            array = self._device_scratch.array
            self._lse = array("lse", (rows, group), np.float32)
            self._weights = array("weights", (rows, group, width), np.float32)

    def _pool(self) -> Array:
        """The top tier's slots as elements."""
        view = self.store.tiers[0].view
        return view.view(self.layers[0].strip_key.dtype)

    def _note(self, number: int, visit: Visit, *, is_first: bool) -> None:
        """Remember the token positions that each row of a layer attends to."""
        if not self.rules.record:
            return
        layer, sinks = self.layers[number], self.rules.preset.sinks
        if is_first:
            self.attended[number] = attended.in_strips(layer, sinks)
        in_blocks = attended.in_blocks(self.store, layer.segments, visit, sinks)
        for row, positions in enumerate(in_blocks):
            self.attended[number][row].extend(positions)

    # Rows

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every sequence."""
        for layer in self.layers:
            for sequence in range(layer.sequences):
                layer.crop(sequence, tokens)
        self.tokens = self.tokens - tokens

    def arrange(self, sources: Sequence[int]) -> None:
        """Let sequence i be what sequence ``sources[i]`` was."""
        for layer in self.layers:
            layer.arrange(sources)
        self.tokens = self.tokens[list(sources)]
        if self._profile is not None:
            self._profile.restart()
        if self._is_fitted:
            self._fit_tiers(0)


def _nothing(rows: int) -> Visit:
    none: Ids = np.empty(0, np.int32)
    return Visit(np.zeros(rows + 1, np.int64), none, none.astype(np.uint8), none, is_whole=True)
