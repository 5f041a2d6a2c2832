"""Imagined windows: what each of several policies would have fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.interfaces import Demand
from tierstore.kernels import histories
from tierstore.kernels.tables import CHUNK
from tierstore.policies.history import segments_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.directory import Column, HandleSpace
    from tierstore.interfaces import Access, Ids, Pointers
    from tierstore.policies.ranked import RankedPolicy

MOST_EVERY = (1 << 32) - 1
_SPREAD = np.uint32(0x9E3779B1)
"""2^32 over the golden ratio: products modulo 2^32 of any run of numbers lie evenly."""


class Shadows:
    """A window for each policy and segment, of a sample of the blocks, and what it missed.

    Parameters
    ----------
    policies: at most eight, bound to the same space; they hear of each access before `play`.
    window: blocks of a window, in blocks that a step selects.
    every: one block in so many is followed.
    memory: what is left of a miss one step later.
    last_used: the step of each handle's last use.
    """

    def __init__(
        self,
        policies: Sequence[RankedPolicy],
        space: HandleSpace,
        last_used: Column,
        *,
        window: float,
        every: int,
        memory: float,
    ) -> None:
        self._policies = policies
        self._space = space
        self._last_used = last_used
        self._window, self._every, self._memory = window, every, memory
        self._marks = space.column(np.uint8)
        self._misses = np.zeros((0, len(policies)))

    def misses(self, segments: Ids) -> npt.NDArray[np.float64]:
        """Recent misses [segments, policies]; 0 for a segment that has made no step."""
        self._reserve()
        return self._misses[segments]

    def forget(self, segments: Ids) -> None:
        """What has these numbers later are other segments."""
        self._reserve()
        self._misses[segments] = 0

    def play(self, access: Access) -> None:
        """Let every policy fetch what the step selects, and evict."""
        space = self._space
        self._reserve()
        segments = segments_of(access, space)
        row_of = np.zeros(len(space.blocks), np.int32)
        row_of[segments] = np.arange(len(segments))
        rows = row_of[space.owner_segment[access.handles // CHUNK]]
        selected = np.bincount(rows, minlength=len(segments))
        room = np.ceil(self._window * selected / self._every).astype(np.int64)
        chosen = is_followed(access.handles, self._every)
        handles, rows = access.handles[chosen], rows[chosen]
        self._misses[segments] *= self._memory
        held = self._marks.array[handles]
        for number in range(len(self._policies)):
            missing = rows[held & (1 << number) == 0]
            self._misses[segments, number] += np.bincount(missing, minlength=len(segments))
        self._marks.array[handles] |= (1 << len(self._policies)) - 1
        for number in range(len(self._policies)):
            self._evict(number, segments, room, access)

    def _evict(self, number: int, segments: Ids, room: Pointers, access: Access) -> None:
        space, marks, bit = self._space, self._marks.array, 1 << number
        most = int(space.blocks[segments].sum())
        handles: Ids = np.empty(most, np.int32)
        eligible = np.empty(most, np.bool_)
        row_ptr: Pointers = np.empty(len(segments) + 1, np.int64)
        able: Pointers = np.empty(len(segments), np.int64)
        n = histories.marked(
            space.chunks, space.blocks, segments, marks, bit, self._last_used.array, access.step,
            row_ptr, handles, eligible, able,
        )  # fmt: skip
        need = np.minimum(np.maximum(np.diff(row_ptr) - room, 0), able)
        demand = Demand(segments, row_ptr, handles[:n], eligible[:n], need, access)
        marks[self._policies[number].victims(demand)] &= 255 - bit

    def _reserve(self) -> None:
        """Know as many segments as the space."""
        short = len(self._space.blocks) - len(self._misses)
        if short > 0:
            more = np.zeros((short, len(self._policies)))
            self._misses = np.concatenate([self._misses, more])


def is_followed(handles: Ids, every: int) -> npt.NDArray[np.bool_]:
    """Whether a handle is in the sample: one of `every`, in a run of them or 2, 4 or 8 apart."""
    # Not by the remainder: of an odd multiple, that of a power of two follows each block's number.
    mixed = handles.astype(np.uint32) * _SPREAD
    chosen: npt.NDArray[np.bool_] = mixed <= np.uint32(MOST_EVERY // every)
    return chosen
