"""Brings values from disk: each once, however many ask for it at the same time."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.aligned import AlignedBuffers, aligned_rows
from tierstore.deadlines import end_of, left_until
from tierstore.errors import CapacityError, CorruptBlockError, PolicyError
from tierstore.reads import LateReadError
from tierstore.volume.format import whole_pages

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from tierstore.hot import HotCache
    from tierstore.interfaces import Codec, Pointers
    from tierstore.volume import Volume

    Target = Callable[[int, int], memoryview | None]
    """The memory, at a multiple of 4 KiB, for so many bytes of a position; None for none."""

_STAGING_BYTES = 1 << 20
_STAGING = 96
_GROUP = 32
_STRAIGHT = 256
"""Values in a group that needs no staging."""
_GROUPS = 3
"""Groups under way: while one is handed out, the disk has two."""


class _Load:
    """A value on its way, and what those who wait for it get.

    done: made by the first who waits, since most values have nobody else.
    """

    __slots__ = ("done", "reason", "value", "waiting")

    def __init__(self) -> None:
        self.done: threading.Event | None = None
        self.waiting = 0
        self.value: bytes | None = None
        self.reason = "io"

    def join(self) -> threading.Event:
        """Have the value passed on, and something to wait for."""
        self.waiting += 1
        if self.done is None:
            self.done = threading.Event()
        return self.done

    def finish(self, value: memoryview | None, reason: str) -> None:
        """Pass the value on to those who wait, if there are any."""
        self.reason = reason
        if self.done is not None:
            self.value = None if value is None else bytes(value)
            self.done.set()


@dataclass(slots=True)
class _Group:
    """Values that are read together. finish: waits for the outcomes. release: the buffers go."""

    positions: list[int]
    buffers: list[memoryview]
    finish: Callable[[], list[Exception | None]]
    release: Callable[[Sequence[Exception | None]], None]

    def end(self) -> None:
        """Wait, and let the buffers go without a look at what came."""
        self.release(self.finish())


@dataclass(slots=True)
class _Wanted:
    """What one caller wants: values of pinned `places`, named by their positions there.

    deliver: gets each value with its position. misses: counts the others by reason. until: when to
    give up, by `time.monotonic`. target: where a value may go straight from the disk.
    """

    places: Pointers
    deliver: Callable[[int, memoryview], None]
    misses: Counter[str]
    until: float | None
    target: Target | None

    def place(self, position: int) -> int:
        """The place of a position."""
        return int(self.places[position])


class Loader:
    """Reads, verifies and decodes values of one volume, and keeps them in memory if there is room.

    Staging buffers are a fixed pool, so memory in flight is bounded however much is asked for; of
    values larger than a buffer, one is under way at a time.
    """

    def __init__(self, volume: Volume, codec: Codec | None) -> None:
        self.hot: HotCache | None = None
        self._volume = volume
        self._codec = codec
        self._loads: dict[int, _Load] = {}
        self._staging = AlignedBuffers(_STAGING_BYTES, _STAGING)
        self._large = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of staging buffers."""
        return self._staging.nbytes

    def load(
        self,
        places: Pointers,
        positions: list[int],
        deliver: Callable[[int, memoryview], None],
        misses: Counter[str],
        deadline: float | None,
        target: Target | None = None,
    ) -> list[int]:
        """Call ``deliver(i, value)`` for each i of `positions` whose place has the right value.

        The places are pinned; the view is valid during the call. Others are counted in `misses` by
        reason, and their positions returned. target: where a value may go straight from the disk.
        """
        delivered: set[int] = set()

        def hand_out(position: int, value: memoryview) -> None:
            deliver(position, value)
            delivered.add(position)

        wanted = _Wanted(places, hand_out, misses, end_of(deadline), target)
        left = positions
        while left:
            left = self._load_shared(wanted, left)
        return [position for position in positions if position not in delivered]

    def _load_shared(self, wanted: _Wanted, positions: list[int]) -> list[int]:
        """Load what nobody loads yet, and wait for the rest; returns what another gave up on."""
        own, others = self._share(wanted, positions)
        try:
            self._load_own(wanted, list(own))
        finally:
            self._abandon(wanted, own)
        again = []
        for position, load, done in others:
            if not done.wait(left_until(wanted.until)):
                wanted.misses["deadline"] += 1
            elif load.value is not None:
                wanted.deliver(position, memoryview(load.value))
            elif load.reason == "deadline" and left_until(wanted.until) != 0:
                again.append(position)
            else:
                wanted.misses[load.reason] += 1
        return again

    def _share(
        self, wanted: _Wanted, positions: list[int]
    ) -> tuple[dict[int, _Load], list[tuple[int, _Load, threading.Event]]]:
        """Positions to read here, and those that somebody is reading already."""
        own: dict[int, _Load] = {}
        others: list[tuple[int, _Load, threading.Event]] = []
        with self._volume.lock:
            for position in positions:
                place = wanted.place(position)
                load = self._loads.get(place)
                if load is None:
                    own[position] = self._loads[place] = _Load()
                else:
                    others.append((position, load, load.join()))
        return own, others

    def _abandon(self, wanted: _Wanted, own: dict[int, _Load]) -> None:
        """Let nobody wait for loads that did not happen.

        A load that did happen is forgotten by now, and its place may be loading for somebody else.
        """
        with self._volume.lock:
            for position, load in own.items():
                place = wanted.place(position)
                if self._loads.get(place) is load:
                    del self._loads[place]
                    load.finish(None, load.reason)

    def _load_own(self, wanted: _Wanted, positions: list[int]) -> None:
        """Read values in groups, the next one while the one before is handed out."""
        waiting, under_way = positions, deque[_Group]()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < _GROUPS:
                    group = self._begin(wanted, waiting, wait=not under_way)
                    if group is None:
                        break
                    under_way.append(group)
                    waiting = waiting[len(group.positions) :]
                if not under_way:
                    self._give_up(wanted, waiting)
                    return
                self._settle(wanted, under_way.popleft())
        finally:
            with ExitStack() as ends:  # each, whatever another raises
                for group in under_way:
                    ends.callback(group.end)

    def _begin(self, wanted: _Wanted, waiting: list[int], *, wait: bool) -> _Group | None:
        """Begin to read the first of those waiting; None if there are no buffers in time."""
        rooms = [self._room(wanted.place(position)) for position in waiting[:_GROUP]]
        small = next((i for i, room in enumerate(rooms) if room > _STAGING_BYTES), len(rooms))
        left = left_until(wanted.until) if wait else 0.0
        straight = self._targets(wanted, waiting)
        if straight:
            buffers = straight
            release: Callable[[Sequence[Exception | None]], None] = _keep
        elif small == 0:
            if not self._large.acquire(timeout=-1 if left is None else left):
                return None
            release = self._release_large
            try:
                buffers = [aligned_rows(1, rooms[0])[0].data]
            except MemoryError:
                self._large.release()
                raise
        else:
            try:
                buffers = self._staging.take(small, left)
            except CapacityError:
                return None
            release = partial(self._staging.give, buffers)
        own = waiting[: len(buffers)]
        try:
            places = [wanted.place(position) for position in own]
            finish = self._volume.begin_read(places, buffers, left_until(wanted.until))
        except BaseException:
            release([None] * len(own))
            raise
        return _Group(own, buffers, finish, release)

    def _targets(self, wanted: _Wanted, waiting: list[int]) -> list[memoryview]:
        """Where the first of those waiting can go without a copy, as far as they all can."""
        found: list[memoryview] = []
        if wanted.target is None or self._codec is not None:
            return found
        for position in waiting[:_STRAIGHT]:
            buffer = wanted.target(position, self._volume.files.disk_bytes(wanted.place(position)))
            if buffer is None:
                break
            found.append(buffer)
        return found

    def _release_large(self, outcomes: Sequence[Exception | None]) -> None:
        self._large.release()

    def _give_up(self, wanted: _Wanted, waiting: list[int]) -> None:
        for position in waiting:
            self._finish(wanted.place(position), None, "deadline", wanted.misses)

    def _room(self, place: int) -> int:
        return whole_pages(max(self._volume.files.disk_bytes(place), 1))

    def _settle(self, wanted: _Wanted, group: _Group) -> None:
        """Hand out what a group brought."""
        try:
            outcomes = group.finish()
        except BaseException:  # an interrupt: nobody knows yet which buffers are free
            group.end()
            raise
        try:
            for position, buffer, outcome in zip(
                group.positions, group.buffers, outcomes, strict=True
            ):
                place, value = wanted.place(position), None
                if outcome is None:
                    try:
                        value = self._decoded(place, buffer)
                    except CorruptBlockError as error:
                        # A traceback would keep the callers' frames, and what they hold, alive.
                        outcome = error.with_traceback(None)
                        self._volume.drop_damaged(np.array([place]), "codec")
                self._finish(place, value, _reason(outcome), wanted.misses)
                if value is not None:
                    wanted.deliver(position, value)
        finally:
            group.release(outcomes)

    def _decoded(self, place: int, buffer: memoryview) -> memoryview:
        row = self._volume.records.rows[place]
        stored, size = buffer[: int(row["stored_bytes"])], int(row["value_bytes"])
        code = 0 if self._codec is None else self._codec.code
        if int(row["codec"]) != code:
            raise CorruptBlockError(f"codec {row['codec']}: expected {code}")
        if self._codec is None:
            if len(stored) != size:
                raise CorruptBlockError(f"{len(stored)} bytes: expected {size}")
            return stored
        out = np.empty((1, size), np.uint8)
        try:
            self._codec.decode(np.frombuffer(stored, np.uint8), out)
        except (CorruptBlockError, MemoryError):
            raise
        except Exception as error:
            raise PolicyError(f"{type(self._codec).__name__}.decode raised {error!r}") from error
        return memoryview(out[0])

    def _finish(
        self, place: int, value: memoryview | None, reason: str, misses: Counter[str]
    ) -> None:
        """Keep a value, or count its miss, and pass it on to those who wait for it."""
        with self._volume.lock:
            if value is None:
                misses[reason] += 1
            elif self.hot is not None:
                self.hot.keep(place, value)
            self._loads.pop(place).finish(value, reason)


def _reason(outcome: Exception | None) -> str:
    if isinstance(outcome, LateReadError):
        return "deadline"
    return "corrupt" if isinstance(outcome, CorruptBlockError) else "io"


def _keep(outcomes: Sequence[Exception | None]) -> None:
    """Release what is the caller's own."""
