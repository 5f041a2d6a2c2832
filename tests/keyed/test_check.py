"""`KeyedStore.check`: what it finds, that it repairs it, and that it touches nothing else."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pytest

from tierstore.errors import ConfigError, CorruptBlockError, StoreLockedError, StoreMismatchError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.volume.inspect import (
    facts_of,
    is_namespace,
    namespaces,
    open_volume,
    size_classes,
)
from tierstore.volume.leftovers import remove_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.volume import Finding

IDENTITY = Identity(model="m")
DISK, SEGMENT = "2MiB", 1 << 17
PAGE, ROW = 4096, 96
VALUES = {
    **{b"key %d" % i: b"%d." % i * (1 + 30 * i) for i in range(60)},
    **{b"L" * 100 + b"%d" % i: bytes([i]) * 5_000 for i in range(5)},
    b"empty": b"",
}
"""Two size classes and three segment files of them."""


def open_store(path: Path) -> KeyedStore:
    return KeyedStore(path / "kv", IDENTITY, disk=DISK, segment=SEGMENT)


def fill(path: Path) -> Path:
    """A store that was closed in order; the directory of its namespace."""
    with open_store(path) as store:
        assert store.put_many(list(VALUES), list(VALUES.values())).all()
        return Path(store.volume.directory)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return fill(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KeyedStore]:
    fill(tmp_path)
    with open_store(tmp_path) as store:
        yield store
        store.validate()


def held(store: KeyedStore) -> dict[bytes, bytes]:
    got = zip(VALUES, store.get_many(list(VALUES)), strict=True)
    return {key: value for key, value in got if value is not None}


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything; the lock's content is nobody's business."""
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in directory.rglob("*")
        if path.name not in {"LOCK", "lock.mdb"}
    }


# Where things are, read from the bytes


def number(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 8], "little")


def used_segment(directory: Path) -> Path:
    """The segment file with the smallest extents that holds values."""
    paths = sorted((directory / "segments").glob("????????.seg"))
    used = [path for path in paths if number(path.read_bytes(), 64)]
    return min(used, key=lambda path: number(path.read_bytes(), 56))


def blank_segment(directory: Path) -> Path:
    paths = sorted((directory / "segments").glob("????????.seg"))
    return next(path for path in paths if not number(path.read_bytes(), 64))


def change(path: Path, at: int, what: bytes = b"\xa5") -> None:
    """XOR bytes of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(len(what))
        file.seek(at)
        file.write(bytes(a ^ b for a, b in zip(before, what, strict=True)))


def change_entry(directory: Path) -> None:
    with (
        lmdb.open(str(directory / "directory"), map_size=1 << 20) as environment,
        environment.begin(write=True) as transaction,
    ):
        key = next(key for key, _ in transaction.cursor() if key != b"m")
        value = bytearray(transaction.get(key, b""))
        value[3] ^= 1
        transaction.put(key, bytes(value))


def damage_payload(directory: Path) -> None:
    path = used_segment(directory)
    change(path, number(path.read_bytes(), 72) + 5 * number(path.read_bytes(), 56))


def damage_row(directory: Path) -> None:
    change(used_segment(directory), PAGE + 5 * ROW + 1)


def damage_header(directory: Path) -> None:
    change(used_segment(directory), 57)


def damage_blank_header(directory: Path) -> None:
    change(blank_segment(directory), 9)


def cut_segment(directory: Path) -> None:
    """A5. In the middle of an extent with a value."""
    path = used_segment(directory)
    os.truncate(path, number(path.read_bytes(), 72) + 5 * number(path.read_bytes(), 56) + 1)


def empty_blank_segment(directory: Path) -> None:
    os.truncate(blank_segment(directory), 0)


def lengthen_segment(directory: Path) -> None:
    """A7."""
    with used_segment(directory).open("ab") as file:
        file.write(b"garbage" * 999)


def lengthen_blank_segment(directory: Path) -> None:
    with blank_segment(directory).open("ab") as file:
        file.write(b"garbage" * 999)


def ruin_directory(directory: Path) -> None:
    """A11."""
    (directory / "directory" / "data.mdb").write_bytes(b"no LMDB" * 4096)


def restore_old_table(directory: Path) -> None:
    """What a disk does that acknowledged a write and lost it."""
    path = used_segment(directory)
    before = path.read_bytes()
    with open_store(directory.parents[1]) as store:
        store.delete_many([b"key %d" % i for i in range(60)])
    now = path.read_bytes()
    start = number(now, 72)
    path.write_bytes(now[:PAGE] + before[PAGE:start] + now[start:])


def damage_identity(directory: Path) -> None:
    change(directory / "IDENTITY", 20)


def leave_a_stub(directory: Path) -> None:
    (directory / "segments" / "00000099.seg").write_bytes(b"TIERSEG\n and no more")


OFFLINE = {
    "payload": damage_payload,
    "row": damage_row,
    "header": damage_header,
    "short": cut_segment,
    "long": lengthen_segment,
    "directory": change_entry,
    "stale": restore_old_table,
    "permissions": lambda directory: (directory / "segments").chmod(0o755),
}
MORE_OFFLINE = {
    "header": damage_blank_header,
    "long": lengthen_blank_segment,
    "directory": ruin_directory,
    "permissions": lambda directory: (directory / "IDENTITY").chmod(0o644),
    "short": leave_a_stub,
}
CASES = [
    pytest.param(kind, harm, id=f"{kind}-{number}")
    for number, harms in enumerate((OFFLINE, MORE_OFFLINE))
    for kind, harm in harms.items()
]


# Stores without and with damage


def test_a_good_store_has_no_findings(closed: Path, tmp_path: Path) -> None:
    before = snapshot(closed)
    volume = open_volume(str(closed))
    assert volume.check(fix=False) == []
    volume.close()
    assert snapshot(closed) == before
    with open_store(tmp_path) as store:
        assert store.check() == []
        assert held(store) == VALUES


def test_an_empty_store_has_no_findings(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.check() == []
        assert store.check(fix=True) == []


@pytest.mark.parametrize(("kind", "harm"), CASES)
def test_damage_is_found_and_then_repaired(
    closed: Path, tmp_path: Path, kind: str, harm: Callable[[Path], None]
) -> None:
    harm(closed)
    before = snapshot(closed)
    volume = open_volume(str(closed))
    looked = volume.check(fix=False)
    volume.close()
    assert kind in kinds(looked)
    assert not any(finding.is_fixed for finding in looked)
    assert snapshot(closed) == before

    with open_store(tmp_path) as store:
        repaired = store.check(fix=True)
        assert kind in kinds(repaired)
        assert all(finding.is_fixed for finding in repaired)
        assert store.check() == []
        left = held(store)
        store.validate()
    assert left.items() <= VALUES.items()
    with KeyedStore(
        tmp_path / "kv", IDENTITY, disk=DISK, segment=SEGMENT, recovery="strict"
    ) as store:
        assert store.check() == []
        assert held(store) == left


@pytest.mark.parametrize(
    ("harm", "lost"),
    [
        (damage_payload, 1),
        (damage_row, 1),
        (lengthen_segment, 0),
        (change_entry, 0),
        (ruin_directory, 0),
        (damage_blank_header, 0),
        (damage_identity, 0),
    ],
)
def test_a_repair_costs_no_more_than_what_was_damaged(
    closed: Path, tmp_path: Path, harm: Callable[[Path], None], lost: int
) -> None:
    harm(closed)
    with open_store(tmp_path) as store:
        store.check(fix=True)
        assert len(held(store)) == len(VALUES) - lost


def test_a_finding_tells_file_and_extent(closed: Path) -> None:
    damage_payload(closed)
    volume = open_volume(str(closed))
    (finding,) = volume.check(fix=False)
    assert volume.verify() == [finding]
    volume.close()
    assert (finding.kind, finding.extent) == ("payload", 5)
    assert finding.path == str(used_segment(closed))
    assert "do not match their checksum" in finding.message


# On a store that is open


def remove_segment(directory: Path) -> None:
    """A6."""
    used_segment(directory).unlink()


def remove_blank_segment(directory: Path) -> None:
    blank_segment(directory).unlink()


def exchange_segment(directory: Path) -> None:
    path = used_segment(directory)
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


OPEN_CASES = [
    ("payload", damage_payload),
    ("row", damage_row),
    ("header", damage_header),
    ("header", damage_blank_header),
    ("short", cut_segment),
    ("short", empty_blank_segment),
    ("long", lengthen_segment),
    ("identity", damage_identity),
    ("identity", lambda directory: (directory / "IDENTITY").unlink()),
    ("leftover", lambda directory: (directory / "IDENTITY.new").touch(0o600)),
    ("permissions", lambda directory: directory.chmod(0o750)),
    ("missing", remove_segment),
    ("missing", remove_blank_segment),
    ("missing", exchange_segment),
]


@pytest.mark.parametrize(("kind", "harm"), OPEN_CASES)
def test_damage_under_an_open_store_is_found_and_repaired(
    store: KeyedStore, tmp_path: Path, kind: str, harm: Callable[[Path], None]
) -> None:
    harm(Path(store.volume.directory))
    looked = store.check()
    assert kind in kinds(looked)
    assert not any(finding.is_fixed for finding in looked)
    assert kind in kinds(store.check(fix=True))
    assert store.check() == []
    left = held(store)
    assert left.items() <= VALUES.items()
    store.put(b"later", b"value")
    store.validate()
    store.close()
    with open_store(tmp_path) as again:
        assert again.stats().dropped == {}
        assert again.check() == []
        assert held(again) == left
        assert again.get(b"later") == b"value"


def test_what_memory_knows_survives_a_lost_table_and_a_lost_file(store: KeyedStore) -> None:
    """The rows are in memory and the file is open, so nothing needs to be dropped."""
    directory = Path(store.volume.directory)
    path = used_segment(directory)
    with path.open("r+b") as file:
        file.write(bytes(PAGE + 20 * ROW))
    store.check(fix=True)
    assert held(store) == VALUES
    remove_segment(directory)
    store.check(fix=True)
    assert held(store) == VALUES


def test_a_damaged_entry_of_the_directory_is_written_anew(store: KeyedStore) -> None:
    """A10. A second environment in one process is not allowed, so the entry is set from within."""
    manifest = store.volume._manifest
    (key, *_) = (key for key in manifest.all_keys() if key != b"m")
    with manifest._env.begin(write=True) as transaction:
        transaction.put(key, bytes(32))
        transaction.put(b"foreign", b"entry")
    assert kinds(store.check()) == {"directory"}
    assert len(store.check(fix=True)) == 2
    assert store.check() == []
    assert manifest.damaged_keys() == []


def test_a_group_that_the_directory_does_not_know_is_found(store: KeyedStore) -> None:
    manifest = store.volume._manifest
    manifest.remove([key for key in manifest.all_keys() if key != b"m"])
    for segment in store.volume.files.by_number.values():
        segment.dirty_groups.clear()
    assert kinds(store.check()) == {"directory"}
    store.check(fix=True)
    assert store.check() == []


def test_places_that_are_lost_or_free_twice_are_found(store: KeyedStore) -> None:
    """Only a defect of this library could do that; then a check must put it right."""
    space, records = store.volume._space, store.volume.records
    free = space.free(PAGE)
    lost = int(free.pop(1)[0])
    twice = int(free.pop(1)[0])
    free.push(np.array([twice, twice]))
    live = int(store.volume.files.live(store.volume.files.of(twice))[0])
    free.push(np.array([live]))
    assert [finding.kind for finding in store.check()] == ["space"] * 3
    store.check(fix=True)
    assert store.check() == []
    content = free.content().tolist()
    assert (content.count(lost), content.count(twice), content.count(live)) == (1, 1, 0)
    assert records.rows["state"][live] == 1


def test_an_index_that_lost_a_value_is_built_anew(store: KeyedStore) -> None:
    records = store.volume.records
    index = records._index
    index[np.flatnonzero(index >= 0)[0]] = -1
    assert kinds(store.check()) == {"index"}
    store.check(fix=True)
    assert store.check() == []
    assert held(store) == VALUES


def test_a_long_key_that_is_not_the_one_on_disk_is_found(store: KeyedStore) -> None:
    records = store.volume.records
    place = next(iter(records.long_keys))
    key = records.long_keys[place]
    records.long_keys[place] = key[:-1] + b"?"
    (finding,) = store.check()
    assert finding.kind == "index"
    store.check(fix=True)
    assert store.get(key) is None


def test_a_check_is_right_while_others_write(store: KeyedStore) -> None:
    is_done = threading.Event()
    failures: list[BaseException] = []

    def write(name: bytes) -> None:
        count = 0
        try:
            while not is_done.is_set():
                count += 1
                key = name + b"%d" % (count % 40)
                store.put(key, b"x" * (count * 97 % 9_000))
                store.delete(name + b"%d" % (count * 7 % 40))
                if count % 50 == 0:
                    store.sync()
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in (b"a", b"b")]
    for writer in writers:
        writer.start()
    try:
        found = [finding for fix in (False, True) * 5 for finding in store.check(fix=fix)]
    finally:
        is_done.set()
        for writer in writers:
            writer.join()
    assert failures == []
    assert found == []
    assert held(store) == VALUES


def test_leased_values_are_checked_and_stay(store: KeyedStore) -> None:
    with store.lease(b"key 5", owner="test", seconds=60) as lease:
        damage_payload(Path(store.volume.directory))
        store.delete(b"key 6")
        assert kinds(store.check(fix=True)) == {"payload"}
        assert store.check() == []
        assert lease.values[0] is not None
        assert bytes(lease.values[0]) == VALUES[b"key 5"]
    assert store.check() == []


# What is not the store's


def test_foreign_files_are_reported_and_never_touched(closed: Path, tmp_path: Path) -> None:
    """E7."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    segments = closed / "segments"
    (closed / "notes.txt").write_text("mine")
    (segments / "00000777.seg").mkdir()
    (segments / "00000778.seg").symlink_to(outside)
    (segments / "00000779.seg").write_bytes(b"not a segment")
    (segments / "00000776.seg").write_bytes(b"TI")
    (closed / "directory" / "data.mdb.bak").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(closed) + b"/\xff\xfe")).touch()
    foreign = {
        str(path): path.lstat().st_mode
        for path in closed.rglob("*")
        if path.name not in {"IDENTITY", "LOCK", "data.mdb", "lock.mdb", "segments", "directory"}
        and not path.name.startswith("000000")
    }
    foreign |= {str(path): path.lstat().st_mode for path in segments.glob("0000077?.seg")}
    with open_store(tmp_path) as store:
        found = store.check(fix=True)
        assert {finding.path for finding in found} == foreign.keys()
        assert not any(finding.is_damage or finding.is_fixed for finding in found)
        store.clear()
        store.volume.discard_leftovers()
        assert kinds(store.check(fix=True)) == {"foreign"}
    assert {path: os.lstat(path).st_mode for path in foreign} == foreign
    assert outside.read_bytes() == b"precious"


# Bounds and arguments


def test_many_findings_of_a_kind_are_counted_and_not_listed(tmp_path: Path) -> None:
    """Each kept finding costs memory; a ruined disk must not cost all of it."""
    with KeyedStore(tmp_path / "kv", IDENTITY, disk="4MiB", segment="2MiB") as store:
        keys = [b"%d" % i for i in range(300)]
        store.put_many(keys, [b"v" * 4000] * 300)
        segment = next(s for s in store.volume.files.by_number.values() if not s.is_blank)
        start = segment.header.data_offset
        with Path(segment.path).open("r+b") as file:
            file.seek(start)
            file.write(b"\xee" * 300 * PAGE)
        findings = store.check(fix=True)
        assert [finding.kind for finding in findings] == ["payload"] * 101
        assert findings[-1].message == "200 more of this kind"
        assert len(store) == 0
        assert store.stats().dropped == {"corrupt": 300}


def test_progress_comes_to_all_bytes_of_the_payloads(store: KeyedStore) -> None:
    told: list[tuple[int, int]] = []
    assert store.check(progress=lambda done, total: told.append((done, total))) == []
    stored = sum(map(len, VALUES.values())) + sum(len(key) for key in VALUES if len(key) > 48)
    assert told[-1] == (stored, stored)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_values_larger_than_the_room_for_reading_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.volume.verifier._BYTES_AT_ONCE", 2 * PAGE)
    fill(tmp_path)
    with open_store(tmp_path) as store:
        assert store.check() == []
        damage_payload(Path(store.volume.directory))
        assert kinds(store.check(fix=True)) == {"payload"}


def test_a_store_for_reading_only_is_checked_and_not_repaired(closed: Path) -> None:
    damage_row(closed)
    with KeyedStore(closed.parent, IDENTITY, disk=DISK, read_only=True) as store:
        assert kinds(store.check()) == {"row"}
        with pytest.raises(ConfigError, match="open for reading only"):
            store.check(fix=True)


def test_older_values_of_a_crash_are_no_finding_for_readers(tmp_path: Path) -> None:
    """Two live rows of one key are what a kill between two writes leaves; opening resolves it."""
    directory = fill(tmp_path)
    path = used_segment(directory)
    with open_store(tmp_path) as store:
        place = int(store.volume.records.find(store.volume.records.fields(np.array([0])))[0])
        key = store.volume.records.key(place)
        segment = store.volume.files.of(place)
        at = PAGE + (place - segment.first) * ROW
        path = Path(segment.path)
        row = path.read_bytes()[at : at + ROW]
        store.put(key, b"newer")
        store.sync()
    content = bytearray(path.read_bytes())
    content[at : at + ROW] = row
    path.write_bytes(content)
    shutil.rmtree(directory / "directory")
    volume = open_volume(str(directory))
    findings = volume.check(fix=False)
    volume.close()
    assert kinds(findings) == {"directory"}
    with open_store(tmp_path) as store:
        assert store.get(key) == b"newer"
        assert store.stats().dropped == {"superseded": 1}
        assert store.check() == []


def test_a_closed_store_is_not_checked(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    with pytest.raises(ConfigError, match="closed"):
        store.check()


# Opening what is there


def test_namespaces_are_found_from_either_directory(closed: Path, tmp_path: Path) -> None:
    other = Identity(model="other")
    KeyedStore(tmp_path / "kv", other, disk=DISK, segment=SEGMENT).close()
    (tmp_path / "kv" / "unrelated").mkdir()
    (tmp_path / "kv" / "link").symlink_to(closed)
    expected = sorted([str(closed), str(tmp_path / "kv" / other.folder)])
    assert namespaces(tmp_path / "kv") == expected
    assert namespaces(closed) == [str(closed)]
    assert not is_namespace(str(tmp_path / "kv" / "unrelated"))
    with pytest.raises(ConfigError, match="holds no store"):
        namespaces(tmp_path / "kv" / "unrelated")
    with pytest.raises(ConfigError, match="cannot be read"):
        namespaces(tmp_path / "nowhere")


def test_an_opened_namespace_has_its_own_size_and_identity(closed: Path) -> None:
    before = snapshot(closed)
    volume = open_volume(str(closed), read_only=False)
    assert volume.identity.model == "m"
    assert volume.files.nbytes == SEGMENT
    assert len(volume.files.by_number) == len(list((closed / "segments").iterdir()))
    classes = size_classes(volume)
    assert sum(one.records for one in classes) == len(VALUES)
    assert sum(one.stored_bytes for one in classes) == sum(map(len, VALUES.values()))
    assert {one.extent_bytes for one in classes} == {PAGE, 2 * PAGE}
    volume.close()
    assert snapshot(closed) == before


def test_a_namespace_that_cannot_be_told_is_refused(closed: Path) -> None:
    with open_store(closed.parents[1]), pytest.raises(StoreLockedError, match="is open in process"):
        open_volume(str(closed))
    moved = closed.rename(closed.with_name("copy"))
    with pytest.raises(StoreMismatchError, match="under another name"):
        facts_of(str(moved))
    (moved / "IDENTITY").unlink()
    with pytest.raises(CorruptBlockError, match="damaged or missing"):
        facts_of(str(moved))


# Leftovers


def test_bytes_of_an_earlier_epoch_are_gone_from_the_files(tmp_path: Path) -> None:
    directory = fill(tmp_path)
    secret = VALUES[b"key 59"]
    with open_store(tmp_path) as store:
        store.clear()
        store.put(b"new", b"value")
        store.sync()
        contents = [path.read_bytes() for path in (directory / "segments").iterdir()]
        assert any(secret in content for content in contents)
        left = store.volume.discard_leftovers()
        assert left.segments >= 2
        contents = [path.read_bytes() for path in (directory / "segments").iterdir()]
        assert not any(secret in content for content in contents)
        assert {len(content) for content in contents} == {SEGMENT}
        assert store.volume.discard_leftovers().segments == 0
        assert store.get(b"new") == b"value"
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert store.stats().dropped == {}
        assert store.get(b"new") == b"value"


def test_a_namespace_is_removed_whole_or_says_what_is_in_the_way(
    closed: Path, tmp_path: Path
) -> None:
    with open_store(tmp_path), pytest.raises(StoreLockedError):
        remove_namespace(str(closed))
    (closed / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="move away what is not of the store"):
        remove_namespace(str(closed))
    assert [path.name for path in closed.iterdir()] == ["notes.txt"]
    (closed / "notes.txt").unlink()
    remove_namespace(str(closed))
    assert not closed.exists()
    assert closed.parent.exists()
