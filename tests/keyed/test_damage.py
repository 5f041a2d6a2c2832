"""Stored bytes that are not what was stored: A1 to A18 of the list of faults.

Files are changed behind the store's back, as tests/raw_segments.py understands them. Whatever is
changed: no value is other than it was put, what was not touched is there, and losses are counted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import lmdb
import numpy as np
import pytest
import raw_segments as raw
import zstandard
from fork_server import ForkServer

from tierstore.codecs import Int8Codec, ShuffleZstdCodec
from tierstore.errors import CorruptBlockError, StoreMismatchError
from tierstore.identity import Facts, Identity
from tierstore.io import FileIO
from tierstore.kernels import keys as kernels
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import FaultIO, damaged, error
from tierstore.volume.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.interfaces import Codec

MIB = 1 << 20
KIB = 1 << 10
ANYBODY = Identity()
BITS_OF_A_ROW = 8 * raw.ROW_BYTES
BITS_OF_A_HEADER = 8 * raw.CHECKED_HEADER_BYTES


def open_store(
    path: Path,
    *,
    segments: int = 1,
    segment: int = MIB,
    identity: Identity = ANYBODY,
    codec: Codec | None = None,
    dram: int | None = None,
    io: FileIO | None = None,
    recovery: Literal["quiet", "strict"] = "quiet",
    verify: Literal["reads", "always"] = "reads",
) -> KeyedStore:
    return KeyedStore(
        path, identity, disk=64 * KIB + segments * segment, segment=segment, codec=codec, dram=dram,
        io=io, recovery=recovery, verify=verify,
    )  # fmt: skip


def value_of(key: bytes) -> bytes:
    """Three times the key: what `kill_child.visit` expects too."""
    return key * 3


def keys(count: int) -> list[bytes]:
    return [b"key-%05d" % i for i in range(count)]


def fill(
    path: Path,
    names: list[bytes],
    *,
    segments: int = 1,
    segment: int = MIB,
    identity: Identity = ANYBODY,
    codec: Codec | None = None,
) -> None:
    with open_store(
        path, segments=segments, segment=segment, identity=identity, codec=codec
    ) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()


def rows_speak_for_themselves(path: Path) -> None:
    """Take the directory away, which knows the tables as they were."""
    shutil.rmtree(raw.namespace(path) / "directory")


def assert_found(store: KeyedStore, names: list[bytes]) -> None:
    assert store.get_many(names) == [value_of(key) for key in names]


def assert_missed(store: KeyedStore, names: list[bytes]) -> None:
    assert store.get_many(names) == [None] * len(names)


def apart(path: Path, count: int) -> list[raw.Record]:
    """A closed store of one record in each of so many files; the records, by number of the file."""
    with open_store(path, segments=count, segment=16 * KIB) as store:
        for key in keys(count):
            # Each fills the extents of a file, so that the next one goes elsewhere.
            assert store.put(key, value_of(key).ljust(8 * KIB, b"."))
    return [next(raw.rows(file)) for file in raw.segments(path)]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


# A1: payloads


def test_every_single_bit_of_a_payload_is_missed_when_it_flips(tmp_path: Path) -> None:
    """A1: one record for each bit; the one after it is its intact neighbour."""
    bits = 8 * len(value_of(keys(1)[0]))
    names = keys(2 * bits)
    hit, spared = names[::2], names[1::2]
    with open_store(tmp_path / "s", segments=4) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()
        records = raw.live(tmp_path / "s")
        for bit, key in enumerate(hit):
            raw.flip(records[key].path, records[key].payload_at, bit)
        assert_found(store, spared)
        assert_missed(store, hit)
        assert store.stats().dropped == {"corrupt": bits}
        assert store.stats().misses == {"corrupt": bits}
        assert len(store) == len(spared)
        store.validate()
        assert_missed(store, hit)
        assert store.stats().misses == {"corrupt": bits, "absent": bits}
        assert store.put_many(hit, [value_of(key) for key in hit]).all()
        assert_found(store, names)


def test_every_single_bit_of_a_long_key_is_missed_when_it_flips(tmp_path: Path) -> None:
    """A1: what does not fit into a row follows the value, and is read when the store opens."""
    bits = 8 * 60
    names = [key.ljust(60, b"x") for key in keys(2 * bits)]
    hit, spared = names[::2], names[1::2]
    fill(tmp_path / "s", names, segments=5)
    for bit, record in enumerate(by_number(tmp_path / "s")[::2]):
        raw.flip(record.path, record.payload_at + record.row.stored_bytes, bit)
    with open_store(tmp_path / "s", segments=5) as store:
        assert_found(store, spared)
        assert_missed(store, hit)
        assert sorted(store.keys()) == spared
        assert store.stats().dropped == {"damaged key": bits}
        store.validate()


def by_number(path: Path) -> list[raw.Record]:
    """Live records in the order of their keys."""
    return [record for _, record in sorted(raw.live(path).items())]


def test_bits_behind_a_payload_mean_nothing(tmp_path: Path) -> None:
    """A1: the rest of an extent is nobody's."""
    fill(tmp_path / "s", keys(2))
    record = raw.live(tmp_path / "s")[keys(2)[0]]
    for bit in (0, 7, 800):
        raw.flip(record.path, record.payload_at + record.row.stored_bytes, bit)
    with open_store(tmp_path / "s") as store:
        assert_found(store, keys(2))
        assert store.stats().dropped == {}


# A2: rows, headers, the identity


def test_every_single_bit_of_a_row_is_dropped_when_it_flips(tmp_path: Path) -> None:
    """A2: sequence, checksum, lengths, codec, state, key and the check itself."""
    names = keys(2 * BITS_OF_A_ROW)
    hit, spared = names[::2], names[1::2]
    fill(tmp_path / "s", names, segments=8)
    records = raw.live(tmp_path / "s")
    for bit, key in enumerate(hit):
        raw.flip(records[key].path, records[key].row_at, bit)
    tracemalloc.start()
    with open_store(tmp_path / "s", segments=8) as store:
        assert_missed(store, hit)
        assert_found(store, spared)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        tracemalloc.stop()
        assert store.stats().dropped == {"damaged row": BITS_OF_A_ROW}
        assert sorted(store.keys()) == spared
        store.validate()
    with open_store(tmp_path / "s", segments=8, recovery="strict") as store:
        assert_found(store, spared)
        assert len(store) == len(spared)


@pytest.mark.parametrize("part", range(6))
def test_every_single_bit_of_a_header_empties_its_file_alone_when_it_flips(
    part: int, tmp_path: Path
) -> None:
    """A2: magic, version, identity, epoch, number, generation, sizes and their checksum."""
    bits = BITS_OF_A_HEADER // 6
    records = apart(tmp_path / "s", 2 * bits)
    names = [record.row.key[: record.row.key_bytes] for record in records]
    for i, record in enumerate(records[::2]):
        raw.flip(record.path, 0, part * bits + i)
    with open_store(tmp_path / "s", segments=2 * bits, segment=16 * KIB) as store:
        assert_missed(store, names[::2])
        assert store.get_many(names[1::2]) == [
            value_of(key).ljust(8 * KIB, b".") for key in names[1::2]
        ]
        assert store.stats().dropped == {"damaged segment header": bits}
        store.validate()


def test_every_single_bit_of_the_identity_shows_when_it_flips(tmp_path: Path) -> None:
    """A2: the file is never taken for that of another store, epoch or size."""
    facts = Facts(Identity("model", "weights", "float16", "kv", (2, 16), "me"), 7, MIB)
    text = facts.encode()
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        assert Facts.decode(bytes(changed), "here") in (None, facts)


def test_a_damaged_identity_is_found_again_in_the_files(tmp_path: Path) -> None:
    """A2: one bit of each byte of the file; the values are there, and so is the new file."""
    fill(tmp_path / "s", keys(3))
    with open_store(tmp_path / "s") as store:
        store.clear()
        assert store.put_many(keys(2), [value_of(key) for key in keys(2)]).all()
    file = raw.namespace(tmp_path / "s") / "IDENTITY"
    text = file.read_bytes()
    for at in range(0, len(text) - 1, 3):
        raw.flip(file, at, at % 8)
        with open_store(tmp_path / "s", segment=MIB) as store:
            assert_found(store, keys(2))
            assert_missed(store, keys(3)[2:])
            assert store.stats().dropped == {"damaged identity": 1}
        assert file.read_bytes() == text


def test_a_damaged_identity_of_an_empty_store_costs_no_disk(tmp_path: Path) -> None:
    """A2: files without records still say how large they are."""
    open_store(tmp_path / "s", segments=3, segment=64 * KIB).close()
    raw.flip(raw.namespace(tmp_path / "s") / "IDENTITY", 5, 1)
    with KeyedStore(tmp_path / "s", Identity(), disk=64 * KIB + 3 * 64 * KIB) as store:
        assert store.put(b"a", b"1")
        assert len(raw.segments(tmp_path / "s")) == 3


@pytest.mark.parametrize("name", ["stored_bytes", "value_bytes", "key_bytes"])
@pytest.mark.parametrize("codec", [None, ShuffleZstdCodec()])
def test_a_length_that_cannot_be_claims_no_memory(
    name: str, codec: ShuffleZstdCodec | None, tmp_path: Path
) -> None:
    """A2: even under checksums that are right."""
    most = 65535 if name == "key_bytes" else (1 << 32) - 1
    fill(tmp_path / "s", keys(2), codec=codec)
    record = raw.live(tmp_path / "s")[keys(2)[0]]
    payload = raw.read(record.path, record.payload_at, record.disk_bytes)
    row = {
        "stored_bytes": record.row._replace(stored_bytes=most),
        "value_bytes": record.row._replace(value_bytes=most),
        "key_bytes": record.row._replace(key_bytes=most),
    }
    raw.seal(record, row[name], payload)
    rows_speak_for_themselves(tmp_path / "s")
    tracemalloc.start()
    with open_store(tmp_path / "s", codec=codec) as store:
        assert_missed(store, keys(2)[:1])
        assert_found(store, keys(2)[1:])
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        tracemalloc.stop()
        assert sum(store.stats().dropped.values()) == 1


# A3: lost sectors


def lose(path: Path, offset: int, size: int, fill_byte: int) -> None:
    raw.write(path, offset, bytes([fill_byte]) * size)


SECTORS = [(offset, 512) for offset in [*range(0, 12 * KIB, 512), *range(12 * KIB, 64 * KIB, 3584)]]
PAGES = [(offset, 4 * KIB) for offset in range(0, 64 * KIB, 4 * KIB)]


@pytest.mark.parametrize("fill_byte", [0x00, 0xFF])
def test_a_lost_sector_costs_what_was_in_it_and_nothing_else(
    fill_byte: int, tmp_path: Path
) -> None:
    """A3: every sector of header and rows, some of the payloads, and every page."""
    names = keys(60)
    fill(tmp_path / "s", names, segments=8, segment=64 * KIB)
    records = raw.live(tmp_path / "s")
    file = records[names[0]].path
    whole = file.read_bytes()
    for offset, size in SECTORS + PAGES:
        before = whole[offset : offset + size]
        lost = {
            key
            for key, record in records.items()
            if record.path == file
            and (
                offset < raw.CHECKED_HEADER_BYTES
                or overlaps(offset, size, record.row_at, raw.ROW_BYTES)
                or overlaps(offset, size, record.payload_at, record.disk_bytes)
            )
        }
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
        copied = raw.namespace(tmp_path / "copy") / "segments" / file.name
        lose(copied, offset, size, fill_byte)
        is_changed = raw.read(copied, offset, size) != before
        with open_store(tmp_path / "copy", segments=8, segment=64 * KIB) as store:
            assert_missed(store, sorted(lost))
            assert_found(store, sorted(set(names) - lost))
            assert bool(store.stats().dropped) == (bool(lost) and is_changed)
            store.validate()
        shutil.rmtree(tmp_path / "copy")


def overlaps(first: int, size: int, other: int, other_size: int) -> bool:
    return first < other + other_size and other < first + size


# A4: valid records in the wrong place or of the wrong time


def test_payloads_that_changed_places_are_missed(tmp_path: Path) -> None:
    """A4: two writes that went to each other's places."""
    fill(tmp_path / "s", keys(3))
    one, two, _ = by_number(tmp_path / "s")
    payloads = [raw.read(r.path, r.payload_at, r.disk_bytes) for r in (one, two)]
    raw.write(one.path, one.payload_at, payloads[1])
    raw.write(two.path, two.payload_at, payloads[0])
    with open_store(tmp_path / "s") as store:
        assert_missed(store, keys(2))
        assert_found(store, keys(3)[2:])
        assert store.stats().dropped == {"corrupt": 2}


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "when it opens"])
def test_a_record_in_the_place_of_another_is_missed(is_open: bool, tmp_path: Path) -> None:
    """A4: row and payload together went to another extent of the file."""
    fill(tmp_path / "s", keys(3))
    source, target, _ = by_number(tmp_path / "s")
    store = open_store(tmp_path / "s")
    if not is_open:
        store.close()
    raw.write(target.path, target.row_at, raw.read(source.path, source.row_at, raw.ROW_BYTES))
    payload = raw.read(source.path, source.payload_at, source.disk_bytes)
    raw.write(target.path, target.payload_at, payload)
    if not is_open:
        store = open_store(tmp_path / "s")
    with store:
        assert_found(store, [keys(3)[0], keys(3)[2]])
        assert_missed(store, keys(3)[1:2])
        assert store.stats().dropped == {"corrupt" if is_open else "damaged row": 1}


def test_a_record_from_another_file_is_missed(tmp_path: Path) -> None:
    """A4: the same extent, of the file beside it."""
    records = apart(tmp_path / "s", 2)
    for at, size in ((records[0].row_at, raw.ROW_BYTES), (records[0].payload_at, 8 * KIB)):
        raw.write(records[1].path, at, raw.read(records[0].path, at, size))
    with open_store(tmp_path / "s", segments=2, segment=16 * KIB) as store:
        there = [store.contains(record.row.key[:9]) for record in records]
        assert there == [True, False]
        assert store.stats().dropped == {"damaged row": 1}


def test_a_record_of_another_store_is_missed(tmp_path: Path) -> None:
    """A4: the same place in a file of another tenant."""
    mine, yours = Identity(tenant="me"), Identity(tenant="you")
    fill(tmp_path / "mine", keys(2), identity=mine)
    fill(tmp_path / "yours", keys(2), identity=yours)
    source, target = by_number(tmp_path / "yours")[0], by_number(tmp_path / "mine")[0]
    raw.write(target.path, target.row_at, raw.read(source.path, source.row_at, raw.ROW_BYTES))
    with open_store(tmp_path / "mine", identity=mine) as store:
        assert_missed(store, keys(2)[:1])
        assert_found(store, keys(2)[1:])


def test_a_file_of_another_store_is_refused(tmp_path: Path) -> None:
    """A4: nothing is guessed from it, and nothing in it is changed."""
    mine, yours = Identity(tenant="me"), Identity(tenant="you")
    fill(tmp_path / "mine", keys(2), identity=mine)
    fill(tmp_path / "yours", keys(2), identity=yours)
    file = raw.segments(tmp_path / "mine")[0]
    shutil.copy(raw.segments(tmp_path / "yours")[0], file)
    before = file.read_bytes()
    with pytest.raises(StoreMismatchError, match="belongs to another store"):
        open_store(tmp_path / "mine", identity=mine)
    assert file.read_bytes() == before


def test_an_older_payload_in_its_own_place_is_missed(tmp_path: Path) -> None:
    """A4: the disk lost a write, and still has what the extent held before."""
    with open_store(tmp_path / "s") as store:
        assert store.put(b"a", b"old")
        old = raw.live(tmp_path / "s")[b"a"]
        before = raw.read(old.path, old.payload_at, 4 * KIB)
        store.delete(b"a")
        assert store.put(b"a", b"new")
        assert raw.live(tmp_path / "s")[b"a"].payload_at == old.payload_at
        raw.write(old.path, old.payload_at, before)
        assert store.get(b"a") is None
        assert store.stats().dropped["corrupt"] == 1


def stale(path: Path, size: Callable[[raw.Record], int]) -> None:
    """A closed store, of whose first file the beginning is as it was before `b` was deleted."""
    with open_store(path) as store:
        assert store.put_many([b"a", b"b"], [value_of(b"a"), value_of(b"b")]).all()
        store.sync()
        record = raw.live(path)[b"b"]
        before = raw.read(record.path, 0, size(record))
        store.delete(b"b")
    raw.write(record.path, 0, before)


def test_a_table_that_is_older_than_the_directory_brings_nothing_back(tmp_path: Path) -> None:
    """A4: a write of rows that the disk acknowledged and lost, seen when the store opens."""
    stale(tmp_path / "s", lambda record: record.payload_at)
    with open_store(tmp_path / "s") as store:
        assert store.get(b"b") is None
        assert store.stats().dropped["stale table"] == 1
        assert store.put(b"c", value_of(b"c"))
        # What a kill leaves behind is what is in the files now.
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    with open_store(tmp_path / "killed") as store:
        assert store.get(b"b") is None
        assert_found(store, [b"c"])


def test_a_file_from_before_it_was_used_anew_brings_nothing_back(tmp_path: Path) -> None:
    """A4: header and table of an earlier generation, both valid."""
    with open_store(tmp_path / "s", segment=64 * KIB) as store:
        assert store.put_many(keys(3), [value_of(key) for key in keys(3)]).all()
        store.sync()
        (file,) = raw.segments(tmp_path / "s")
        before = file.read_bytes()
        assert store.put(b"large", bytes(20 * KIB))  # the only file changes its extent size
        assert_missed(store, keys(3))
    file.write_bytes(before)
    with open_store(tmp_path / "s", segment=64 * KIB) as store:
        assert_missed(store, [*keys(3), b"large"])
        assert store.stats().dropped == {"stale segment header": 1}
        shutil.copytree(tmp_path / "s", tmp_path / "killed")
    for folder in ("s", "killed"):
        with open_store(tmp_path / folder, segment=64 * KIB) as store:
            assert_missed(store, keys(3))


# A5 to A9: files that are cut, gone, too long, or unknown


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "when it opens"])
def test_a_file_cut_inside_a_record_loses_that_one_and_those_behind_it(
    is_open: bool, tmp_path: Path
) -> None:
    """A5."""
    for cut_at in range(6):
        path = tmp_path / f"s{cut_at}"
        fill(path, keys(6))
        records = by_number(path)
        store = open_store(path)
        if not is_open:
            store.close()
        os.truncate(records[cut_at].path, records[cut_at].payload_at + 5)
        if not is_open:
            store = open_store(path)
        with store:
            assert_found(store, keys(6)[:cut_at])
            assert_missed(store, keys(6)[cut_at:])
            assert store.stats().misses.get("absent", 0) == 0
        with open_store(path) as store:
            assert_found(store, keys(6)[:cut_at])
            assert_missed(store, keys(6)[cut_at:])
            assert os.path.getsize(records[0].path) == MIB


def test_a_file_cut_inside_its_table_loses_what_the_table_said(tmp_path: Path) -> None:
    """A5: every page of header and table."""
    names = keys(200)
    fill(tmp_path / "s", names)
    (file,) = raw.segments(tmp_path / "s")
    os.truncate(file, raw.PAGE + 50 * raw.ROW_BYTES + 7)
    with open_store(tmp_path / "s") as store:
        assert store.put(b"new", b"value")
        assert store.get(b"new") == b"value"
        assert set(store.keys()) <= {*names, b"new"}
        assert store.stats().dropped["short segment"] == 1


def test_a_file_cut_to_nothing_or_removed_between_runs_is_made_again(tmp_path: Path) -> None:
    """A6, A8: the directory still says that there are records in it."""
    records = apart(tmp_path / "s", 3)
    names = [record.row.key[: record.row.key_bytes] for record in records]
    os.truncate(records[0].path, 0)
    records[1].path.unlink()
    with open_store(tmp_path / "s", segments=3, segment=16 * KIB) as store:
        assert_missed(store, names[:2])
        assert store.contains(names[2])
        assert store.stats().dropped == {"damaged segment header": 1, "missing segment": 1}
        assert [path.stat().st_size for path in raw.segments(tmp_path / "s")] == [16 * KIB] * 3
        assert store.put_many(names[:2], [b"1", b"2"]).all()
    with open_store(tmp_path / "s", segments=3, segment=16 * KIB, recovery="strict") as store:
        assert set(store.get_many(names[:2])) <= {b"1", b"2", None}


def test_a_file_cut_to_nothing_or_removed_while_open_costs_its_records(tmp_path: Path) -> None:
    """A6: memory in front of it goes on serving, and the store goes on taking values."""
    names = keys(4)
    with open_store(tmp_path / "s", segments=2, dram=MIB) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()
        assert_found(store, names[:2])
        (file, *_) = {record.path for record in by_number(tmp_path / "s")}
        os.truncate(file, 0)
        assert_found(store, names[:2])
        assert_missed(store, names[2:])
        assert store.put(b"new", b"value")
        assert store.get(b"new") == b"value"
        file.unlink()
        store.sync()
    with open_store(tmp_path / "s", segments=2, dram=MIB) as store:
        assert set(store.get_many(names)) <= {None, *map(value_of, names)}
        assert store.get(b"new") in (None, b"value")
        assert store.put(b"new", b"value")
        store.sync()


def test_a_file_with_a_tail_is_read_without_it_and_cut_by_a_check(tmp_path: Path) -> None:
    """A7."""
    fill(tmp_path / "s", keys(3))
    (file,) = raw.segments(tmp_path / "s")
    with file.open("ab") as stream:
        stream.write(random.Random(1).randbytes(100_000))
    with open_store(tmp_path / "s") as store:
        assert_found(store, keys(3))
        assert [finding.kind for finding in store.check()] == ["long"]
        assert [finding.is_fixed for finding in store.check(fix=True)] == [True]
        assert file.stat().st_size == MIB
        assert store.check() == []
        assert_found(store, keys(3))


def test_records_that_the_directory_does_not_know_are_taken_in_by_their_checksums(
    tmp_path: Path,
) -> None:
    """A9: the directory is gone, or one from before they were written."""
    fill(tmp_path / "s", keys(2))
    folder = raw.namespace(tmp_path / "s") / "directory"
    older = (folder / "data.mdb").read_bytes()
    names = keys(300)
    with open_store(tmp_path / "s", segments=2) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()
        store.delete(names[0])
    bad = raw.live(tmp_path / "s")[names[1]]
    raw.flip(bad.path, bad.row_at, 9)
    for directory in (older, None):
        copy = tmp_path / f"copy{directory is None}"
        shutil.copytree(tmp_path / "s", copy)
        (raw.namespace(copy) / "directory" / "data.mdb").unlink()
        if directory is not None:
            (raw.namespace(copy) / "directory" / "data.mdb").write_bytes(directory)
        with open_store(copy, segments=2) as store:
            assert_missed(store, names[:2])
            # A directory that is older than the tables makes them look older than it.
            lost = store.stats().dropped["damaged row"] - 1
            assert (directory is None) == (lost == 0)
            found = {
                key: data for key, data in zip(names, store.get_many(names), strict=True) if data
            }
            assert found == {key: value_of(key) for key in found}
            assert len(found) == len(store) == len(names) - 2 - lost
            store.check(fix=True)
            assert store.check() == []


# A10 to A12: the directory


def values_in_lmdb(path: Path) -> dict[bytes, int]:
    """Where each value of the directory is in its file."""
    file = raw.namespace(path) / "directory" / "data.mdb"
    content = file.read_bytes()
    with lmdb.open(str(file.parent), readonly=True, lock=False) as env, env.begin() as transaction:
        found = {bytes(key): bytes(value) for key, value in transaction.cursor()}
    return {key: content.rindex(key + value) + len(key) for key, value in found.items()}


def test_every_single_bit_of_a_directory_value_is_noticed_when_it_flips(tmp_path: Path) -> None:
    """A10: rows then speak for themselves; one group of rows for each bit."""
    bits = 8 * 32
    records = apart(tmp_path / "s", bits)
    names = [record.row.key[: record.row.key_bytes] for record in records]
    places = values_in_lmdb(tmp_path / "s")
    groups = sorted(key for key in places if key != b"m")
    assert len(groups) == bits
    file = raw.namespace(tmp_path / "s") / "directory" / "data.mdb"
    for bit, key in enumerate(groups):
        raw.flip(file, places[key], bit)
    with open_store(tmp_path / "s", segments=bits, segment=16 * KIB) as store:
        assert store.get_many(names) == [value_of(key).ljust(8 * KIB, b".") for key in names]
        assert store.stats().dropped == {"damaged directory entry": bits}


def test_every_single_bit_of_the_directory_head_is_noticed_when_it_flips(tmp_path: Path) -> None:
    """A10: version, epoch, sequence, whether it was closed."""
    fill(tmp_path / "s", keys(3))
    folder = raw.namespace(tmp_path / "s")
    at = values_in_lmdb(tmp_path / "s")[b"m"]
    good = (folder / "directory" / "data.mdb").read_bytes()
    digest = Identity().digest
    for bit in range(8 * 29):
        raw.flip(folder / "directory" / "data.mdb", at, bit)
        manifest = Manifest(FileIO(), str(folder), digest, MIB, read_only=True)
        commit, _, lost = manifest.load()
        manifest.close()
        assert (commit, lost) == (None, 1)
        (folder / "directory" / "data.mdb").write_bytes(good)
    raw.flip(folder / "directory" / "data.mdb", at, 0)
    with open_store(tmp_path / "s") as store:
        assert_found(store, keys(3))
        assert store.stats().dropped == {"damaged directory entry": 1}


def pages_in_use(file: Path) -> int:
    """As the newer of the two meta pages says: last page and transaction, after 136 bytes."""
    metas = [raw.read(file, page + 136, 16) for page in (0, raw.PAGE)]
    newest = max(metas, key=lambda meta: int.from_bytes(meta[8:], "little"))
    return int.from_bytes(newest[:8], "little") + 1


def _cut_in_half(file: Path) -> None:
    os.truncate(file, pages_in_use(file) * raw.PAGE // 2)


def _cut_to_a_page(file: Path) -> None:
    os.truncate(file, raw.PAGE)


def _without_its_last_page(file: Path) -> None:
    os.truncate(file, (pages_in_use(file) - 1) * raw.PAGE)


def _without_meta_pages(file: Path) -> None:
    raw.write(file, 0, random.Random(3).randbytes(2 * raw.PAGE))


def _with_zeros_as_meta_pages(file: Path) -> None:
    raw.write(file, 0, bytes(2 * raw.PAGE))


def _with_a_huge_last_page(file: Path) -> None:
    for page in (0, raw.PAGE):
        raw.write(file, page + 16 + 24 + 96, (1 << 40).to_bytes(8, "little"))


def _of_something_else(file: Path) -> None:
    file.write_bytes(b"SQLite format 3\0" + bytes(20_000))


def _of_one_byte(file: Path) -> None:
    file.write_bytes(b"x")


LMDB_DAMAGE = [
    _cut_in_half, _cut_to_a_page, _without_its_last_page, _without_meta_pages,
    _with_zeros_as_meta_pages, _with_a_huge_last_page, _of_something_else, _of_one_byte,
]  # fmt: skip


def visited(path: Path, server: ForkServer, names: list[bytes], recovery: str = "quiet") -> int:
    """How a child ends that uses a store: 0 if no value was wrong and new ones could be put."""
    options = {"disk": 64 * KIB + 6 * 64 * KIB, "segment": 64 * KIB, "recovery": recovery}
    return server.run("visit", folder=str(path), options=options, keys=[key.hex() for key in names])


@pytest.mark.parametrize("damage", LMDB_DAMAGE)
def test_a_directory_that_lmdb_must_not_map_is_built_anew(
    damage: Callable[[Path], None], server: ForkServer, tmp_path: Path
) -> None:
    """A11, A12: the process survives; in strict mode it is told, and nothing is changed."""
    names = keys(10)
    fill(tmp_path / "s", names, segments=6, segment=64 * KIB)
    file = raw.namespace(tmp_path / "s") / "directory" / "data.mdb"
    damage(file)
    before = file.read_bytes()
    assert visited(tmp_path / "s", server, names, recovery="strict") == 11
    assert file.read_bytes() == before
    assert visited(tmp_path / "s", server, names) == 0
    with open_store(tmp_path / "s", segments=6, segment=64 * KIB) as store:
        assert_found(store, names)


def test_files_of_others_survive_a_directory_that_is_built_anew(tmp_path: Path) -> None:
    """A11, E7."""
    fill(tmp_path / "s", keys(10), segments=6, segment=64 * KIB)
    folder = raw.namespace(tmp_path / "s") / "directory"
    foreign = [folder / "data.mdb.bak", folder / "old" / "data.mdb"]
    foreign[1].parent.mkdir()
    for path in foreign:
        path.write_text("mine")
    _of_one_byte(folder / "data.mdb")
    with open_store(tmp_path / "s", segments=6, segment=64 * KIB) as store:
        assert store.stats().dropped == {"damaged directory": 1}
        assert_found(store, keys(10))
        found = {finding.path for finding in store.check() if finding.kind == "foreign"}
        assert found == {str(foreign[0]), str(foreign[1].parent)}
    assert [path.read_text() for path in foreign] == ["mine"] * 2


FLIPS = 3000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 300
FLIPS_PER_CHILD = 30


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: what survives is not the point."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_the_process_survives_any_bit_of_the_directory_file(
    server: ForkServer, quick_disk: Path
) -> None:
    """A11: bits all over the file, most of them in bytes that are in use."""
    names = keys(14)
    options = {"disk": 64 * KIB + 8 * 16 * KIB, "segment": 16 * KIB}
    fill(quick_disk / "good", names, segments=8, segment=16 * KIB)
    with open_store(quick_disk / "good", segments=8, segment=16 * KIB) as store:
        store.delete_many(names[10:])
    good = (raw.namespace(quick_disk / "good") / "directory" / "data.mdb").read_bytes()
    written = [at for at, byte in enumerate(good) if byte]
    coin = random.Random(11)
    flips = [
        (coin.choice(written if coin.random() < 0.8 else range(len(good))), coin.randrange(8))
        for _ in range(FLIPS)
    ]
    for start in range(0, FLIPS, FLIPS_PER_CHILD):
        some = flips[start : start + FLIPS_PER_CHILD]
        code = server.run(
            "visit_flipped", good=str(quick_disk / "good"), folder=str(quick_disk / "s"),
            options=options, keys=[key.hex() for key in names[:10]], flips=some,
        )  # fmt: skip
        assert code == 0, f"ended by {code} at {server.acknowledged[-1:]}"
        assert len(server.acknowledged) == len(some)


# A13 to A15: codecs


NOISE = random.Random(4).randbytes(32 * KIB)


def coded(path: Path, payload: Callable[[bytes], bytes]) -> KeyedStore:
    """A store with another payload for `a`, sealed with right checksums; `b` is as it was."""
    with open_store(path, codec=ShuffleZstdCodec()) as store:
        assert store.put_many([b"a", b"b"], [NOISE, NOISE]).all()
    record = raw.live(path)[b"a"]
    stored = payload(raw.read(record.path, record.payload_at, record.row.stored_bytes))
    raw.seal(record, record.row._replace(stored_bytes=len(stored)), stored)
    rows_speak_for_themselves(path)
    return open_store(path, codec=ShuffleZstdCodec())


def assert_only_a_is_refused(store: KeyedStore) -> None:
    with store:
        tracemalloc.start()
        assert store.get(b"a") is None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * MIB
        assert store.get(b"b") == NOISE
        assert store.stats().dropped == {"codec": 1}
        assert store.get(b"a") is None
        store.validate()


@pytest.mark.parametrize("size", [0, 1, 32 * KIB - 1, 32 * KIB + 1, 1 << 20, 1 << 34])
def test_a_frame_of_another_content_size_is_rejected(size: int, tmp_path: Path) -> None:
    """A13: only its header is wrong; the checksums over it are right."""
    whole = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(32 * KIB))
    block = whole[whole.index(b"\xfd") + 3 :]  # magic, descriptor, window, then the blocks

    def payload(_: bytes) -> bytes:
        # A frame header of its own: single segment, content size in 8 bytes.
        return b"\x02" + b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + block

    assert_only_a_is_refused(coded(tmp_path / "s", payload))


def test_a_decompression_bomb_is_rejected(tmp_path: Path) -> None:
    """A14: 256 MiB in a few kilobytes."""
    bomb = zstandard.ZstdCompressor().compress(bytes(256 * MIB))
    assert len(bomb) < 32 * KIB
    assert_only_a_is_refused(coded(tmp_path / "s", lambda _: b"\x02" + bomb))


def test_a_bomb_that_does_not_say_its_size_is_rejected(tmp_path: Path) -> None:
    """A14."""
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))
    assert_only_a_is_refused(coded(tmp_path / "s", lambda _: b"\x02" + bomb))


@pytest.mark.parametrize("dictionary_id", [7, 1 << 30])
def test_a_frame_that_needs_a_dictionary_is_rejected(dictionary_id: int, tmp_path: Path) -> None:
    """A15."""
    coin = random.Random(5)
    samples: list[bytes | bytearray | memoryview[int]] = [
        coin.randbytes(300) + b"a common end of every sample" * 5 for _ in range(300)
    ]
    dictionary = zstandard.train_dictionary(4 * KIB, samples, dict_id=dictionary_id)
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(bytes(32 * KIB))
    assert_only_a_is_refused(coded(tmp_path / "s", lambda _: b"\x02" + frame))


def test_a_value_of_another_codec_is_rejected(tmp_path: Path) -> None:
    """A15: never the bytes as they are, which some codec may even accept."""
    fill(tmp_path / "s", keys(3))
    one, two, _ = by_number(tmp_path / "s")
    for record, code in ((one, ShuffleZstdCodec.code), (two, Int8Codec.code)):
        payload = raw.read(record.path, record.payload_at, record.disk_bytes)
        raw.seal(record, record.row._replace(codec=code), payload)
    rows_speak_for_themselves(tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        assert_missed(store, keys(3)[:2])
        assert_found(store, keys(3)[2:])
        assert store.stats().dropped == {"codec": 2}


# A16: equal hashes


def same_hash(key: bytes, other: bytes, seed: int) -> bytes:
    """The key that begins with 40 bytes of `other` and has the 64-bit hash of `key`, 48 bytes.

    The index mixes the length and six words; each step can be undone for a word that is unknown.
    """

    def mix(state: int, word: int) -> int:
        state = (state ^ word) * 0x9E3779B97F4A7C15 % (1 << 64)
        state ^= state >> 32
        return (state + seed) * (seed | 1) % (1 << 64)

    def before_last(words: list[int]) -> int:
        state = mix(seed, 48)
        for word in words[:5]:
            state = mix(state, word)
            state ^= state >> 32
        return state

    mine, others = words_of(key), words_of(other)
    last = before_last(mine) ^ mine[5] ^ before_last(others)
    return other[:40] + last.to_bytes(8, "little")


def words_of(key: bytes) -> list[int]:
    return [int.from_bytes(key[at : at + 8], "little") for at in range(0, 48, 8)]


def test_keys_of_equal_64_bit_hash_are_told_apart(tmp_path: Path) -> None:
    """A16: the index compares the keys themselves."""
    with open_store(tmp_path / "s") as store:
        coin = random.Random(2)
        key, other = coin.randbytes(48), coin.randbytes(48)
        twin = same_hash(key, other, int(store.volume.records._seed))
        assert hash_of(store, key) == hash_of(store, twin)
        assert key != twin
        assert store.put(key, b"mine")
        assert store.get(twin) is None
        assert not store.contains(twin)
        assert not store.delete(twin)
        assert store.put(twin, b"its own")
        assert store.get_many([key, twin]) == [b"mine", b"its own"]
        assert store.delete(key)
        assert store.get_many([key, twin]) == [None, b"its own"]
        store.validate()


def hash_of(store: KeyedStore, key: bytes) -> int:
    """The index's hash of a key, by the code that is under test: that it is equal is the point."""
    fields = np.frombuffer(key, np.uint64)
    return int(kernels._hash(fields, 0, np.uint64(48), store.volume.records._seed))


def test_long_keys_of_equal_64_bit_hash_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A16: a row has 40 bytes of them and their hash; the rest is compared too."""
    monkeypatch.setattr("xxhash.xxh3_64_digest", lambda data: b"samehash")
    one, two = b"k" * 40 + b"one" * 20, b"k" * 40 + b"two" * 20
    with open_store(tmp_path / "s") as store:
        assert store.put(one, b"1")
        assert store.get(two) is None
        assert not store.contains(two)
        assert not store.delete(two)
        assert store.get(one) == b"1"
        store.put(two, b"2")
        assert store.get(one) in (None, b"1")
        assert store.get(two) in (None, b"2")
    with open_store(tmp_path / "s") as store:
        assert store.get(one) in (None, b"1")
        assert store.get(two) in (None, b"2")


# A17, A18: damage met on the way, and by the machine itself


def test_damage_met_while_values_come_into_memory_costs_no_other(tmp_path: Path) -> None:
    """A17: promotion of a batch."""
    names = keys(100)
    with open_store(tmp_path / "s", dram=4 * MIB) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()
        records = raw.live(tmp_path / "s")
        for key in names[::10]:
            raw.flip(records[key].path, records[key].payload_at, 3)
        assert store.prefetch(names).wait(60)
        assert store.stats().dropped == {"corrupt": 10}
        assert store.stats().dram_bytes > 0
        spared = [key for key in names if key not in names[::10]]
        before = store.stats().hits.get("disk", 0)
        assert_found(store, spared)
        assert store.stats().hits.get("disk", 0) == before
        assert_missed(store, names[::10])


def test_damage_met_while_a_failed_file_is_moved_costs_no_other(tmp_path: Path) -> None:
    """A17: compaction after a failed fsync."""
    io = FaultIO(tmp_path)
    names = keys(50)
    with open_store(tmp_path / "s", segments=3, io=io) as store:
        assert store.put_many(names, [value_of(key) for key in names]).all()
        record = raw.live(tmp_path / "s")[names[7]]
        raw.flip(record.path, record.payload_at, 3)
        io.inject("sync", error(5), nth=1, name=record.path.name)
        with pytest.raises(OSError, match="could not be synced"):
            store.sync()
        assert_found(store, names[:7] + names[8:])
        assert_missed(store, names[7:8])
        assert store.stats().dropped["io"] == len(names)
        assert len(store) == len(names) - 1
        store.sync()
        store.validate()


def test_damage_met_by_a_check_costs_no_other(tmp_path: Path) -> None:
    """A17: scrubbing goes on, and drops what is damaged if it is asked to."""
    names = keys(50)
    fill(tmp_path / "s", names)
    records = raw.live(tmp_path / "s")
    for key in names[::5]:
        raw.flip(records[key].path, records[key].payload_at, 100)
    with open_store(tmp_path / "s") as store:
        found = store.check()
        assert [finding.kind for finding in found] == ["payload"] * 10
        assert {finding.extent for finding in found} == {records[key].extent for key in names[::5]}
        assert all(finding.is_fixed for finding in store.check(fix=True))
        assert store.check() == []
        assert_missed(store, names[::5])
        assert_found(store, [key for key in names if key not in names[::5]])


def test_a_bad_header_gives_up_the_rest_of_its_file(tmp_path: Path) -> None:
    """A17: where extents are is not guessed."""
    fill(tmp_path / "s", keys(10))
    (file,) = raw.segments(tmp_path / "s")
    raw.flip(file, 60, 2)
    with open_store(tmp_path / "s") as store:
        assert_missed(store, keys(10))
        assert store.stats().dropped == {"damaged segment header": 1}
        assert store.put(b"new", b"value")
    with open_store(tmp_path / "s", recovery="strict") as store:
        assert list(store.keys()) == [b"new"]


@pytest.mark.parametrize("verify", ["reads", "always"])
def test_a_bit_that_flips_on_its_way_to_the_disk_is_caught(
    verify: Literal["reads", "always"], tmp_path: Path
) -> None:
    """A18: at the next read, or at once if every write is read back."""
    io = FaultIO(tmp_path)
    with open_store(tmp_path / "s", io=io, verify=verify) as store:
        assert store.put(b"good", b"value")
        io.inject("write", damaged(3), nth=1, name="*.seg")
        assert store.put(b"a", b"value") == (verify == "reads")
        io.heal()
        assert store.get(b"a") is None
        assert store.get(b"good") == b"value"
        assert store.stats().dropped == {"corrupt": 1}
        assert store.put(b"a", b"value")
        assert store.get(b"a") == b"value"


@pytest.mark.parametrize("what", ["header", "row", "identity", "directory"])
def test_in_strict_mode_damage_is_an_error_and_changes_nothing(what: str, tmp_path: Path) -> None:
    """A2, A10: the way out is in the message."""
    fill(tmp_path / "s", keys(3))
    record = by_number(tmp_path / "s")[1]
    folder = raw.namespace(tmp_path / "s")
    damage = {
        "header": (record.path, 20),
        "row": (record.path, record.row_at + 30),
        "identity": (folder / "IDENTITY", 30),
        "directory": (folder / "directory" / "data.mdb", values_in_lmdb(tmp_path / "s")[b"m"]),
    }
    raw.flip(*damage[what], 0)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del before[folder / "LOCK"]
    with pytest.raises(CorruptBlockError, match="recovery='quiet'"):
        open_store(tmp_path / "s", recovery="strict")
    for path, content in before.items():
        assert path.name == "lock.mdb" or path.read_bytes() == content
    with open_store(tmp_path / "s") as store:
        assert sum(store.stats().dropped.values()) == 1
        assert set(store.get_many(keys(3))) <= {None, *map(value_of, keys(3))}


def test_a_child_that_ends_by_a_signal_would_be_seen(server: ForkServer, tmp_path: Path) -> None:
    """The tests with children would notice a crash: this one is killed."""
    code = server.run(
        "load", folder=str(tmp_path / "s"), state=str(tmp_path / "state"), seed=1, roomy=True,
        options={"disk": 8 * MIB, "segment": 256 * KIB}, kill_after=lambda: (3, 0.0),
    )  # fmt: skip
    assert code == -signal.SIGKILL
