"""`KeyedStore` against a dictionary, through faults and crashes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import CapacityError, ConfigError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.sizes import parse_size
from tierstore.testing.clock import FakeClock
from tierstore.testing.faults import FaultIO, damaged, error, short
from tierstore.testing.keyed import KEYS, SIZES, content, keys_of_a_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tierstore.lease import Lease
    from tierstore.testing.faults import Call


class _Held(NamedTuple):
    """A lease, and what its values were when it was made."""

    lease: Lease
    values: list[bytes | None]


EFFECTS: list[Callable[[Call], object]] = [
    error(5), error(28), short(100), short(0), damaged(7), damaged(-3, 0x80),
]  # fmt: skip
"""EIO, ENOSPC, transfers that stop early or do nothing, flipped bits."""


class KeyedStoreMachine(RuleBasedStateMachine):
    """A `KeyedStore` against a dictionary, through faults, crashes and lack of room.

    `now` maps a key to the value that it has, if it has one: a cache may lose it. `maybe` has all
    values that a power loss may bring back: the one of the last sync, and those since then.

    Inherit it to run it on other options, or a class of your own with the same methods::

        class SmallMachine(KeyedStoreMachine):
            options = {"disk": "512KiB", "segment": "64KiB", "dram": None}

        class TestSmall(SmallMachine.TestCase):
            settings = settings(max_examples=100, stateful_step_count=50)
    """

    options: ClassVar[dict[str, Any]] = {"disk": "512KiB", "segment": "64KiB", "dram": "128KiB"}
    """Of the store; `disk` is a number of bytes or a text."""

    def make_store(self, folder: Path, io: FaultIO) -> KeyedStore:
        """A store of a directory."""
        return KeyedStore(
            folder, Identity(model="machine"), io=io, clock=self.clock, **self.options
        )

    def __init__(self) -> None:
        super().__init__()
        self.root = TemporaryDirectory()
        self.clock = FakeClock()
        self.now: dict[bytes, bytes] = {}
        self.maybe: dict[bytes, set[bytes]] = {}
        self.changed: set[bytes] = set()
        """Keys that changed since the last sync."""
        self.held: list[_Held] = []
        self.crashes = self.numbers = 0
        self.folder = Path(self.root.name) / "0"
        self.is_open = False

    @initialize()
    def open(self) -> None:
        """Open the directory as it is, without faults."""
        self.io = FaultIO(self.folder)
        self.store = self.make_store(self.folder, self.io)
        self.is_open, self.has_faults, self.was_faulty = True, False, False
        self.capacity = max(self.store.stats().disk_bytes, parse_size(self.options["disk"]))
        self.records = len(self.store) + sum(self.store.stats().dropped.values())
        """Records there were when the store opened, and puts since then."""

    def teardown(self) -> None:
        """Everything can be read once more, and closing ends every lease."""
        try:
            if self.is_open:
                self.heal()
                self.read(list(KEYS))
                self._end()
        finally:
            self.held.clear()
            self.root.cleanup()

    def _end(self) -> bool:
        """Close the store; whether that went well."""
        for held in self.held:
            self._check_views(held)
        try:
            self.store.close()
        except OSError:
            assert self.was_faulty, "closing failed without a fault"
            return False
        finally:
            self.is_open = False
            for held in self.held:
                assert not held.lease.is_live, "a lease outlives its store"
            self.held.clear()
        return True

    # Values

    @rule(keys=keys_of_a_call, sizes=st.lists(st.sampled_from(SIZES), min_size=4, max_size=4))
    def put(self, keys: list[bytes], sizes: list[int]) -> None:
        """What is refused leaves what was there."""
        self.numbers += len(keys)
        values = [content(self.numbers + i, size) for i, size in enumerate(sizes[: len(keys)])]
        done = self.store.put_many(keys, values).tolist()
        latest = {key: i for i, key in enumerate(keys)}
        for key, i in latest.items():
            if done[i]:
                self.now[key] = values[i]
                self.changed.add(key)
                self.records += 1
            # What is read back is there until that fails; then it is removed, like by a `delete`.
            if done[i] or self.options.get("verify") == "always":
                self.maybe.setdefault(key, set()).add(values[i])

    @rule(count=st.integers(1, 8), size=st.sampled_from([4096, 16_000, 50_000]))
    def press(self, count: int, size: int) -> None:
        """Put values under keys that nobody asks for, so that others must leave."""
        self.numbers += count
        keys = [b"other %d" % (self.numbers + i) for i in range(count)]
        self.records += int(self.store.put_many(keys, [bytes(size)] * count).sum())

    @rule(keys=keys_of_a_call)
    def read(self, keys: list[bytes]) -> None:
        """Each value is the one that was put, or a miss."""
        for key, value in zip(keys, self.store.get_many(keys), strict=True):
            assert value is None or value == self.now.get(key), f"{key!r} has a wrong value"

    @rule(keys=keys_of_a_call)
    def read_into(self, keys: list[bytes]) -> None:
        out = np.zeros((len(keys), max(SIZES)), np.uint8)
        for key, size, row in zip(keys, self.store.get_into(keys, out).tolist(), out, strict=True):
            if size >= 0:
                assert row[:size].tobytes() == self.now.get(key), f"{key!r} has a wrong value"

    @rule(keys=keys_of_a_call)
    def ask(self, keys: list[bytes]) -> None:
        there = self.store.contains_many(keys).tolist()
        assert self.store.touch_many(keys).tolist() == there
        for key, is_there in zip(keys, there, strict=True):
            assert not is_there or key in self.now, f"{key!r} came back"

    @rule(keys=keys_of_a_call)
    def prefetch(self, keys: list[bytes]) -> None:
        assert self.store.prefetch(keys).wait(60)

    @rule(keys=keys_of_a_call)
    def delete(self, keys: list[bytes]) -> None:
        there = [key in self.store for key in keys]
        try:
            assert self.store.delete_many(keys).tolist() == there
        except OSError:
            assert self.was_faulty, "deleting failed without a fault"
        else:
            for key in keys:
                self.now.pop(key, None)
                self.changed.add(key)

    @rule()
    def clear(self) -> None:
        try:
            self.store.clear()
        except OSError:
            assert self.was_faulty, "clearing failed without a fault"
        else:
            self.now.clear()
            self.maybe.clear()
            assert len(self.store) == 0

    # Leases

    @precondition(lambda self: len(self.held) < 4)
    @rule(keys=keys_of_a_call, seconds=st.sampled_from([1, 100]))
    def lease(self, keys: list[bytes], seconds: int) -> None:
        lease = self.store.lease_many(keys, owner="machine", seconds=seconds)
        values = [None if view is None else bytes(view) for view in lease.values]
        for key, value in zip(keys, values, strict=True):
            assert value is None or value == self.now.get(key), f"{key!r} has a wrong value"
        self.held.append(_Held(lease, values))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 3))
    def release(self, number: int) -> None:
        held = self.held.pop(number % len(self.held))
        self._check_views(held)
        if held.lease.is_live:
            held.lease.release()
        with pytest.raises(ConfigError, match="released before"):
            held.lease.release()

    @rule(seconds=st.sampled_from([2, -50, 200]))
    def move_clock(self, seconds: int) -> None:
        self.clock.jump(seconds)

    def _check_views(self, held: _Held) -> None:
        if held.lease.is_live:
            views = [None if view is None else bytes(view) for view in held.lease.values]
            assert views == held.values, "a leased value changed"

    # Durability

    @rule()
    def sync(self) -> None:
        try:
            self.store.sync()
        except OSError:
            assert self.was_faulty, "syncing failed without a fault"
        else:
            self.maybe = {key: {value} for key, value in self.now.items()}
            self.changed.clear()

    @rule()
    def reopen(self) -> None:
        """A clean close keeps exactly what there is."""
        there, is_offline = self._there(self.now), self.store.stats().is_offline
        is_synced = self._end() and not is_offline
        self.open()
        if is_synced:
            self._must_be_there(there)
            self.read(list(KEYS))
            self.maybe = {key: {value} for key, value in self.now.items()}
            self.changed.clear()
        else:
            self._observe()

    @rule(
        keep=st.sampled_from(["none", "all", "random"]),
        tear=st.sampled_from([None, 512, 4096]),
        seed=st.integers(0, 1 << 16),
    )
    def crash(self, keep: Literal["none", "all", "random"], tear: int | None, seed: int) -> None:
        """What was synced and not changed since is there; the rest is old, new, or missing."""
        is_kill = keep == "all" and tear is None and not self.was_faulty
        there = self._there(self.now if is_kill else self.now.keys() - self.changed)
        self.crashes += 1
        into = Path(self.root.name) / str(self.crashes)
        self.io.crash(into, keep=keep, tear=tear, seed=seed)
        self._end()
        self.folder = into
        self.open()
        self._must_be_there(there)
        if is_kill:
            self.read(list(KEYS))
        else:
            self._observe()

    def _there(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those keys that are not lost; none if faults make it hard to tell."""
        return [] if self.was_faulty else [key for key in keys if key in self.store]

    def _must_be_there(self, keys: list[bytes]) -> None:
        for key, value in zip(keys, self.store.get_many(keys), strict=True):
            assert value == self.now.get(key), f"{key!r} is lost"

    def _observe(self) -> None:
        """After a power loss, what is there must be one of the values that may be."""
        for key, value in zip(KEYS, self.store.get_many(KEYS), strict=True):
            may_be = self.maybe.get(key, set()) | {self.now.get(key)}
            assert value is None or value in may_be, f"{key!r} has a wrong value"
            self.now.pop(key, None)
            if value is not None:
                self.now[key] = value

    # Limits and faults

    @rule(disk=st.sampled_from([1, 2]), dram=st.sampled_from([None, 1, 4]))
    def resize(self, disk: int, dram: int | None) -> None:
        """To fewer bytes or more, in the sizes of the options."""
        full = parse_size(self.options["disk"])
        self.capacity = max(self.capacity, full // disk)
        try:
            self.store.resize(disk=full // disk)
            self.capacity = full // disk
            if dram is not None and self.options["dram"] is not None:
                self.store.resize(dram=parse_size(self.options["dram"]) * dram)
        except CapacityError:
            assert self.held, "there was no room, and nothing was leased"
        except OSError:
            assert self.was_faulty, "resizing failed without a fault"

    @precondition(lambda self: not self.has_faults)
    @rule(
        fault=st.tuples(st.sampled_from(["read", "write", "read write"]), st.sampled_from(EFFECTS))
        | st.tuples(
            st.sampled_from(["sync", "rename remove sync_directory", "open allocate size close"]),
            st.sampled_from(EFFECTS[:2]),
        ),
        one_in=st.sampled_from([1, 2, 8]),
    )
    def break_disk(self, fault: tuple[str, Callable[[Call], object]], one_in: int) -> None:
        """From now on, calls of these kinds fail, stop early, or damage what they move."""
        kinds, effect = fault
        self.io.inject(kinds, effect, one_in=one_in)
        self.has_faults = self.was_faulty = True

    @precondition(lambda self: self.has_faults)
    @rule()
    def heal(self) -> None:
        self.io.heal()
        self.has_faults = False

    # Invariants

    @invariant()
    def is_valid(self) -> None:
        """Limits hold, leased values stay, and each value that went was counted."""
        if not self.is_open:
            return
        self.store.validate()
        stats = self.store.stats()
        assert stats.disk_bytes <= self.capacity, "the disk limit is exceeded"
        if self.store.hot is not None:
            assert stats.dram_bytes <= self.store.hot.limit_bytes, "the memory limit is exceeded"
        for held in self.held:
            self._check_views(held)
        known = stats.records + sum(stats.dropped.values())
        assert self.records <= known, "a value vanished without being counted"
        assert self.records == known or self.was_faulty, "losses were counted that did not happen"
