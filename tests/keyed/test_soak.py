"""Many threads for long: every value that is read can have been there."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from keyed_stores import content, open_store

from tierstore.errors import CapacityError
from tierstore.testing.faults import FaultIO, error
from tierstore.testing.history import History

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.keyed import KeyedStore

OPERATIONS = {"dev": 12_000, "ci": 30_000, "nightly": 1_000_000}[
    os.environ.get("HYPOTHESIS_PROFILE", "dev")
]
THREADS = 8

pytestmark = pytest.mark.timeout(3600)  # of a nightly run

KEYS = [b"key %d" % i for i in range(120)] + [b"long key " * 20 + b"%d" % i for i in range(8)]
PAYLOADS = [content(size, size) for size in (0, 3, 900, 4096, 5000, 17_000)]


class Traffic:
    """Random calls of some threads on one store, each checked against the others' history."""

    def __init__(self, store: KeyedStore) -> None:
        self.store = store
        self.history = History()
        self._number = 0
        self._lock = threading.Lock()

    def value(self, key: bytes, random: np.random.Generator) -> tuple[int, bytes]:
        """A number that no other put has, and a value that begins with it and the key."""
        with self._lock:
            self._number += 1
            number = self._number
        payload = PAYLOADS[random.integers(len(PAYLOADS))]
        return number, b"%d %s %s" % (number, key, payload)

    def number(self, key: bytes, value: bytes | None) -> int | None:
        """The number of a value, which must be whole and belong to its key."""
        if value is None:
            return None
        number, rest = value.split(b" ", 1)
        assert rest.startswith(key + b" "), f"a value of another key under {key!r}"
        assert rest[len(key) + 1 :] in PAYLOADS, f"a torn value under {key!r}"
        return int(number)

    def run(self, seed: int, count: int) -> None:
        """Make so many calls."""
        random = np.random.default_rng(seed)
        for _ in range(count):
            key = KEYS[min(int(random.exponential(30)), len(KEYS) - 1)]
            dice = random.integers(100)
            if dice < 35:
                self._put(key, random)
            elif dice < 40:
                with self.history.delete(key):
                    self.store.delete(key)
            elif dice < 45:
                self._lease(key)
            elif dice < 47:
                self._prefetch(random)
            elif dice < 48:
                self.store.touch_many(KEYS[:9])
            else:
                with self.history.get(key) as got:
                    got.value = self.number(key, self.store.get(key))

    def _put(self, key: bytes, random: np.random.Generator) -> None:
        number, value = self.value(key, random)
        with self.history.put(key, number) as put:
            put.is_refused = not self.store.put(key, value)

    def _lease(self, key: bytes) -> None:
        with (
            self.history.get(key) as got,
            self.store.lease(key, owner="soak", seconds=60) as lease,
        ):
            view = lease.values[0]
            before = None if view is None else bytes(view)
            got.value = self.number(key, before)
            assert view is None or bytes(view) == before, "a leased value changed"

    def _prefetch(self, random: np.random.Generator) -> None:
        try:
            self.store.prefetch([KEYS[i] for i in random.integers(0, len(KEYS), 5)])
        except CapacityError:  # enough of them wait
            return

    def run_all(self, count: int) -> None:
        """Make so many calls, in several threads."""
        with ThreadPoolExecutor(THREADS) as pool:
            each = count // THREADS
            for done in [pool.submit(self.run, seed, each) for seed in range(THREADS)]:
                done.result()
        self.history.check()


@pytest.mark.parametrize(
    "options",
    [{"dram": "160KiB", "threads": 4}, {"dram": None, "threads": 1}],
    ids=["memory and disk", "disk alone, one thread"],
)
def test_values_read_by_many_threads_can_have_been_there(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """D1 to D4."""
    with open_store(tmp_path / "s", disk="1MiB", **options) as store:
        traffic = Traffic(store)
        traffic.run_all(OPERATIONS // 2)
        counts, stats = traffic.history.counts, store.stats()
        assert counts["hit"] > OPERATIONS // 20
        assert counts["failed"] == 0
        assert stats.records + sum(stats.dropped.values()) == counts["put"]
        assert stats.leases == 0
        assert not store.volume.records.pins.any()
        store.validate()
        assert store.check() == []
        values = {key: value for key in KEYS if (value := store.get(key)) is not None}
    with open_store(tmp_path / "s", disk="1MiB") as again:
        assert {key: again.get(key) for key in values} == values
        assert set(again) == set(values)


def test_values_read_while_the_disk_fails_now_and_then_can_have_been_there(tmp_path: Path) -> None:
    """C5, C7, D1. And with syncs, of which some fail."""
    io = FaultIO(tmp_path, seed=1)
    with open_store(tmp_path / "s", disk="1MiB", dram="160KiB", io=io) as store:
        traffic, is_over = Traffic(store), threading.Event()

        def sync() -> int:
            failed = 0
            while not is_over.wait(0.01):
                try:
                    store.sync()
                except OSError:
                    failed += 1
            return failed

        io.inject("read", error(5), one_in=40)
        io.inject("write", error(5), one_in=60)
        io.inject("sync", error(5), one_in=30)
        with ThreadPoolExecutor(1) as pool:
            syncs = pool.submit(sync)
            try:
                traffic.run_all(OPERATIONS // 4)
            finally:
                is_over.set()
            syncs.result()
        io.heal()
        assert traffic.history.counts["hit"] > 100
        assert not store.volume.records.pins.any()
        store.validate()
