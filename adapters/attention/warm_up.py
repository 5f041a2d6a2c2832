"""Where a prompt's blocks start, by the attention of its last tokens (K17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.placement import assign_homes, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.layer import Layer
    from tierstore.interfaces import Bytes, Ids, Pointers, Scores
    from tierstore.store import BlockStore


class WarmUp:
    """Homes of new blocks, layer by layer, as a ranking has them.

    The ranking over all layers is known with the last one: until then blocks have no home above
    the backing tier, and then each sequence's are promoted at once.
    """

    def __init__(self, store: BlockStore, ranking: str, layers: Sequence[Layer]) -> None:
        self._store, self._ranking, self._layers = store, ranking, layers
        self._sums: dict[int, Scores] = {}
        """For each sequence on its way, importance [1, 1, n] summed over the layers so far."""

    def homes(self, number: int, sequence: int, importance: Scores) -> Bytes:
        """The tier uint8 [H, n] where each new block of a layer gets its first copy for now.

        importance: float32 [H, n], attention to each of the blocks.
        """
        store, layer = self._store, self._layers[number]
        nowhere: Bytes = np.full(importance.shape, store.backing, np.uint8)
        if self._ranking == "none":
            return nowhere
        if self._ranking == "global":
            self._add(number, sequence, importance)
            return nowhere
        ranked = pooled(importance[None], self._ranking)[0]
        return assign_homes(ranked, self.room(layer.segments[layer.rows(sequence)]))

    def _add(self, number: int, sequence: int, importance: Scores) -> None:
        mine = pooled(importance[None], "global")[:, :1]
        self._sums[sequence] = mine if number == 0 else self._sums[sequence] + mine

    def finish(self, sequence: int) -> None:
        """The last layer's blocks are stored: promote those of all layers that had to wait."""
        sums = self._sums.pop(sequence, None)
        if sums is None:
            return
        segments = np.concatenate([layer.segments[layer.rows(sequence)] for layer in self._layers])
        ranked = np.broadcast_to(sums[0], (len(segments), sums.shape[2]))
        layer = self._layers[0]
        first = int(layer.blocks[layer.rows(sequence)][0]) - sums.shape[2]
        self._store.promote(segments, first, assign_homes(ranked, self.room(segments)))

    def room(self, segments: Ids) -> list[int | Pointers]:
        """Blocks that the tiers above the backing one may take of each of `segments`."""
        store = self._store
        used = [np.count_nonzero(store.quota(layer.segments)) for layer in self._layers]
        everyone = max(1, sum(used))
        return [
            store.quota(segments, level)
            if level < store.partitioned
            else store.tiers[level].capacity // everyone
            for level in range(store.backing)
        ]
