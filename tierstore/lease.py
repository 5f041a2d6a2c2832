"""Holds on values while somebody reads them in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Self

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.interfaces import Bytes, Pointers
    from tierstore.volume import Volume


class Lease:
    """Read-only views of values that stay as they are while the lease lives.

    Use it as a context manager, or call `release`. After its deadline the store may end it when it
    needs the room; views are then invalid, and using one is a ValueError. Arrays and slices made
    from the views must be gone by then: as long as one is alive, so is the hold.

    values: memoryview of each value, None for a miss. owner: who holds it, for reports.
    deadline: time of the store's clock from which on it may be ended.
    """

    def __init__(
        self,
        owner: str,
        deadline: float,
        values: Sequence[Bytes | None],
        places: Pointers,
        on_release: Callable[[Lease], None],
    ) -> None:
        self.owner = owner
        self.deadline = deadline
        self.places = places
        self.is_live = True
        self._on_release = on_release
        # Only views hold the arrays, so that a dead reference tells that no view is left.
        self._arrays = [weakref.ref(value) for value in values if value is not None]
        self.values: list[memoryview | None] = [
            None if value is None else value.data.toreadonly() for value in values
        ]

    def __len__(self) -> int:
        """How many of the values were there."""
        return len(self._arrays)

    def release(self) -> None:
        """End the lease. ConfigError if it has ended already."""
        self._on_release(self)

    def end(self) -> None:
        """Invalidate the views. For the store, which then waits until `is_unused`."""
        self.is_live = False
        values, self.values = self.values, []
        for value in values:
            if value is not None:
                try:
                    value.release()
                except BufferError:  # an array made from the view is alive, and holds it
                    continue

    @property
    def is_unused(self) -> bool:
        """Whether nothing can read the memory any more."""
        return all(array() is None for array in self._arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.release()


class Leases:
    """The leases of one store. Its volume's lock guards them."""

    def __init__(self, volume: Volume, clock: Callable[[], float]) -> None:
        self._volume = volume
        self._clock = clock
        self._held: list[Lease] = []

    def __len__(self) -> int:
        """Leases whose memory is held."""
        return len(self._held)

    def add(
        self, owner: str, seconds: float, values: Sequence[Bytes | None], places: Pointers
    ) -> Lease:
        """A lease on values of places that are pinned for it."""
        lease = Lease(owner, self._clock() + seconds, values, places, self._end)
        self._held.append(lease)  # in one step, since the lock may be taken for longer than asked
        return lease

    def _end(self, lease: Lease) -> None:
        with self._volume.lock:
            if not lease.is_live:
                raise ConfigError(
                    f"the lease of {lease.owner!r} was released before, or its deadline passed and "
                    "the store needed the room: lease again"
                )
            lease.end()
            self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        if lease.is_unused:
            self._held.remove(lease)
            self._volume.unpin(lease.places)

    def reap(self) -> None:
        """End leases whose deadline passed, and let go of what no view can reach any more."""
        if not self._held:
            return
        with self._volume.lock:
            now = self._clock()
            for lease in self._held.copy():
                if lease.is_live and lease.deadline <= now:
                    lease.end()
                if not lease.is_live:
                    self._let_go(lease)

    def end_all(self) -> None:
        """Invalidate every view."""
        with self._volume.lock:
            for lease in self._held.copy():
                lease.end()
