"""Reading layers whole, as sync level (a) does."""

from __future__ import annotations

from itertools import zip_longest
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
    """Read all blocks of `segments` into `scratch`, in the order in which the disk has them.

    Piece by piece; the disk begins with the next while one is copied.
    """
    nbytes = min(_PIECE_BYTES, store.memory.limit_bytes // _PIECE_SHARE)
    each = max(1, nbytes // store.layout.block_bytes)
    staging: Bytes = scratch.array("layer", (each, store.layout.block_bytes), np.uint8)
    with store.holding() as moves:
        on_disk = moves.residency[store.backing].slot_of.array
        handles = np.concatenate(
            [store.space.all_handles(segment) for segment in segments.tolist()]
        )
        handles = handles[np.argsort(on_disk[handles])]
        pieces = [handles[first : first + each] for first in range(0, len(handles), each)]
        for piece, coming in zip_longest(pieces, pieces[1:]):
            if coming is not None:
                moves.expect(coming)
            started = perf_counter()
            moves.read(piece, staging)
            store.metrics.fetch_seconds += perf_counter() - started
