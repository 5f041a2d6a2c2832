"""Uses that fade: between least recently and least frequently used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.policies.history import UseCount
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access


class LRFU(RankedPolicy):
    """Evicts the block with the lowest count of uses, of which each step takes a share away.

    Between equal counts, the block used longest ago leaves. LRFU (Lee et al., 2001), with a weight
    that is a power of the age. Four bytes a block, beside
    those of its last use.

    Parameters
    ----------
    decay: what is left of a use one step later, in [0, 1]; 1 counts all uses alike (LFU).
    """

    def __init__(self, decay: float = 0.95) -> None:
        self._uses = UseCount(decay)

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._uses.bind(space)

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        self._uses.update(access)

    def rank(self, stats: BlockStats) -> Rank:
        return self._uses.uses(stats.handles)
