"""Where a prompt's blocks start, by the attention of its last tokens (K17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention.exact import importance
from tierstore.placement import assign_homes, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.adapters.attention.layer import Layer, Sealed
    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Bytes, Ids, Pointers, Scores
    from tierstore.store import BlockStore


class WarmUp:
    """Homes of new blocks, layer by layer, as a ranking has them.

    The ranking over all layers is known with the last one: until then blocks have no home above
    the backing tier, and then each sequence's are promoted at once.
    """

    def __init__(
        self, store: BlockStore, preset: Preset, layers: Sequence[Layer], scale: float
    ) -> None:
        self._store, self._layers = store, layers
        self._ranking, self._block_tokens = preset.ranking, preset.block_tokens
        self._scale = scale
        self._sums: dict[int, Scores] = {}
        """For each sequence on its way, importance [1, 1, n] summed over the layers so far."""

    def homes(self, number: int, sealed: Sealed, last: torch.Tensor) -> Bytes | None:
        """The tier uint8 [H, n] where each new block of a layer gets its first copy for now.

        last: [H, G, w, d], the queries of the last tokens. None where there is one tier only.
        """
        store, layer, sequence = self._store, self._layers[number], sealed.sequence
        if store.backing == 0:
            return None
        shape = layer.heads, sealed.keys.shape[1] // self._block_tokens
        if self._ranking == "none":
            return np.full(shape, store.backing, np.uint8)
        strip, _ = layer.strip(sequence)
        mass = importance(last, sealed.keys, strip, self._block_tokens, self._scale).cpu().numpy()
        if self._ranking == "global":
            self._add(number, sequence, mass)
            return np.full(shape, store.backing, np.uint8)
        ranked = pooled(mass[None], self._ranking)[0]
        homes = assign_homes(ranked, self.room(layer.segments[layer.rows(sequence)]))
        self._make_room(sequence, homes)
        return homes

    def _add(self, number: int, sequence: int, mass: Scores) -> None:
        mine = pooled(mass[None], "global")[:, :1]
        self._sums[sequence] = mine if number == 0 else self._sums[sequence] + mine

    def after(self, number: int, sequence: int) -> None:
        """A layer's blocks are stored; with the last one's, promote those that had to wait."""
        if number < len(self._layers) - 1 or sequence not in self._sums:
            return
        sums = self._sums.pop(sequence)
        segments = self._segments(sequence)
        ranked = np.broadcast_to(sums[0], (len(segments), sums.shape[2]))
        layer = self._layers[0]
        first = int(layer.blocks[layer.rows(sequence)][0]) - sums.shape[2]
        homes = assign_homes(ranked, self.room(segments))
        self._make_room(sequence, homes)
        self._store.promote(segments, first, homes)

    def _segments(self, sequence: int) -> Ids:
        return np.concatenate([layer.segments[layer.rows(sequence)] for layer in self._layers])

    def _make_room(self, sequence: int, homes: Bytes) -> None:
        """Let others give way to new blocks, up to an equal share, in tiers that all share."""
        store, segments = self._store, self._segments(sequence)
        for level in range(store.partitioned, store.backing):
            share = store.tiers[level].capacity * len(segments) // self._everyone()
            held = int(np.isin(store.owners(level), segments).sum())
            store.make_room(level, min(int((homes == level).sum()), share - held))

    def _everyone(self) -> int:
        """Segments of all sequences that there are."""
        return max(1, sum(int((self._store.quota(at.segments) > 0).sum()) for at in self._layers))

    def room(self, segments: Ids) -> list[int | Pointers]:
        """Blocks that the tiers above the backing one may take of each of `segments`."""
        store = self._store
        return [
            store.quota(segments, level)
            if level < store.partitioned
            else store.tiers[level].capacity // self._everyone()
            for level in range(store.backing)
        ]
