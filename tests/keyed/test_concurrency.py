"""Family D of the fault cases, where threads meet: D1 to D6, D9, D14."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from keyed_stores import Hang, content, open_store

from tierstore.admission import Admission
from tierstore.codecs import ShuffleZstdCodec
from tierstore.errors import CapacityError, PolicyError
from tierstore.testing.faults import FaultIO, error
from tierstore.volume.format import KeyFields

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tierstore.interfaces import Bytes
    from tierstore.keyed import KeyedStore

KEYS = [b"key %d" % i for i in range(8)]
VALUES = [content(i, 5000) for i in range(8)]


@pytest.fixture
def io(tmp_path: Path) -> FaultIO:
    return FaultIO(tmp_path)


@pytest.fixture(params=[0, 1, 16], ids=lambda threads: f"{threads} threads")
def store(tmp_path: Path, io: FaultIO, request: pytest.FixtureRequest) -> Iterator[KeyedStore]:
    """Eight values on disk, and room for some in memory. D14: with no, one and many threads."""
    with open_store(tmp_path / "s", io=io, dram="128KiB", threads=request.param) as store:
        store.put_many(KEYS, VALUES)
        yield store
        io.heal()
        if not store.is_closed:
            store.validate()


def started(call: object, *arguments: object) -> tuple[threading.Thread, list[object]]:
    """A thread that makes a call, and where its result comes."""
    results: list[object] = []
    thread = threading.Thread(
        target=lambda: results.append(call(*arguments)),  # type: ignore[operator]
        daemon=True,
    )
    thread.start()
    return thread, results


def finished(thread: threading.Thread) -> None:
    thread.join(60)
    assert not thread.is_alive(), "a thread hangs"


class TestRaces:
    def test_a_value_that_is_evicted_while_it_is_read_is_right(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D1."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        reader, results = started(store.get, KEYS[0])
        hang.wait()
        for number in range(40):
            store.put(b"x %d" % number, bytes(16_000))
        hang.release()
        finished(reader)
        assert results == [VALUES[0]]
        assert store.get(KEYS[0]) in (None, VALUES[0])

    def test_a_value_that_is_replaced_while_it_is_read_is_the_old_one_and_not_kept(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D1, D3. The late copy of the old value must not hide the new one."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        reader, results = started(store.get, KEYS[0])
        hang.wait()
        assert store.put(KEYS[0], b"new")
        hang.release()
        finished(reader)
        assert results == [VALUES[0]]
        assert store.get(KEYS[0]) == b"new"
        assert store.get(KEYS[0]) == b"new"

    def test_a_value_that_is_deleted_while_it_is_loaded_stays_away(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D2."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        reader, results = started(store.get, KEYS[0])
        hang.wait()
        assert store.delete(KEYS[0])
        hang.release()
        finished(reader)
        assert results == [VALUES[0]]
        assert store.get(KEYS[0]) is None
        assert KEYS[0] not in store
        store.close()
        with open_store(store_path(store)) as again:
            assert again.get(KEYS[0]) is None

    def test_a_value_that_is_deleted_while_it_is_prefetched_stays_away(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D2."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        prefetch = store.prefetch([KEYS[0]])
        hang.wait()
        store.delete(KEYS[0])
        hang.release()
        assert prefetch.wait(60)
        assert store.get(KEYS[0]) is None

    def test_a_store_cleared_during_a_read_and_a_put_is_empty(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D2."""
        reading, writing = Hang(), Hang()
        io.inject("read", reading.effect, nth=1)
        reader, _ = started(store.get, KEYS[0])
        reading.wait()
        io.heal()
        io.inject("write", writing.effect, nth=1)
        writer, _ = started(store.put, b"new", VALUES[1])
        writing.wait()
        store.clear()
        reading.release()
        writing.release()
        finished(reader)
        finished(writer)
        assert store.get_many([*KEYS, b"new"]) == [None] * 9
        assert len(store) == 0
        assert store.put_many(KEYS, VALUES).all()
        assert store.get_many(KEYS) == VALUES

    def test_of_two_puts_of_a_key_the_one_that_began_last_wins(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D3. The earlier one is held up and arrives last."""
        store.put(b"small", b"so that there is a file for small values")
        hang = Hang()
        io.inject("write", hang.effect, nth=1)
        writer, results = started(store.put, KEYS[0], b"earlier")
        hang.wait()
        assert store.put(KEYS[0], b"later")
        hang.release()
        finished(writer)
        assert results == [True]
        assert store.get(KEYS[0]) == b"later"
        assert store.stats().dropped["superseded"] == 1
        store.close()
        with open_store(store_path(store)) as again:
            assert again.get(KEYS[0]) == b"later"

    def test_a_put_that_is_under_way_wins_over_an_old_value_that_only_moves(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D3. The old value's file fails to sync, so what is in it is written again elsewhere."""
        store.put(b"small", b"so that there is a file for small values")
        store.sync()
        store.put(KEYS[1], VALUES[1])
        hang = Hang()
        io.inject("write", hang.effect, nth=1)
        writer, results = started(store.put, KEYS[0], b"new")
        hang.wait()
        old = store.volume.files.of(int(store.volume.records.find(KeyFields(KEYS[:1]))[0]))
        io.inject("sync", error(errno.EIO), name=os.path.basename(old.path), nth=1)
        with pytest.raises(OSError, match="could not be synced"):
            store.sync()
        assert store.get(KEYS[0]) == VALUES[0]
        hang.release()
        finished(writer)
        assert results == [True]
        assert store.get(KEYS[0]) == b"new"

    def test_a_put_while_others_evict_is_whole(self, store: KeyedStore, io: FaultIO) -> None:
        """D1."""
        store.put(b"x", bytes(16_000))  # so that there is a file for values of this size
        hang = Hang()
        io.inject("write", hang.effect, nth=1)
        writer, results = started(store.put, b"slow", content(7, 16_000))
        hang.wait()
        for number in range(40):
            store.put(b"x %d" % number, bytes(16_000))
        hang.release()
        finished(writer)
        assert results == [True]
        assert store.get(b"slow") == content(7, 16_000)

    def test_a_file_that_is_given_up_while_it_is_read_is_a_miss_or_right(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """D1. The reader has found its value, and its file is replaced before it reads."""
        keys = [b"%d" % i for i in range(200)]
        with open_store(tmp_path / "s", io=io, disk="4MiB", segment="256KiB") as store:
            store.put_many(keys, [content(i, 900) for i in range(200)])
            store.sync()
            store.put_many(keys[:1], [content(0, 900)])
            hang = Hang()
            io.inject("read", hang.effect, nth=1)
            reader, results = started(store.get_many, keys)
            hang.wait()
            io.inject("sync", error(errno.EIO))
            with pytest.raises(OSError, match="could not be synced"):
                store.sync()
            io.heal()
            hang.release()
            finished(reader)
            (values,) = results
            assert isinstance(values, list)
            for i, value in enumerate(values):
                assert value is None or value == content(i, 900)
            assert store.get_many(keys) == [content(i, 900) for i in range(200)]
            store.validate()


def store_path(store: KeyedStore) -> Path:
    return Path(store.volume.directory).parent


class TestSingleFlight:
    def test_a_hundred_threads_read_a_value_once(self, store: KeyedStore, io: FaultIO) -> None:
        """D4."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        before = io.counts["read"]
        readers = [started(store.get, KEYS[0]) for _ in range(100)]
        hang.wait()
        wait_for_waiting(store, 99)
        hang.release()
        for reader, _ in readers:
            finished(reader)
        assert [results for _, results in readers] == [[VALUES[0]]] * 100
        assert io.counts["read"] - before == 1

    def test_if_the_read_fails_everybody_misses(self, store: KeyedStore, io: FaultIO) -> None:
        """D4."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        io.inject("read", error(errno.EIO), nth=1)
        readers = [started(store.get, KEYS[0]) for _ in range(20)]
        hang.wait()
        wait_for_waiting(store, 19)
        hang.release()
        for reader, _ in readers:
            finished(reader)
        assert [results for _, results in readers] == [[None]] * 20
        assert store.stats().misses == {"io": 20}
        assert store.get(KEYS[0]) == VALUES[0]

    def test_who_waits_longer_than_the_reader_reads_again(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """D5. The one that reads gives up at its deadline; the other has none."""
        with open_store(tmp_path / "s", io=io) as store:
            store.put_many(KEYS, VALUES)
            hang = Hang()
            io.inject("read", hang.effect, nth=1)
            first, early = started(lambda: store.get(KEYS[0], deadline=1))
            hang.wait()
            second, late = started(store.get, KEYS[0])
            wait_for_waiting(store, 1)
            finished(first)
            finished(second)
            hang.release()
            assert (early, late) == ([None], [VALUES[0]])
            assert not store.volume.records.pins.any()

    def test_who_gives_up_earlier_leaves_the_others_alone(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """D5."""
        with open_store(tmp_path / "s", io=io) as store:
            store.put_many(KEYS, VALUES)
            hang = Hang()
            io.inject("read", hang.effect, nth=1)
            first, results = started(store.get, KEYS[0])
            hang.wait()
            assert store.get(KEYS[0], deadline=0.05) is None
            hang.release()
            finished(first)
            assert results == [VALUES[0]]
            assert not store.volume.records.pins.any()
            assert store.stats().misses == {"deadline": 1}

    def test_a_key_given_twice_in_one_call_is_read_once(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """D4."""
        before = io.counts["read"]
        assert store.get_many([KEYS[0], KEYS[0], KEYS[0]]) == [VALUES[0]] * 3
        assert io.counts["read"] - before == 1


def wait_for_waiting(store: KeyedStore, count: int) -> None:
    """Until so many threads wait for a load that another one does."""
    for _ in range(60_000):
        with store.volume.lock:
            waiting = sum(load.waiting for load in store._loader._loads.values())
        if waiting >= count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{waiting} threads wait, not {count}")


class TestLeased:
    def test_a_put_is_refused_while_everything_is_leased(self, store: KeyedStore) -> None:
        """D6."""
        large = [b"x %d" % i for i in range(30)]
        store.put_many(large, [bytes(16_000)] * 30)
        there = [key for key in [*KEYS, *large] if key in store]
        lease = store.lease_many(there, owner="test", seconds=1000)
        before = [bytes(view) for view in lease.values if view is not None]
        no_room = store.stats().refused.get("no room", 0)
        for number in range(3):
            assert not store.put(b"y %d" % number, bytes(16_000))
        assert store.stats().refused == {"no room": no_room, "all pinned": 3}
        assert [bytes(view) for view in lease.values if view is not None] == before
        assert store.contains_many(there).all()
        with pytest.raises(CapacityError, match="release leases first"):
            store.resize(disk="192KiB")
        lease.release()
        assert store.put(b"y", bytes(16_000))
        store.resize(disk="192KiB")
        assert store.stats().disk_bytes <= 192 << 10

    def test_a_put_is_refused_while_everything_that_was_cleared_is_leased(
        self, store: KeyedStore
    ) -> None:
        """D6."""
        store.clear()
        large = [b"x %d" % i for i in range(30)]
        store.put_many(large, [bytes(16_000)] * 30)
        lease = store.lease_many(list(store.keys()), owner="test", seconds=1000)
        store.clear()
        before = store.stats().refused
        assert not store.put(b"y", bytes(16_000))
        assert store.stats().refused == {**before, "all pinned": 1}
        lease.release()
        assert store.put(b"y", bytes(16_000))

    def test_a_batch_larger_than_the_store_has_no_room(self, store: KeyedStore) -> None:
        """D6. Nobody holds anything: waiting for a release would be in vain."""
        large = [b"x %d" % i for i in range(30)]
        done = store.put_many(large, [bytes(16_000)] * 30)
        assert store.stats().refused == {"no room": int((~done).sum())}

    def test_a_leased_value_stays_when_it_is_replaced_deleted_or_cleared(
        self, store: KeyedStore
    ) -> None:
        """D6."""
        lease = store.lease_many(KEYS, owner="test", seconds=1000)
        store.put(KEYS[0], b"new")
        store.delete(KEYS[1])
        store.clear()
        for number in range(40):
            store.put(b"x %d" % number, content(number, 16_000))
        assert [bytes(view) for view in lease.values if view is not None] == VALUES
        lease.release()
        assert not store.volume.records.pins.any()
        store.put_many(KEYS, VALUES)
        assert store.get_many(KEYS) == VALUES


class Nonsense(Admission):
    """Does what it is told to do wrong."""

    answer: object = None

    def admit(
        self,
        fingerprints: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.int64],
        now: float,
    ) -> npt.NDArray[np.bool_]:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            return np.ones(len(sizes), np.bool_)
        return self.answer  # type: ignore[return-value]


class Unruly(ShuffleZstdCodec):
    """A codec that raises, or returns what is not bytes."""

    encoded: object = None
    decoded: Exception | None = None

    def encode(self, blocks: Bytes) -> Bytes:
        if isinstance(self.encoded, Exception):
            raise self.encoded
        return super().encode(blocks) if self.encoded is None else self.encoded  # type: ignore[return-value]

    def decode(self, stored: Bytes, out: Bytes) -> None:
        if self.decoded is not None:
            raise self.decoded
        super().decode(stored, out)


class TestPlugIns:
    @pytest.mark.parametrize(
        "answer",
        [
            RuntimeError("broken"), np.ones(3, np.bool_), np.ones(1, np.int64), [[True]], "yes",
            np.ones((1, 1), np.bool_),
        ],
        ids=repr,
    )  # fmt: skip
    def test_an_admission_policy_that_breaks_its_contract_is_named(
        self, tmp_path: Path, answer: object
    ) -> None:
        """D9."""
        policy = Nonsense()
        with open_store(tmp_path / "s", admission=policy) as store:
            assert store.put(b"a", b"1")
            policy.answer = answer
            with pytest.raises(PolicyError, match=r"Nonsense\.admit (raised|returned)"):
                store.put(b"b", b"2")
            policy.answer = None
            assert store.get_many([b"a", b"b"]) == [b"1", None]
            assert store.put(b"b", b"2")
            store.validate()

    @pytest.mark.parametrize(
        "coded", [RuntimeError("broken"), b"bytes", np.zeros(3), np.zeros((1, 3), np.uint8)],
        ids=repr,
    )  # fmt: skip
    def test_a_codec_that_breaks_its_contract_is_named(self, tmp_path: Path, coded: object) -> None:
        """D9, D10."""
        codec = Unruly()
        with open_store(tmp_path / "s", codec=codec) as store:
            assert store.put(b"a", b"1")
            codec.encoded = coded
            with pytest.raises(PolicyError, match=r"Unruly\.encode (raised|returned)"):
                store.put(b"a", b"2")
            codec.encoded = None
            assert store.get(b"a") == b"1"
            store.validate()
            assert store.put(b"a", b"2")

    def test_a_codec_that_raises_when_it_decodes_leaves_nothing_held(self, tmp_path: Path) -> None:
        """D9. Not even for those that wait for the same value."""
        codec = Unruly()
        with open_store(tmp_path / "s", codec=codec, dram="128KiB") as store:
            store.put_many(KEYS, VALUES)
            free = store._loader._staging.free
            codec.decoded = RuntimeError("broken")
            with pytest.raises(PolicyError, match=r"Unruly\.decode raised RuntimeError"):
                store.get_many(KEYS)
            with pytest.raises(PolicyError, match=r"Unruly\.decode"):
                store.lease_many(KEYS, owner="test", seconds=1)
            assert store.prefetch(KEYS).wait(60)
            codec.decoded = None
            assert not store.volume.records.pins.any()
            assert store._loader._staging.free == free
            assert store.prefetch(KEYS).wait(60)
            assert store.stats().hits["disk"] >= 8
            assert store.get_many(KEYS) == VALUES


class TestTraffic:
    @pytest.mark.parametrize("threads", [0, 1, 16])
    def test_many_threads_at_once_see_whole_values(self, tmp_path: Path, threads: int) -> None:
        """D1, D14. Each value says under which key it belongs."""
        keys = [b"k%d" % i for i in range(40)]

        def value(key: bytes, seed: int) -> bytes:
            return key + b"." + content(seed, 50 + 997 * (seed % 9))

        def use(store: KeyedStore, thread: int) -> int:
            random, seen = np.random.default_rng(thread), 0
            for step in range(60):
                key = keys[random.integers(len(keys))]
                if step % 3 == 0:
                    store.put(key, value(key, int(random.integers(1000))))
                elif step % 17 == 0:
                    store.delete(key)
                elif (found := store.get(key)) is not None:
                    assert found.startswith(key + b".")
                    seen += 1
                if step % 25 == 24:
                    store.sync()
            return seen

        with (
            open_store(tmp_path / "s", disk="256KiB", dram="128KiB", threads=threads) as store,
            ThreadPoolExecutor(8) as pool,
        ):
            assert sum(pool.map(use, [store] * 8, range(8))) > 0
            store.validate()
            stats = store.stats()
            assert stats.records == len(list(store.keys()))
            assert not store.volume.records.pins.any()
