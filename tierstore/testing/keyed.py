"""What every keyed store must do: laws for any store, and `KeyedStore` against a dictionary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import CapacityError, ConfigError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.sizes import parse_size
from tierstore.testing.clock import FakeClock
from tierstore.testing.faults import FaultIO, damaged, error, short
from tierstore.testing.laws import law

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from tierstore.lease import Lease
    from tierstore.testing.faults import Call

KEYS = [b"a", b"b\0", b"b\0\0", b"\xff" * 47, b"c" * 48, b"c" * 49, b"d" * 100, b"e" * 511]
SIZES = [0, 1, 100, 4095, 4096, 4097, 12_000]


class Store(Protocol):
    """What `KeyedStoreTests` uses of a store."""

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Store values; which of them are readable now."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key; None for a miss."""

    def contains_many(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which keys have a value."""

    def delete_many(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Remove values; which of them were there."""

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys that begin with a prefix."""

    def sync(self) -> None:
        """Make everything survive a power loss."""

    def clear(self) -> None:
        """Remove everything."""

    def close(self) -> None:
        """End the use of the store; a second call does nothing."""


def content(seed: int, size: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(seed).bytes(size)


keys_of_a_call = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
steps = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "get", "clear", "reopen"]), keys_of_a_call),
    max_size=20,
)


class KeyedStoreTests(ABC):
    """Inherit, and make the store. It must have room for 64 values of 16 KiB, and not lose them."""

    @abstractmethod
    def make_store(self, folder: Path) -> Store:
        """The store of a directory, which a test has closed before it makes it again."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert store.get_many(KEYS) == [None] * len(KEYS)
        assert not store.contains_many(KEYS).any()
        assert not store.delete_many(KEYS).any()
        assert list(store.keys()) == []

    @pytest.mark.parametrize("size", SIZES)
    def test_values_come_back_under_their_keys(self, store: Store, size: int) -> None:
        values = [content(i, size) for i in range(len(KEYS))]
        assert store.put_many(KEYS, values).all()
        assert store.get_many(KEYS[::-1]) == values[::-1]
        assert store.contains_many(KEYS).all()
        assert sorted(store.keys()) == sorted(KEYS)

    def test_keys_that_begin_alike_are_apart(self, store: Store) -> None:
        keys = [b"k" * n for n in range(1, 64)]
        values = [bytes([n]) for n in range(63)]
        assert store.put_many(keys, values).all()
        assert store.get_many(keys) == values
        assert sorted(store.keys(b"k" * 60)) == keys[59:]
        assert list(store.keys(b"kl")) == []

    def test_nothing_is_a_batch_too(self, store: Store) -> None:
        assert store.get_many([]) == []
        assert store.put_many([], []).shape == (0,)
        assert store.contains_many([]).shape == store.delete_many([]).shape == (0,)

    def test_of_equal_keys_in_one_call_the_last_counts(self, store: Store) -> None:
        assert store.put_many([b"a", b"b", b"a"], [b"1", b"2", b"3"]).tolist() == [True] * 3
        assert store.get_many([b"a", b"b"]) == [b"3", b"2"]

    def test_a_later_value_takes_the_place_of_an_earlier_one(self, store: Store) -> None:
        store.put_many([b"a", b"b"], [content(0, 9000), b"other"])
        store.put_many([b"a"], [b""])
        assert store.get_many([b"a", b"b"]) == [b"", b"other"]
        assert sorted(store.keys()) == [b"a", b"b"]

    def test_deleted_values_are_gone(self, store: Store) -> None:
        store.put_many([b"a", b"b"], [b"1", b"2"])
        assert store.delete_many([b"a", b"c"]).tolist() == [True, False]
        assert store.get_many([b"a", b"b"]) == [None, b"2"]
        assert not store.delete_many([b"a"]).any()

    def test_a_cleared_store_is_empty_and_of_use(self, store: Store) -> None:
        store.put_many(KEYS, KEYS)
        store.clear()
        assert store.get_many(KEYS) == [None] * len(KEYS)
        assert list(store.keys()) == []
        assert store.put_many([b"a"], [b"new"]).all()
        assert store.get_many([b"a"]) == [b"new"]

    def test_what_was_put_stays_when_the_caller_changes_its_buffer(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put_many([b"a"], [memoryview(buffer)])  # type: ignore[list-item]
        buffer[:] = b"after!"
        assert store.get_many([b"a"]) == [b"before"]

    def test_values_and_removals_outlive_the_store(self, tmp_path: Path) -> None:
        first = self.make_store(tmp_path / "store")
        values = [content(i, 5000) for i in range(len(KEYS))]
        first.put_many(KEYS, values)
        first.delete_many(KEYS[:1])
        first.sync()
        first.close()
        first.close()
        second = self.make_store(tmp_path / "store")
        assert second.get_many(KEYS) == [None, *values[1:]]
        second.clear()
        second.close()
        third = self.make_store(tmp_path / "store")
        assert list(third.keys()) == []
        third.close()

    @pytest.mark.parametrize("key", [b"", bytes(512)], ids=["empty", "of 512 bytes"])
    def test_a_key_of_another_length_is_refused(self, store: Store, key: bytes) -> None:
        with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
            store.put_many([b"a", key], [b"1", b"2"])
        for call in (store.get_many, store.contains_many, store.delete_many):
            with pytest.raises(ValueError, match=f"key of {len(key)} bytes"):
                call([b"a", key])
        assert store.get_many([b"a"]) == [None]

    def test_every_key_needs_a_value(self, store: Store) -> None:
        with pytest.raises(ValueError, match="2 keys and 1 values"):
            store.put_many([b"a", b"b"], [b"1"])
        assert store.get_many([b"a"]) == [None]

    @law
    @given(steps)
    def test_it_is_a_dictionary(self, calls: list[tuple[str, list[bytes]]]) -> None:
        with TemporaryDirectory() as folder:
            store, model = self.make_store(Path(folder) / "store"), dict[bytes, bytes]()
            for number, (name, keys) in enumerate(calls):
                if name == "put":
                    values = [content(number + i, SIZES[i]) for i in range(len(keys))]
                    assert store.put_many(keys, values).all()
                    model |= dict(zip(keys, values, strict=True))
                elif name == "delete":
                    expected = [key in model for key in keys]
                    assert store.delete_many(keys).tolist() == expected
                    model = {k: v for k, v in model.items() if k not in keys}
                elif name == "clear":
                    store.clear()
                    model = {}
                elif name == "reopen":
                    store.close()
                    store = self.make_store(Path(folder) / "store")
                assert store.get_many(keys) == [model.get(key) for key in keys]
                assert sorted(store.keys()) == sorted(model)
            store.close()


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
