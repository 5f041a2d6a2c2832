"""Selected blocks that stay where they are: in a lower tier that can be read in place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tierstore.errors import PolicyError
from tierstore.interfaces import Selection
from tierstore.kernels import lower
from tierstore.transfer import bad_selection
from tierstore.visits import Visit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.costs import Flags
    from tierstore.interfaces import Bytes, Ids, Pointers
    from tierstore.store import BlockStore

    Choose = Callable[[Pointers], Flags]
    """Told how many blocks of each row are in the lower tier only, says which rows leave them."""

LEVEL = 1
"""The tier under the top one."""


def can_stay(store: BlockStore) -> bool:
    """Whether the tier under the top one is memory that kernels can read in place."""
    if store.backing < LEVEL:
        return False
    tier = store.tiers[LEVEL]
    return tier.is_addressable and tier.memory is not None


@contextmanager
def visit_below(
    store: BlockStore, selection: Selection, segments: Ids, choose: Choose
) -> Iterator[tuple[Visit, Selection]]:
    """Blocks that rows leave in the tier under the top one, with their slots there; and the rest.

    While the context lasts, no tier changes. PolicyError if the selection names a block that its
    segment does not have, or one twice.
    """
    with store.holding() as moves:
        moves.step += 1
        space, valid_of = store.space, moves.valid.array
        top, below = (moves.residency[level].slot_of.array for level in (0, LEVEL))
        counts: Pointers = np.empty(len(segments), np.int64)
        fault = lower.count_below(
            space.chunks, space.blocks, segments, selection.row_ptr, selection.ids, top, below,
            moves.last_used.array, moves.step, counts,
        )  # fmt: skip
        if fault < -1:
            raise PolicyError(bad_selection(selection, -2 - fault))
        stays = choose(counts)
        n = int(counts[stays].sum())
        handles, slots = np.empty(n, np.int32), np.empty(n, np.int32)
        valid: Bytes = np.empty(n, np.uint8)
        below_ptr, rest_ptr = np.empty_like(selection.row_ptr), np.empty_like(selection.row_ptr)
        rest: Ids = np.empty(len(selection.ids) - n, np.int32)
        lower.split(
            space.chunks, segments, selection.row_ptr, selection.ids, stays, top, below, valid_of,
            below_ptr, handles, slots, valid, rest_ptr, rest,
        )  # fmt: skip
        if n:
            moves.use_below(LEVEL, handles)
        others = Selection(
            rest_ptr, selection.ids[rest], selection.scores[rest], selection.everything
        )
        yield Visit(below_ptr, slots, valid, handles, is_whole=False), others
