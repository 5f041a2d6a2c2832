"""Which tokens a step attends to, for tests and for people who want to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from tierstore.adapters.attention.layer import Layer
    from tierstore.interfaces import Ids
    from tierstore.store import BlockStore
    from tierstore.visits import Visit


def in_strips(layer: Layer, sinks: int) -> list[list[int]]:
    """Positions of the tokens in each row's strip."""
    positions = []
    for length, total in zip(layer.strip_length.tolist(), layer.tokens.tolist(), strict=True):
        first = min(length, sinks)
        positions.append([*range(first), *range(total - (length - first), total)])
    return positions


def in_blocks(store: BlockStore, segments: Ids, visit: Visit, sinks: int) -> list[list[int]]:
    """Positions of the tokens in each row's blocks of a visit; blocks begin behind the sinks."""
    blocks = store.space.owner_index[visit.handles // CHUNK] * CHUNK + visit.handles % CHUNK
    positions = []
    for row in range(len(segments)):
        chosen = slice(visit.row_ptr[row], visit.row_ptr[row + 1])
        inside = store.tokens_of(segments[row : row + 1], blocks[None, chosen])[0]
        live = np.arange(inside.shape[-1]) < visit.valid[chosen, None]
        positions.append((inside[live] + sinks).tolist())
    return positions
