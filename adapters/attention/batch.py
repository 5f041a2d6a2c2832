"""What exists while sequences are stored: block store, layers, work space."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention import exact
from tierstore.adapters.attention.attending import Attending, nothing
from tierstore.adapters.attention.capacity import (
    fit_middle_tiers,
    fit_top_tier,
    reserve_backing,
)
from tierstore.adapters.attention.layer import Layer, Sealed
from tierstore.adapters.attention.planning import live_plan
from tierstore.adapters.attention.speculation import PreviousLayer, PreviousStep
from tierstore.adapters.attention.stages import Stages
from tierstore.arrays import as_array
from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.placement import assign_homes
from tierstore.policies import LRU
from tierstore.policies.profile import ReuseProfile
from tierstore.scratch import Scratch
from tierstore.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Pointers, Tier
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout
    from tierstore.policies.profile import Amounts
    from tierstore.timeline import Timeline

_STAGING_BLOCKS = 64
"""Blocks per KV head that a later turn reads at once."""

_SPECULATIVE = {"previous-layer": PreviousLayer, "previous-step": PreviousStep}


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
        self.store = BlockStore(layout, tiers, policies, segments=rows, blocks_each=blocks)
        self._device_memory = device_memory = tiers[0].memory or self.store.memory
        self._scratch = Scratch(self.store.memory)
        self._device_scratch = (
            self._scratch if device_memory is self.store.memory else Scratch(device_memory)
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
        reserve_backing(self.store, rows * blocks)
        fit_middle_tiers(self.store, rows * blocks)
        self._is_fitted = False
        self._most_residents = 0
        self._fetched: int | None = None
        """Blocks fetched before the running step; None before the first that selects."""
        self._attending = Attending(self.store, rules, scale, self._device_scratch)
        kind = _SPECULATIVE.get(rules.schedule, Stages)
        memories = device_memory, self.store.memory
        self._stages = kind(self.store, rules, self._attending, self.layers, memories)

    def settle(self) -> None:
        """Return when nothing is under way any more; raise what went wrong with it."""
        self._stages.settle()

    def watch(self, timeline: Timeline | None) -> None:
        """Note in a timeline when each stage and each transfer runs; None ends it."""
        self._stages.watch(timeline)

    def close(self) -> None:
        """End what is under way."""
        self._stages.close()

    @property
    def attended(self) -> dict[int, list[list[int]]]:
        """Tokens that each row of a layer attended to in its last step, if they are recorded."""
        return self._attending.positions

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
        self._begin_change()
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
        self._begin_change()
        if number == 0:
            self.tokens = self.tokens + key.shape[2]
        for sequence in range(self.layers[number].sequences):
            last = None if query is None else query[sequence]
            self._store(number, sequence, last, key[sequence], value[sequence])

    def _begin_change(self) -> None:
        """Before what no step does."""
        self._stages.settle()
        self._stages.forget()

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
        homes = None if last is None else self._homes(layer, sealed, last)
        layer.store_tokens(sealed, homes)

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
        fit_middle_tiers(self.store, blocks)

    def _segments(self) -> Ids:
        """Segments of all layers: (layer, sequence, KV head), the last changing fastest."""
        return np.concatenate([layer.segments for layer in self.layers])

    def _per_head(self, per_sequence: Pointers) -> Amounts:
        """A number of each sequence for all its heads: float64 [layers, sequences, KV heads]."""
        shape = len(self.layers), len(per_sequence), self.layers[0].heads
        return np.broadcast_to(per_sequence[:, None].astype(np.float64), shape)

    def _homes(self, layer: Layer, sealed: Sealed, last: torch.Tensor) -> Bytes | None:
        """The tier where each sealed block gets its first copy beside the backing one."""
        store = self.store
        if store.backing == 0:
            return None
        weight = exact.importance(
            last.flatten(1, 2), sealed.keys, self.rules.preset.block_tokens, self.scale
        )
        segments = len(self.layers) * len(layer.segments)
        middle = [store.tiers[level].capacity // segments for level in range(1, store.backing)]
        top = store.quota(layer.segments[layer.rows(sealed.sequence)])
        room: list[int | Pointers] = [top, *middle]
        return assign_homes(weight.cpu().numpy(), room)

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
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Select, judge, fetch, attend, update: one token [B, ., 1, .] in every sequence."""
        self._stages.settle_updates()
        layer, geometry = self.layers[number], self.rules.geometry
        if number == 0:
            self._begin_step(valid)
        rows = len(layer.segments)
        layer.append_token(
            as_array(key.reshape(rows, -1)), as_array(value.reshape(rows, -1)), self._keep
        )
        out = query.new_empty((rows, geometry.group, geometry.value_size))
        q, guess = self._rows_of(query), None if next_query is None else self._rows_of(next_query)
        if self._has_blocks:
            self._stages.attend(number, q, self._budgets, self._most_residents, out, guess)
        else:
            self._attending.take_work_space(layer, 0)
            self._attending.attend(layer, q, nothing(rows), as_array(out))
            self._attending.note(number, layer, nothing(rows), is_first=True)
        if self._full:
            self._stages.update(number, partial(self._seal, number, self._full, key, value))
        return out.view(layer.sequences, 1, geometry.query_heads, geometry.value_size)

    def _rows_of(self, query: torch.Tensor) -> Array:
        """Queries [B, Hq, 1, d] as [R, G, d]."""
        geometry = self.rules.geometry
        return as_array(query.reshape(-1, geometry.group, geometry.head_dim))

    def _seal(
        self, number: int, sequences: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Let tokens leave the strips of sequences for blocks. key, value: [B, ., 1, .]."""
        layer = self.layers[number]
        for sequence in sequences:
            sealed = layer.absorb(sequence, key[sequence, :, :0], value[sequence, :, :0])
            assert sealed is not None
            self._index(number, sealed, None)
            layer.store_tokens(sealed, None)

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

    # Rows

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every sequence."""
        self._begin_change()
        for layer in self.layers:
            for sequence in range(layer.sequences):
                layer.crop(sequence, tokens)
        self.tokens = self.tokens - tokens

    def arrange(self, sources: Sequence[int]) -> None:
        """Let sequence i be what sequence ``sources[i]`` was."""
        self._begin_change()
        for layer in self.layers:
            layer.arrange(sources)
        self.tokens = self.tokens[list(sources)]
        if self._profile is not None:
            self._profile.restart()
        if self._is_fitted:
            self._fit_tiers(0)
