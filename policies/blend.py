"""The default for attention: what mattered just now, over a while, and was used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.arguments import is_number
from tierstore.errors import ConfigError
from tierstore.policies.history import LEAST_MASS, ScoreHistory, UseCount
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access

_UNUSED = np.float32(0.05)
_MOST_WEIGHT = 1e6


class Blend(RankedPolicy):
    """Evicts the lowest blend of a fast and a slow mean of log attention mass, and of uses.

    The rank is ``share * fast + (1 - share) * slow + weight * log(uses + 0.05)``. A block that
    mattered over the last steps stays a while, and longer if it did so before: the slow mean rises
    faster than it falls, so that it remembers peaks. Text is read forwards, so a block whose
    forerunner scores more counts for a little more than it scores. Of an index that scores only
    what it selects, uses alone decide. Twelve bytes a block, resident or not, beside those of its
    last use.

    Parameters
    ----------
    fast, slow: weight of the newest score in each mean, in (0, 1]; or two weights, of a score above
        the mean and of one below.
    share: part of the fast mean, in (0, 1).
    decay: what is left of a use one step later, in [0, 1].
    weight: of the log of uses, from 0 to a million.
    lean: part that a block takes of what the block before it scores more, in [0, 1].
    """

    def __init__(
        self,
        fast: float | tuple[float, float] = 0.6,
        slow: float | tuple[float, float] = (0.1, 0.04),
        share: float = 0.65,
        decay: float = 0.9,
        weight: float = 0.15,
        lean: float = 0.2,
    ) -> None:
        are_numbers = is_number(share) and is_number(weight)
        if not (are_numbers and 0 < share < 1 and 0 <= weight <= _MOST_WEIGHT):
            raise ConfigError(
                f"share={share!r}, weight={weight!r}: expected a part in (0, 1), and at least 0, "
                f"up to {_MOST_WEIGHT:g}"
            )
        self._scores = ScoreHistory([fast, slow], LEAST_MASS, np.inf, lean)
        self._uses = UseCount(decay)
        self._share, self._weight = np.float32(share), np.float32(weight)

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        self._scores.bind(space)
        self._uses.bind(space)

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        self._scores.update(access)
        self._uses.update(access)

    def rank(self, stats: BlockStats) -> Rank:
        fast, slow = (self._scores.mean(number, stats.handles) for number in range(2))
        uses = np.log(self._uses.uses(stats.handles) + _UNUSED)
        rank: Rank = self._share * fast + (1 - self._share) * slow + self._weight * uses
        return rank
