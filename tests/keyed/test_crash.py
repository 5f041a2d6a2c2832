"""Crashes at chosen moments: B5 and B9 to B12 of the list of faults.

A copy of the files of an open store is what a killed process leaves behind.
"""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Literal

import pytest
import raw_segments as raw

from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import FaultIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierstore.io import FileIO
    from tierstore.testing.faults import Call

SEGMENT = 64 << 10
DISK = (64 << 10) + 8 * SEGMENT
MIB = 1 << 20


def open_store(
    path: Path,
    *,
    io: FileIO | None = None,
    recovery: Literal["quiet", "strict"] = "quiet",
    dram: int | None = None,
    disk: int = DISK,
) -> KeyedStore:
    return KeyedStore(
        path, Identity(), disk=disk, segment=SEGMENT, io=io, recovery=recovery, dram=dram
    )


def kill(path: Path, name: str) -> Path:
    """What a process that has the store open leaves when it is killed now."""
    copy = path.parent / name
    shutil.copytree(path, copy)
    return copy


class Killed:
    """Copies of a store's files at each point that it reaches from now on."""

    def __init__(self, io: FaultIO, path: Path, kinds: str = "*") -> None:
        self.copies: list[Path] = []
        self._path = path
        self._fault = io.inject(kinds, self._copy)

    def _copy(self, _: Call) -> None:
        self.copies.append(kill(self._path, f"killed{len(self.copies)}"))


# B5: torn writes


def torn(path: Path, offset: int, old: bytes, new: bytes, sector: int, seed: int) -> bool:
    """Write any of the sectors that `new` touches; whether it is neither the old nor the new."""
    coin = random.Random(seed)
    content = bytearray(old)
    start = offset
    while start < offset + len(new):
        stop = min(offset + len(new), (start // sector + 1) * sector)
        if coin.random() < 0.5:
            content[start - offset : stop - offset] = new[start - offset : stop - offset]
        start = stop
    raw.write(path, offset, bytes(content))
    return bytes(content) not in (old, new)


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_payload_torn_at_a_sector_is_missed(sector: int, tmp_path: Path) -> None:
    """B5: of an extent that had another value before."""
    old, new = (random.Random(i).randbytes(12_000) for i in range(2))
    torn_ones = 0
    for seed in range(12):
        path = tmp_path / f"s{seed}"
        with open_store(path) as store:
            assert store.put_many([b"a", b"beside"], [old, old]).all()
            before = raw.live(path)[b"a"]
            store.delete(b"a")
            assert store.put(b"a", new)
            assert raw.live(path)[b"a"].payload_at == before.payload_at
            killed = kill(path, f"killed{seed}")
        file = raw.namespace(killed) / "segments" / before.path.name
        is_torn = torn(file, before.payload_at, old, new, sector, seed)
        torn_ones += is_torn
        with open_store(killed) as store:
            is_new = raw.read(file, before.payload_at, len(new)) == new
            assert store.get_many([b"a", b"beside"]) == [new if is_new else None, old]
            assert store.stats().dropped == ({} if is_new else {"corrupt": 1})
    assert torn_ones > 3


def test_a_table_torn_at_a_sector_loses_the_rows_across_it_alone(tmp_path: Path) -> None:
    """B5: rows of 96 bytes lie across sectors of 512."""
    path = tmp_path / "s"
    names = [b"key-%02d" % i for i in range(14)]
    with open_store(path) as store:
        assert store.put_many(names, names).all()
        file = next(iter(raw.live(path).values())).path
        old = raw.read(file, raw.PAGE, 4096)
        store.delete_many(names)
        assert store.put_many(names, [b"new " + key for key in names]).all()
        new = raw.read(file, raw.PAGE, 4096)
        for seed in range(12):
            killed = kill(path, f"killed{seed}")
            copy = raw.namespace(killed) / "segments" / file.name
            torn(copy, raw.PAGE, old, new, 512, seed)
            with open_store(killed) as again:
                for key, data in zip(names, again.get_many(names), strict=True):
                    assert data in (None, b"new " + key)
                again.validate()


def test_a_header_torn_at_a_sector_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """B5: all that is checked of it is in its first sector."""
    path = tmp_path / "s"
    with open_store(path, disk=(64 << 10) + SEGMENT) as store:
        assert store.put(b"small", b"1")
        (file,) = raw.segments(path)
        old = raw.read(file, 0, raw.PAGE)
        assert store.put(b"large", bytes(20_000))
        new = raw.read(file, 0, raw.PAGE)
        assert old[:512] != new[:512]
        for seed in range(4):
            killed = kill(path, f"killed{seed}")
            (copy,) = raw.segments(killed)
            torn(copy, 0, old, new, 512, seed)
            with open_store(killed, disk=(64 << 10) + SEGMENT) as again:
                assert again.get(b"small") is None
                assert again.get(b"large") in (None, bytes(20_000))
                assert again.put(b"b", b"2")


def test_a_torn_page_of_the_directory_costs_no_value(tmp_path: Path) -> None:
    """B5: halves of its pages from two syncs."""
    path = tmp_path / "s"
    names = [b"key-%03d" % i for i in range(80)]
    with open_store(path) as store:
        (file,) = path.glob("*/directory/data.mdb")
        assert store.put_many(names[:40], names[:40]).all()
        store.sync()
        old = file.read_bytes()
        assert store.put_many(names[40:], names[40:]).all()
        store.sync()
        new = file.read_bytes()
        for seed in range(12):
            killed = kill(path, f"killed{seed}")
            (copy,) = killed.glob("*/directory/data.mdb")
            torn(copy, 0, old.ljust(len(new), b"\0"), new, 512, seed)
            with open_store(killed) as again:
                assert again.get_many(names) == names


# B9: clear and delete


@pytest.mark.parametrize("number", range(3))
def test_a_clear_that_is_killed_clears_all_or_nothing_and_then_all_for_good(
    number: int, tmp_path: Path
) -> None:
    """B9: before the identity is replaced, after it, and when clear has returned."""
    path, io = tmp_path / "s", FaultIO(tmp_path / "s")
    names = [b"key-%d" % i for i in range(9)]
    with open_store(path, io=io) as store:
        assert store.put_many(names, names).all()
        killed = Killed(io, path, "reached")
        store.clear()
        io.heal()
        killed.copies.append(kill(path, "returned"))
    assert len(killed.copies) == 3
    is_clear = number > 0
    with open_store(killed.copies[number], recovery="strict") as store:
        assert store.get_many(names) == [None if is_clear else name for name in names]
        store.clear()
        assert store.put(names[0], b"new")
    with open_store(killed.copies[number], recovery="strict") as store:
        assert list(store.keys()) == names[:1]
        assert store.get(names[0]) == b"new"


def test_a_delete_that_is_killed_at_any_call_deletes_or_does_not_and_then_stays_so(
    tmp_path: Path,
) -> None:
    """B9: each key by itself; never after the delete was acknowledged."""
    path, io = tmp_path / "s", FaultIO(tmp_path / "s")
    names = [b"key-%d" % i for i in range(40)]
    with open_store(path, io=io) as store:
        assert store.put_many(names, names).all()
        store.sync()
        killed = Killed(io, path)
        assert store.delete_many(names[::2]).all()
        io.heal()
        killed.copies.append(kill(path, "returned"))
    assert len(killed.copies) > 2
    for copy in killed.copies:
        with open_store(copy, recovery="strict") as store:
            found = list(store.keys())
            assert store.get_many(names[1::2]) == names[1::2]
            assert set(found) <= set(names)
            store.delete_many(names[::2])
        with open_store(copy, recovery="strict") as store:
            assert sorted(store.keys()) == sorted(names[1::2])
    with open_store(killed.copies[-1]) as store:
        assert not store.contains_many(names[::2]).any()


def test_what_was_deleted_does_not_come_back_when_its_place_is_used_and_lost(
    tmp_path: Path,
) -> None:
    """B9: the row that said so gives way to another, which a torn write then takes away."""
    path = tmp_path / "s"
    with open_store(path) as store:
        assert store.put(b"a", b"old")
        store.sync()
        store.delete(b"a")
        assert store.put(b"b", b"new")
        record = raw.live(path)[b"b"]
        killed = kill(path, "killed")
    raw.flip(raw.namespace(killed) / "segments" / record.path.name, record.row_at, 3)
    with open_store(killed) as store:
        assert store.get_many([b"a", b"b"]) == [None, None]


# B10: memory in front of the disk


def test_of_two_copies_in_two_tiers_the_newest_wins_and_a_crash_keeps_it(tmp_path: Path) -> None:
    """B10: a value in memory gives way when the one on disk is replaced."""
    path = tmp_path / "s"
    with open_store(path, dram=MIB) as store:
        for version in range(20):
            data = b"version %d" % version
            assert store.put(b"a", data)
            assert store.get(b"a") == data
            assert store.get(b"a") == data
            with open_store(kill(path, f"killed{version}"), dram=MIB) as again:
                assert again.get(b"a") == data
        assert store.stats().hits["dram"] >= 20
        store.delete(b"a")
        assert store.get(b"a") is None
        with open_store(kill(path, "deleted"), dram=MIB) as again:
            assert again.get(b"a") is None


def test_a_crash_between_the_new_value_and_the_removal_of_the_old_keeps_one_of_them(
    tmp_path: Path,
) -> None:
    """B10, B12: at every call of an overwrite, both values are on disk for a while."""
    path, io = tmp_path / "s", FaultIO(tmp_path / "s")
    with open_store(path, io=io, dram=MIB) as store:
        assert store.put(b"a", b"old")
        store.sync()
        assert store.get(b"a") == b"old"
        killed = Killed(io, path)
        assert store.put(b"a", b"new")
        io.heal()
        killed.copies.append(kill(path, "returned"))
    found: list[bytes] = []
    for copy in killed.copies:
        with open_store(copy, dram=MIB, recovery="strict") as store:
            found.append(store.get(b"a") or b"")
            assert len(store) == 1
            assert store.delete(b"a")
        with open_store(copy, dram=MIB) as store:
            assert store.get(b"a") is None
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (b"old", b"new")


# B11: closing


@pytest.mark.parametrize("disk", [DISK, (64 << 10) + 2 * SEGMENT], ids=["roomy", "tight"])
def test_a_store_that_was_closed_opens_with_exactly_what_it_had(disk: int, tmp_path: Path) -> None:
    """B11: also after evictions; and what comes then is newer than all of it."""
    coin = random.Random(9)
    expected: dict[bytes, bytes] = {}
    highest = 0
    for _ in range(10):
        with open_store(tmp_path / "s", disk=disk, recovery="strict") as store:
            names = sorted(expected)
            assert store.get_many(names) == [expected[key] for key in names]
            assert len(store) == len(expected)
            assert store.stats().misses == store.stats().dropped == {}
            for _ in range(30):
                key = b"key-%d" % coin.randrange(40)
                data = coin.randbytes(coin.choice([1, 100, 5000, 20_000]))
                assert store.put(key, data)
                assert store.get(key) == data
                if coin.random() < 0.2:
                    store.delete(b"key-%d" % coin.randrange(40))
            names = list(store)
            found = store.get_many(names)
            expected = {key: data for key, data in zip(names, found, strict=True) if data}
            sequences = [record.row.sequence for record in raw.live(tmp_path / "s").values()]
            assert max(sequences) > highest
            highest = max(sequences)
    assert len(expected) > 2


# B12: overwriting


def both_on_disk(tmp_path: Path, number: int) -> Path:
    """A killed store with an old and a new record of a key, both live as their rows say."""
    path = tmp_path / f"s{number}"
    with open_store(path) as store:
        assert store.put(b"a", b"old %d" % number)
        old = raw.live(path)[b"a"]
        row = raw.read(old.path, old.row_at, raw.ROW_BYTES)
        for _ in range(number):
            assert store.put(b"beside", b"1")
        assert store.put(b"a", b"new %d" % number)
        copy = kill(path, f"killed{number}")
    raw.write(raw.namespace(copy) / "segments" / old.path.name, old.row_at, row)
    return copy


def test_of_two_live_records_of_a_key_only_the_newest_is_served(tmp_path: Path) -> None:
    """B12: also for those who only read, and not after it is deleted."""
    for number in range(5):
        copy = both_on_disk(tmp_path, number)
        records = [r for file in raw.segments(copy) for r in raw.rows(file)]
        live = [r for r in records if r.row.state == raw.LIVE and r.row.key[:1] == b"a"]
        assert len(live) == 2
        with KeyedStore(copy, Identity(), disk=DISK, read_only=True) as store:
            assert store.get(b"a") == b"new %d" % number
        with open_store(copy, recovery="strict") as store:
            assert store.get(b"a") == b"new %d" % number
            assert store.stats().dropped == {"superseded": 1}
            store.delete(b"a")
            deleted = kill(copy, f"deleted{number}")
        with open_store(deleted) as store:
            assert store.get(b"a") is None


def test_a_damaged_new_record_does_not_bring_the_old_one_back(tmp_path: Path) -> None:
    """B12: once the newest was seen, the older one is gone for good."""
    copy = both_on_disk(tmp_path, 2)
    with open_store(copy) as store:
        record = raw.live(copy)[b"a"]
        raw.flip(record.path, record.payload_at, 1)
        assert store.get(b"a") is None
    with open_store(copy) as store:
        assert store.get(b"a") is None


def at_every_call(operation: Callable[[KeyedStore], object], tmp_path: Path) -> list[Path]:
    tmp_path.mkdir()
    path, io = tmp_path / "s", FaultIO(tmp_path / "s")
    with open_store(path, io=io) as store:
        assert store.put_many([b"a", b"b"], [b"1", b"2"]).all()
        killed = Killed(io, path)
        operation(store)
        io.heal()
    return killed.copies


def test_a_sync_or_close_that_is_killed_at_any_call_loses_nothing(tmp_path: Path) -> None:
    """B2, B11: strictly, as the files are whole at every moment."""
    copies = at_every_call(lambda store: store.sync(), tmp_path / "sync")
    copies += at_every_call(lambda store: store.close(), tmp_path / "close")
    assert len(copies) > 4
    for copy in copies:
        with open_store(copy, recovery="strict") as store:
            assert store.get_many([b"a", b"b"]) == [b"1", b"2"]
