"""Bringing selected blocks into the top tier, in two halves that can overlap: judge, then fetch."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.interfaces import Access, Bytes, Ids, Pointers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Selection
    from tierstore.transfer import Fetch, Transfers


@dataclass(slots=True)
class Visit:
    """Blocks that are in the top tier while the visit lasts.

    row_ptr, slots, valid, handles: row r has top-tier slots ``slots[row_ptr[r]:row_ptr[r + 1]]``,
    so many valid tokens in each, and these handles. is_whole: it is all of the selection.
    """

    row_ptr: Pointers
    slots: Ids
    valid: Bytes
    handles: Ids
    is_whole: bool = True


class _Part(NamedTuple):
    """Blocks that fit the top tier together, and what has to come for them; None for nothing."""

    row_ptr: Pointers
    handles: Ids
    valid: Bytes
    fetch: Fetch | None


class PendingVisit:
    """Judged blocks. From here to `release` their domains belong to this visit alone.

    The halves may be called from different threads, one after the other.
    """

    def __init__(self, visits: Visits, domains: Ids) -> None:
        self.domains = domains
        self.thread = threading.get_ident()
        """The thread that judged."""
        self.step = 0
        """The store's step when it was judged."""
        self.is_whole = True
        """Whether all of the selection fits the top tier at once; then `fetch` brings it."""
        self._visits = visits
        self._moves = visits.moves
        self._part: _Part | None = None
        self._rest: Iterator[_Part] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def judge(
        self, selection: Selection, segments: Ids, hysteresis: float, *, is_news: bool
    ) -> None:
        """Look the blocks up, tell the policy, make room. Requires: the store's lock."""
        moves = self._moves
        handles, slots, valid, misses = moves.judge(selection, segments)
        self.step = moves.step
        access = Access(
            selection.row_ptr, handles, selection.scores, moves.step, selection.everything
        )
        if moves.backing > 0 and is_news:
            moves.tell(0, "on_access", access)
        row_ptr = selection.row_ptr
        if misses and hysteresis > 0:
            row_ptr, kept = moves.worth_fetching(selection, segments, slots, hysteresis)
            filtered = len(handles) - len(kept)
            misses -= filtered
            moves.metrics.filtered += filtered if is_news else 0
            handles, slots, valid = handles[kept], slots[kept], valid[kept]
        if misses == 0:
            self._part = _Part(row_ptr, handles, valid, None)
            self._slots = slots
        else:
            self._rest = self._parts(row_ptr, handles, slots, valid, access)
            self._part = next(self._rest)
        self._is_news = is_news

    def _parts(
        self, row_ptr: Pointers, handles: Ids, slots: Ids, valid: Bytes, access: Access
    ) -> Iterator[_Part]:
        """Parts that fit, each with its slots reserved when it is asked for, under the lock."""
        for part_ptr, chosen in self._moves.passes(row_ptr, handles, slots):
            self.is_whole = chosen is None
            part = handles if chosen is None else handles[chosen]
            counts = valid if chosen is None else valid[chosen]
            yield _Part(part_ptr, part, counts, self._moves.reserve(part, access))

    def fetch(self) -> Visit:
        """Bring what is judged, or its first part, into the top tier.

        OSError of a tier: blocks may have left the top tier, none has come.
        """
        part, moves = self._part, self._moves
        assert part is not None, "fetched twice"
        self._part, misses = None, 0
        if part.fetch is not None:
            misses = len(part.fetch.handles)
            moves.bring(part.fetch, self._visits.lock)
            self._slots = moves.residency[0].slot_of.array[part.handles]
        if self._is_news:
            with self._visits.lock:
                moves.metrics.tiers[0].hits += len(part.handles) - misses
        return Visit(part.row_ptr, self._slots, part.valid, part.handles, self.is_whole)

    def visits(self) -> Iterator[Visit]:
        """`fetch` part by part; each lasts until the next is asked for."""
        while self._part is not None:
            yield self.fetch()
            with self._visits.lock:
                self._part = next(self._rest, None)

    def release(self) -> None:
        """Let the blocks go. A second call does nothing."""
        with self._visits.lock:
            if self._part is not None and self._part.fetch is not None:
                self._moves.residency[0].return_slots(self._part.fetch.slots)
            self._part, self._rest = None, iter(())
            self._visits.end(self)


class Visits:
    """The live visits of one store: several at once where they share no domain of the top tier.

    Invariant: while a visit is live, no tier shrinks, those between the top and the backing one
    grow under the lock only, and nothing is written to the backing one.
    """

    def __init__(self, moves: Transfers, lock: threading.RLock) -> None:
        self.moves = moves
        self.lock = threading.Condition(lock)
        """The store's lock; who waits is told when a visit ends."""
        self._live: list[PendingVisit] = []
        self._is_busy: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __bool__(self) -> bool:
        return bool(self._live)

    def judge(
        self, selection: Selection, segments: Ids, hysteresis: float, *, is_news: bool
    ) -> PendingVisit:
        """A new visit, judged; see `BlockStore.judge`."""
        with self.lock:
            domains = self._domains(segments)
            self._wait_for(domains)
            visit = PendingVisit(self, domains)
            visit.judge(selection, segments, hysteresis, is_news=is_news)
            self._is_busy[domains] = True
            self._live.append(visit)
            self.moves.visiting.append(visit.step)
            return visit

    def _domains(self, segments: Ids) -> Ids:
        """Domains that a visit needs for itself; none in a chain of one tier: it moves nothing."""
        top = self.moves.residency[0]
        if self.moves.backing == 0:
            return segments[:0]
        if len(top.counts) > len(self._is_busy):
            more = np.zeros(len(top.counts) - len(self._is_busy), np.bool_)
            self._is_busy = np.concatenate([self._is_busy, more])
        return top.domain_of[segments]

    def _wait_for(self, domains: Ids) -> None:
        """Return when no live visit has one of the domains."""
        while self._live and self._is_busy[domains].any():
            me = threading.get_ident()
            if any(
                visit.thread == me and np.isin(domains, visit.domains).any() for visit in self._live
            ):
                raise _own_visit_error()
            self.lock.wait()

    def refuse_own(self) -> None:
        """ConfigError if the calling thread is in a visit. Requires: the lock."""
        me = threading.get_ident()
        if any(visit.thread == me for visit in self._live):
            raise _own_visit_error()

    def wait_for_none(self) -> None:
        """Return when no visit is live; ConfigError if the calling thread is in one.

        Requires: the lock.
        """
        while self._live:
            self.refuse_own()
            self.lock.wait()

    def wait_for_others(self) -> None:
        """Return when no other thread is in a visit. Requires: the lock."""
        me = threading.get_ident()
        while any(visit.thread != me for visit in self._live):
            self.lock.wait()

    def end(self, visit: PendingVisit) -> None:
        """A visit is over, if it was not yet. Requires: the lock."""
        if visit not in self._live:
            return
        self._live.remove(visit)
        self.moves.visiting.remove(visit.step)
        self._is_busy[visit.domains] = False
        self.lock.notify_all()


def _own_visit_error() -> ConfigError:
    return ConfigError("the caller is in a visit: finish or close it first")
