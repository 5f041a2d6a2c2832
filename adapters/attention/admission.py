"""Whether one more sequence fits, before anything is changed for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.directory import TABLE_BYTES_PER_SLOT
from tierstore.errors import CapacityError
from tierstore.kernels.tables import CHUNK
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.lanes import Lanes
    from tierstore.adapters.attention.layer import Layer
    from tierstore.adapters.attention.rules import Rules
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Tier
    from tierstore.memory import Memory
    from tierstore.store import BlockStore

_BY_HANDLES = ("directory", "policy")


class _Room(NamedTuple):
    """What a batch has, and the lanes that it should have."""

    store: BlockStore
    layers: Sequence[Layer]
    preset: Preset
    lanes: Lanes


def check_first(lanes: Lanes, rules: Rules, backing: Tier) -> None:
    """CapacityError unless an empty backing tier holds the blocks promised in `lanes`."""
    rows = rules.geometry.layers * rules.geometry.kv_heads
    blocks = rows * int(lanes.blocks(rules.preset).sum())
    if blocks > backing.limit:
        size = backing.layout.block_bytes
        raise CapacityError(
            f"{backing.name}: the KV cache of these sequences may take "
            f"{format_size(blocks * size)}, but there is room for "
            f"{format_size(backing.limit * size)}: raise {backing.name}= or add disk="
        )


def check_room(store: BlockStore, layers: Sequence[Layer], preset: Preset, lanes: Lanes) -> None:
    """CapacityError unless there is room for what is promised in `lanes`, maybe new ones.

    Known to the byte are blocks, sinks, local windows and most indexes. Work space and directory
    are taken to grow as they have so far.
    """
    room = _Room(store, layers, preset, lanes)
    _check_backing(room)
    if store.backing > 0:
        _check_top(room)


def _check_backing(batch: _Room) -> None:
    store, size = batch.store, batch.store.layout.block_bytes
    rows = batch.layers[0].heads * len(batch.layers)
    blocks = rows * int(batch.lanes.blocks(batch.preset).sum())
    tier = store.tiers[store.backing]
    room = store.limit(store.backing)
    if tier.memory is not None:
        room -= -(-_growth(tier.memory, batch) // (size + TABLE_BYTES_PER_SLOT))
    if blocks > room:
        raise CapacityError(
            f"{tier.name}: with one more sequence the KV cache may take "
            f"{format_size(blocks * size)}, but there is room for "
            f"{format_size(max(room, 0) * size)}: finish another one first, raise {tier.name}= or "
            "add disk="
        )


def _check_top(batch: _Room) -> None:
    tier, size = batch.store.tiers[0], batch.store.layout.block_bytes
    segments = batch.layers[0].heads * len(batch.layers) * int(batch.lanes.live.sum())
    if tier.memory is None:
        return
    other = tier.memory.used_bytes - tier.memory.slot_bytes + _growth(tier.memory, batch)
    needed = other + segments * size
    if needed > tier.memory.limit_bytes:
        raise CapacityError(
            f"{tier.name}: with one more sequence index, sinks, local windows and work space may "
            f"take {format_size(other)}, beside at least one block per layer and KV head: finish "
            f"another one first, or raise {tier.name}= to more than {format_size(needed)}"
        )


def _growth(memory: Memory, batch: _Room) -> int:
    """Bytes that all but slots may take in a memory beyond what they take now.

    While an array grows the old one is there too, beside room to go back.
    """
    used, lanes = memory.by_purpose(), batch.lanes
    blocks = lanes.blocks(batch.preset)
    rows, longest = len(lanes) * batch.layers[0].heads, int(blocks.max(initial=0))
    index = sum(layer.index.grown_bytes(rows, longest, memory) for layer in batch.layers)
    index = max(index, used.get("index", 0))
    growth = index - used.get("index", 0)
    more = len(lanes) - batch.layers[0].sequences
    growth += sum(layer.grown_bytes(more, memory) for layer in batch.layers)
    if growth and used.get("index"):
        growth += used.get("work space", 0) * (index - used["index"]) // used["index"]
    if memory is batch.store.memory:
        chunks = -(-blocks // CHUNK) * batch.layers[0].heads * len(batch.layers)
        handles = int(np.maximum(chunks.sum() * CHUNK - batch.store.space.handles, 0))
        tables = sum(used.get(name, 0) for name in _BY_HANDLES)
        growth += tables * handles * 9 // (8 * batch.store.space.handles)
    return growth + 2 * memory.largest_bytes * (growth > 0)
