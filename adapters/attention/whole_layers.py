"""Reading layers whole, as sync level (a) does."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Ids
    from tierstore.scratch import Scratch
    from tierstore.store import BlockStore

_PIECE_BYTES = 2 << 20
_PIECE_SHARE = 16
"""Where layers are read whole, 1/16 of DRAM is read at once, and 2 MiB at most."""


def bring_layer(store: BlockStore, segments: Ids, scratch: Scratch) -> None:
    """Read all blocks of `segments`, piece by piece into `scratch`."""
    blocks = store.space.blocks[segments]
    numbers = [np.arange(count, dtype=np.int32) for count in blocks.tolist()]
    store.expect(np.repeat(segments, blocks), np.concatenate(numbers))
    started = perf_counter()
    nbytes = min(_PIECE_BYTES, store.memory.limit_bytes // _PIECE_SHARE)
    shape = max(len(segments), nbytes // store.layout.block_bytes), store.layout.block_bytes
    staging: Bytes = scratch.array("layer", shape, np.uint8)
    for count in np.unique(blocks).tolist():
        _read_pieces(store, segments[blocks == count], count, staging)
    store.metrics.fetch_seconds += perf_counter() - started


def _read_pieces(store: BlockStore, segments: Ids, blocks: int, staging: Bytes) -> None:
    each = len(staging) // len(segments)
    for first in range(0, blocks, each):
        count = min(each, blocks - first)
        out = staging[: len(segments) * count].reshape(len(segments), count, -1)
        store.read(segments, first, count, out)
