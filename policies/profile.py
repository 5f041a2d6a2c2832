"""How much a window of any size would miss, told from how long ago blocks were selected before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierstore.interfaces import Access, Demand, EvictionPolicy, Ids, Pointers
from tierstore.kernels import windows
from tierstore.kernels.tables import CHUNK

if TYPE_CHECKING:
    from tierstore.directory import HandleSpace

Amounts = npt.NDArray[np.float64]

_AGES = 256
"""Steps back that are told apart."""


class ReuseProfile(EvictionPolicy):
    """Evicts as another policy does, and counts meanwhile how old what is selected is.

    The age of a selected block is the number of its segment's steps since it was selected before.
    Counts of ages tell the misses of LRU at every capacity (P. J. Denning and S. C. Schwartz,
    Properties of the working-set model, CACM 1972), O(selected) in a step. What other policies
    miss is less, but falls alike from head to head.

    Parameters
    ----------
    policy: the policy that decides.
    warm_up: steps of a segment that only set its blocks' last selection: at first, all are new.
    """

    def __init__(self, policy: EvictionPolicy, warm_up: int = 16) -> None:
        self._policy = policy
        self._warm_up = warm_up
        self.steps = 0
        """Steps counted, of the segment that made the most."""
        self.is_counting = True

    def bind(self, space: HandleSpace) -> None:
        self._policy.bind(space)
        self._space = space
        self._last = space.column(np.int32)
        self.restart()

    def restart(self) -> None:
        """Forget all counts; the next steps are a warm-up again."""
        segments = len(self._space.blocks)
        self._ages: npt.NDArray[np.int64] = np.zeros((segments, _AGES + 1), np.int64)
        self._visits: Ids = np.zeros(segments, np.int32)
        self._last.array[:] = 0
        self.steps = 0

    def on_capacity(self, domains: Ids, blocks: Pointers) -> None:
        self._policy.on_capacity(domains, blocks)

    def on_access(self, access: Access) -> None:
        self._policy.on_access(access)
        if not self.is_counting or not len(access.handles):
            return
        if len(self._space.blocks) > len(self._visits):
            self._grow(len(self._space.blocks))
        starts = np.minimum(access.row_ptr[:-1], len(access.handles) - 1)
        rows = self._space.owner_segment[access.handles[starts] // CHUNK]
        segments: Ids = np.where(np.diff(access.row_ptr) > 0, rows, -1).astype(np.int32)
        windows.count_ages(
            access.row_ptr, access.handles, segments, self._warm_up, self._visits,
            self._last.array, self._ages,
        )  # fmt: skip
        self.steps = max(self.steps, int(self._visits[segments].max()) - self._warm_up)

    def _grow(self, segments: int) -> None:
        more = segments - len(self._visits)
        self._ages = np.concatenate([self._ages, np.zeros((more, _AGES + 1), np.int64)])
        self._visits = np.concatenate([self._visits, np.zeros(more, np.int32)])

    def on_admit(self, handles: Ids, domains: Ids) -> None:
        self._policy.on_admit(handles, domains)

    def victims(self, demand: Demand) -> Ids:
        return self._policy.victims(demand)

    def on_evict(self, handles: Ids) -> None:
        self._policy.on_evict(handles)

    def on_remove(self, handles: Ids) -> None:
        self._policy.on_remove(handles)

    def on_close(self, segments: Ids, domains: Ids) -> None:
        self._policy.on_close(segments, domains)
        counted = segments[segments < len(self._visits)]
        self._visits[counted] = 0
        self._ages[counted] = 0

    def misses(self, segments: Ids, sizes: Amounts) -> Amounts:
        """Blocks that LRU would miss in a step of ``segments[i]`` with ``sizes[i, j]`` slots.

        sizes: float64 [n, m], rising along each row, and at least what the segment selects. Before
        the first step that counts, all are 0.
        """
        out: Amounts = np.zeros(sizes.shape, np.float64)
        if self.steps > 0:
            windows.expected_misses(self._ages[segments], self.steps, sizes, out)
        return out
