"""Copies blocks up to the tiers where they are to begin, once it is known which those are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes, Ids
    from tierstore.transfer import Transfers

_BYTES_AT_ONCE = 1 << 20


def promote(moves: Transfers, handles: Ids, home: Bytes) -> None:
    """Give each block a copy in tier ``home[i]``, as far as that has room without evicting.

    A block that is to stay in the backing tier alone has the number of that one.
    """
    at_once = max(1, _BYTES_AT_ONCE // moves.layout.block_bytes)
    staging: Bytes = np.empty((at_once, moves.layout.block_bytes), np.uint8)
    for level in range(moves.backing):
        wanted = handles[home == level]
        missing = wanted[moves.residency[level].slot_of.array[wanted] < 0]
        for start in range(0, len(missing), at_once):
            piece = missing[start : start + at_once]
            rows = np.arange(len(piece), dtype=np.int32)
            moves.read(piece, staging, rows)
            moves.cache(level, piece, staging, rows)
