"""Where a keyed store's values come from: memory at once, disk in batches, then the remote tier."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tierstore.deadlines import end_of, left_until
from tierstore.errors import TierOfflineError
from tierstore.events import emit
from tierstore.hot import HotCache
from tierstore.volume.format import KeyFields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from tierstore.arguments import Keys
    from tierstore.interfaces import Bytes, Pointers, RecordTier
    from tierstore.loading import Loader, Target
    from tierstore.volume import Volume
    from tierstore.volume.records import Visited

    Take = Callable[[int, memoryview], None]
    Keep = Callable[
        [KeyFields, Sequence[memoryview], float | None, int | None], npt.NDArray[np.bool_]
    ]

_log = logging.getLogger(__name__)


class Serving:
    """Hands out values and counts where they came from. Any thread may call.

    keep: stores here what the remote tier had. counting: guards `hits` and `misses`.
    """

    def __init__(
        self, volume: Volume, loader: Loader, remote: RecordTier | None, keep: Keep
    ) -> None:
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.counting = threading.Lock()
        self._volume = volume
        self._loader = loader
        self._remote = remote
        self._keep = keep

    def serve(
        self,
        keys: Keys,
        fields: KeyFields,
        take_cached: Callable[[Visited], None],
        take: Take,
        deadline: float | None,
        target: Target | None = None,
    ) -> None:
        """Call `take_cached` once, under the volume's lock, then `take` for each value from below.

        A value that nobody has, or that is late, is a miss. target: where a value may go straight
        from the disk, unless there is a deadline: a disk that hangs writes there later.
        """
        until = end_of(deadline)
        visited = self._visit(fields, take_cached, deadline, pin_cached=False)
        if visited is None:
            return
        with self.counting:
            self.hits[HotCache.name] += visited.hits
        if visited.hits < len(fields):
            missing = visited.missing
            cold = missing[visited.places[missing] >= 0]
            try:
                straight = target if deadline is None else None
                failed = self._load(visited.places, cold.tolist(), take, until, straight)
            finally:
                self._volume.let_go(visited.places[cold])
            absent = missing[visited.places[missing] < 0].tolist()
            self._serve_absent(keys, absent, failed, take, until)

    def _visit(
        self,
        fields: KeyFields,
        take_cached: Callable[[Visited], None],
        deadline: float | None,
        *,
        pin_cached: bool,
    ) -> Visited | None:
        """Find and pin records; None if the store does not answer in time."""
        try:
            with self._volume.locked(deadline):
                visited = self._volume.records.visit(fields, pin_cached=pin_cached)
                try:
                    take_cached(visited)
                except BaseException:
                    pinned = visited.places >= 0
                    if not pin_cached:
                        pinned &= visited.pages < 0
                    self._volume.unpin(visited.places[pinned])
                    raise
                return visited
        except TierOfflineError:
            with self.counting:
                self.misses["deadline"] += len(fields)
            return None

    def _load(
        self,
        places: Pointers,
        cold: list[int],
        take: Take,
        until: float | None,
        target: Target | None = None,
    ) -> list[int]:
        """Take values of pinned places from disk; returns positions of those that failed."""
        reasons: Counter[str] = Counter()
        failed = []
        if cold:
            failed = self._loader.load(places, cold, take, reasons, left_until(until), target)
        with self.counting:
            self.hits["disk"] += len(cold) - len(failed)
            self.misses.update(reasons)
        return failed

    def _serve_absent(
        self, keys: Keys, absent: list[int], failed: list[int], take: Take, until: float | None
    ) -> None:
        """Take from the remote tier what this machine has not, or has damaged."""
        found: set[int] = set()
        if self._remote is not None and (absent or failed):
            found = self._serve_remote(self._remote, keys, [*absent, *failed], take, until)
        with self.counting:
            self.misses["absent"] += sum(position not in found for position in absent)

    def _serve_remote(
        self, remote: RecordTier, keys: Keys, positions: list[int], take: Take, until: float | None
    ) -> set[int]:
        wanted = [bytes(keys[position]) for position in positions]
        removals = self._volume.removals
        try:
            values = remote.read(wanted, left_until(until))
        except OSError as error:
            with self.counting:
                self.misses[remote.name] += len(wanted)
            say_failed(remote, error)
            return set()
        found = {
            position: (key, memoryview(value))
            for position, key, value in zip(positions, wanted, values, strict=True)
            if value is not None
        }
        for position, (_, value) in found.items():
            take(position, value)
        with self.counting:
            self.hits[remote.name] += len(found)
        if found and not self._volume.is_read_only:
            own, pieces = zip(*found.values(), strict=True)
            self._keep(KeyFields(own), pieces, None, removals)
        return set(found)

    def hold(
        self, keys: Keys, fields: KeyFields, deadline: float | None
    ) -> tuple[list[Bytes | None], Pointers]:
        """Values to read in place, None for misses, and the places that are pinned for them."""
        until = end_of(deadline)
        values: list[Bytes | None] = [None] * len(fields)
        visited = self._visit(fields, lambda visited: None, deadline, pin_cached=True)
        if visited is None:
            return values, np.empty(0, np.int64)
        with self.counting:
            self.hits[HotCache.name] += visited.hits
        pinned = visited.places[visited.places >= 0]
        if visited.hits < len(fields):
            try:
                self._hold_missing(keys, visited, values, until)
            except BaseException:
                self._volume.let_go(pinned)
                raise
        hot = self._loader.hot
        if hot is not None:
            pages, sizes = visited.pages.tolist(), visited.sizes.tolist()
            for position, page in enumerate(pages):
                if page >= 0:
                    values[position] = hot.value(page, sizes[position])
        return values, pinned

    def _hold_missing(
        self, keys: Keys, visited: Visited, values: list[Bytes | None], until: float | None
    ) -> None:
        """Bring values that are not in memory there, or into arrays of their own."""
        missing, cached = visited.missing, self._volume.records.cached

        def take(position: int, value: memoryview) -> None:
            place = int(visited.places[position])
            visited.pages[position] = cached[place] if place >= 0 else -1
            if visited.pages[position] < 0:
                values[position] = np.frombuffer(bytes(value), np.uint8)

        is_there = visited.places[missing] >= 0
        failed = self._load(visited.places, missing[is_there].tolist(), take, until)
        self._serve_absent(keys, missing[~is_there].tolist(), failed, take, until)

    def load(self, keys: Keys, fields: KeyFields) -> None:
        """Bring values into memory."""
        self.serve(keys, fields, lambda visited: None, lambda position, value: None, None)


def say_failed(remote: RecordTier, error: OSError) -> None:
    """Log that the remote tier could not do what it was asked for."""
    emit(
        _log, logging.WARNING, "remote.failed", f"{remote.name}: {error}",
        tier=remote.name, error=str(error),
    )  # fmt: skip
