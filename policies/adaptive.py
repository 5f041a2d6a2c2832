"""The policy that is winning: every segment follows the one that would have fetched least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tierstore.arguments import is_number, is_whole
from tierstore.errors import ConfigError
from tierstore.kernels.tables import CHUNK
from tierstore.policies.blend import Blend
from tierstore.policies.ewma_use import EwmaUse
from tierstore.policies.lookahead import Lookahead
from tierstore.policies.lrfu import LRFU
from tierstore.policies.lru import LRU
from tierstore.policies.ranked import BlockStats, Rank, RankedPolicy
from tierstore.policies.shadows import MOST_EVERY, Shadows

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.directory import HandleSpace
    from tierstore.interfaces import Access, Ids

_MOST = 8
_AMPLE = 1e9


class Adaptive(RankedPolicy):
    """Evicts as the candidate that recently missed least in an imagined window of the segment.

    For each candidate a window is played in which one block in `every` counts. The first candidate
    is followed until another one misses less by the share `lead`.

    Parameters
    ----------
    candidates: make the ranked policies to choose from, at most eight.
    window: blocks of the imagined windows, in blocks that a step selects; as in the preset.
    every: one block in so many is followed. Fewer cost less, and decide later.
    memory: what is left of a miss one step later, below 1.
    lead: how much better than the first candidate another one must be.
    """

    def __init__(
        self,
        candidates: Sequence[Callable[[], RankedPolicy]] = (Blend, EwmaUse, Lookahead, LRU, LRFU),
        *,
        window: float = 2.0,
        every: int = 4,
        memory: float = 0.99,
        lead: float = 0.015,
    ) -> None:
        if not isinstance(candidates, Sequence) or not all(map(callable, candidates)):
            raise ConfigError(f"candidates={candidates!r}: expected classes of ranked policies")
        if not 1 <= len(candidates) <= _MOST:
            raise ConfigError(f"{len(candidates)} candidates: expected 1 to {_MOST}")
        are_numbers = is_whole(every) and all(map(is_number, (window, memory, lead)))
        if not (
            are_numbers
            and 1 <= window <= _AMPLE
            and 1 <= every <= MOST_EVERY
            and 0 <= memory < 1
            and 0 <= lead <= _AMPLE
        ):
            raise ConfigError(
                f"window={window!r}, every={every!r}, memory={memory!r}, lead={lead!r}: expected "
                "at least 1 and 1 (a whole number), a factor in [0, 1), and at least 0; up to "
                f"{_AMPLE:g}"
            )
        self.candidates = [make() for make in candidates]
        for candidate in self.candidates:
            if not isinstance(candidate, RankedPolicy):
                raise ConfigError(f"candidate {candidate!r}: expected a RankedPolicy")
        self._window, self._every, self._memory = window, every, memory
        self._handicap = np.where(np.arange(len(candidates)) > 0, 1 + lead, 1.0)

    def bind(self, space: HandleSpace) -> None:
        super().bind(space)
        for candidate in self.candidates:
            candidate.bind(space)
        self._shadows = Shadows(
            self.candidates, space, self._last_used,
            window=self._window, every=self._every, memory=self._memory,
        )  # fmt: skip

    def on_access(self, access: Access) -> None:
        super().on_access(access)
        for candidate in self.candidates:
            candidate.on_access(access)
        self._shadows.play(access)

    def on_remove(self, handles: Ids) -> None:
        for candidate in self.candidates:
            candidate.on_remove(handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        for candidate in self.candidates:
            candidate.on_close(segments, domains)
        self._shadows.forget(segments)

    def rank(self, stats: BlockStats) -> Rank:
        return self._led(stats, [candidate.rank for candidate in self.candidates])

    def tie(self, stats: BlockStats) -> Rank:
        return self._led(stats, [candidate.tie for candidate in self.candidates])

    def _led(self, stats: BlockStats, ranks: Sequence[Callable[[BlockStats], Rank]]) -> Rank:
        """Each domain's residents by the rank of its leader."""
        leader = np.repeat(self._leaders(stats), np.diff(stats.row_ptr))
        out = np.empty(len(stats.handles))
        for number in np.unique(leader).tolist():
            np.copyto(out, ranks[number](stats), where=leader == number)
        return out

    def _leaders(self, stats: BlockStats) -> Ids:
        """The candidate with the fewest misses over the residents of each domain."""
        domains = len(stats.row_ptr) - 1
        rows = np.repeat(np.arange(domains), np.diff(stats.row_ptr))
        misses = self._shadows.misses(self._space.owner_segment[stats.handles // CHUNK])
        total = np.zeros((domains, len(self.candidates)))
        np.add.at(total, rows, misses)
        leaders: Ids = np.argmin(total * self._handicap, axis=1).astype(np.int32)
        return leaders
