"""Family C of the fault cases: I/O errors and space. C15 is in test_sweep.py.

C16 to C18 speak of pinned and device memory and of KvikIO as well: see tests/core/test_tiers.py and
tests/core/test_gds.py.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
from keyed_stores import (
    SEGMENT,
    Hang,
    content,
    descriptors,
    in_child,
    open_store,
    segment_files,
)

from tierstore.codecs import ShuffleZstdCodec
from tierstore.errors import CapacityError, ConfigError, TierOfflineError
from tierstore.io import FileIO
from tierstore.testing.faults import FaultIO, error, short
from tierstore.volume import Volume
from tierstore.volume.files import SegmentFiles
from tierstore.volume.format import KeyFields
from tierstore.volume.manifest import Commit, Manifest
from tierstore.volume.records import Records
from tierstore.volume.segment import Segment
from tierstore.volume.space import FreePlaces, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

    from tierstore.interfaces import Bytes
    from tierstore.keyed import KeyedStore
    from tierstore.testing.faults import Call

KEYS = [b"key %d" % i for i in range(8)]
VALUES = [content(i, 5000) for i in range(8)]


class Overlay(FileIO):
    """A file system without direct reads."""

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here", path)
        return super().open(path, flags)


class BadSector(FileIO):
    """A disk that cannot read at one offset of its files."""

    bad = -1

    def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
        return self.read_into(fd, [buffer], offset)

    def read_into(self, fd: int, buffers: Sequence[WriteableBuffer], offset: int) -> int:
        if offset <= self.bad < offset + sum(memoryview(buffer).nbytes for buffer in buffers):
            raise OSError(errno.EIO, "a bad sector")
        return super().read_into(fd, buffers, offset)


@pytest.fixture
def io(tmp_path: Path) -> FaultIO:
    return FaultIO(tmp_path)


@pytest.fixture
def store(tmp_path: Path, io: FaultIO) -> Iterator[KeyedStore]:
    """Eight values on disk, none in memory."""
    with open_store(tmp_path / "s", io=io) as store:
        assert store.put_many(KEYS, VALUES).all()
        yield store
        io.heal()
        if not store.is_closed:
            store.validate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class TestNoSpace:
    def test_a_full_disk_refuses_the_put_and_serves_again_when_there_is_room(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """C1."""
        io.inject("write", error(errno.ENOSPC))
        for number in range(20):
            assert not store.put(b"new %d" % number, content(number, 5000 * (number % 4)))
        assert list(store.keys(b"new")) == []
        assert store.get_many(KEYS) == VALUES
        assert sum(store.stats().refused.values()) == 20
        io.heal()
        assert store.put(b"new", VALUES[0])
        assert store.get(b"new") == VALUES[0]
        store.sync()
        assert not store.stats().is_offline

    def test_what_the_system_says_of_a_full_device_is_a_refusal(self, tmp_path: Path) -> None:
        """C1."""

        class Full(FileIO):
            is_full = False

            def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
                if not self.is_full:
                    return super().write(fd, buffers, offset)
                full = os.open("/dev/full", os.O_WRONLY)
                try:
                    return os.pwritev(full, buffers, 0)
                finally:
                    os.close(full)

        io = Full()
        with open_store(tmp_path / "s", io=io) as store:
            assert store.put(b"a", b"1")
            io.is_full = True
            assert not store.put(b"b", b"2")
            assert store.get_many([b"a", b"b"]) == [b"1", None]
            assert store.stats().errors["ENOSPC"] > 0
            io.is_full = False
            assert store.put(b"b", b"2")

    def test_a_disk_that_others_filled_takes_values_and_syncs(self, small_disk: Path) -> None:
        """C1, C4."""
        with open_store(small_disk / "s", disk="1MiB") as store:
            filler = small_disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as stream:
                while stream.write(bytes(1 << 16)):
                    pass
            assert FileIO().free_bytes(str(small_disk)) < 1 << 16
            for round_ in range(3):
                keys = [b"%d %d" % (round_, i) for i in range(100)]
                assert store.put_many(keys, [content(i, 3000) for i in range(100)]).all()
                store.sync()
        with open_store(small_disk / "s", disk="1MiB") as store:
            assert store.get(b"2 99") == content(99, 3000)

    def test_a_full_map_of_the_directory_grows(self, tmp_path: Path) -> None:
        """C2."""
        tmp_path.joinpath("d").mkdir()
        manifest = Manifest(FileIO(), str(tmp_path / "d"), b"i" * 16, 1 << 20, read_only=False)
        groups = {(0, group): (1, bytes(16)) for group in range(3000)}
        manifest.commit(Commit(1, 1, is_clean=True), groups)
        assert manifest.load() == (Commit(1, 1, is_clean=True), groups, 0)
        manifest.close()

    def test_a_directory_at_its_limit_keeps_its_latest_commit(self, tmp_path: Path) -> None:
        """C2."""
        tmp_path.joinpath("d").mkdir()
        manifest = Manifest(FileIO(), str(tmp_path / "d"), b"i" * 16, 1 << 17, read_only=False)
        before = {(0, 0): (1, b"b" * 16)}
        manifest.commit(Commit(1, 1, is_clean=True), before)
        groups = {(0, group): (1, bytes(16)) for group in range(5000)}
        with pytest.raises(OSError, match=r"the directory is full at its limit of 131072 bytes"):
            manifest.commit(Commit(1, 2, is_clean=True), groups)
        assert manifest.load() == (Commit(1, 1, is_clean=True), before, 0)
        manifest.commit(Commit(1, 3, is_clean=False), {})
        assert manifest.nbytes <= 1 << 17
        manifest.close()

    @pytest.mark.parametrize(
        "call",
        [
            Manifest.load, Manifest.all_keys, Manifest.damaged_keys,
            lambda manifest: manifest.known(0, [0, 1]),
            lambda manifest: manifest.forget([0]),
            lambda manifest: manifest.remove([b"m"]),
            lambda manifest: manifest.commit(Commit(1, 1, is_clean=True), {}),
        ],
    )  # fmt: skip
    def test_what_lmdb_cannot_do_is_an_error_of_the_system(
        self, tmp_path: Path, call: Callable[[Manifest], object]
    ) -> None:
        """C11. Whatever LMDB says, callers see an OSError."""
        manifest = Manifest(FileIO(), str(tmp_path), b"i" * 16, 1 << 20, read_only=False)
        manifest.close()
        with pytest.raises(OSError, match="directory"):
            call(manifest)

    def test_a_map_that_cannot_grow_is_an_error_of_the_system(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C2."""

        class Rigid:
            def __init__(self, environment: lmdb.Environment) -> None:
                self.begin, self.info = environment.begin, environment.info

            def set_mapsize(self, size: int) -> None:
                raise lmdb.Error("no such mapping")

        manifest = Manifest(FileIO(), str(tmp_path), b"i" * 16, 1 << 20, read_only=False)
        environment = manifest._env
        monkeypatch.setattr(manifest, "_env", Rigid(environment))
        groups = {(0, group): (1, bytes(16)) for group in range(3000)}
        with pytest.raises(OSError, match=r"was not written \(no such mapping"):
            manifest.commit(Commit(1, 1, is_clean=True), groups)
        environment.close()

    def test_a_disk_without_room_is_refused_when_the_store_opens(self, small_disk: Path) -> None:
        """C3."""
        free = FileIO().free_bytes(str(small_disk))
        with pytest.raises(CapacityError, match=r"disk/s.*4\.0 MiB are needed, .* MiB are free"):
            open_store(small_disk / "s", disk="4160KiB")
        assert list(small_disk.rglob("*.seg")) == []
        assert FileIO().free_bytes(str(small_disk)) > free - (1 << 18)
        open_store(small_disk / "s").close()

    def test_a_disk_that_fills_while_files_are_made_is_refused(self, small_disk: Path) -> None:
        """C3. Other programs take what was free a moment ago."""

        class Hopeful(FileIO):
            def free_bytes(self, path: str) -> int:
                return 1 << 40

        with pytest.raises(CapacityError, match=r"\.seg': 64\.0 KiB are needed"):
            open_store(small_disk / "s", disk="4MiB", io=Hopeful())
        assert descriptors(small_disk) == set()
        shutil.rmtree(small_disk / "s")
        open_store(small_disk / "s").close()

    def test_a_limit_on_file_sizes_is_a_capacity_error(self, tmp_path: Path) -> None:
        """C3."""
        script = """
            import resource, sys, pathlib
            from keyed_stores import open_store
            from tierstore.errors import CapacityError
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))
            try:
                open_store(pathlib.Path(sys.argv[1]), disk="4MiB", segment="1MiB")
            except CapacityError as error:
                print(error)
            with open_store(pathlib.Path(sys.argv[1]), disk="512KiB", segment="128KiB") as store:
                print(store.put(b"a", b"1"), store.get(b"a"))
        """
        child = in_child(script, tmp_path / "s")
        assert "1.0 MiB are needed" in child.stdout, child.stderr
        assert "True b'1'" in child.stdout, child.stderr

    def test_all_bytes_are_reserved_when_the_store_opens(self, tmp_path: Path) -> None:
        """C4."""
        with open_store(tmp_path / "s") as store:
            files = [Path(path).stat() for path in segment_files(store)]
            assert len(files) == 7
            assert [(file.st_size, file.st_blocks * 512) for file in files] == [
                (SEGMENT, SEGMENT)
            ] * 7


class TestReads:
    def test_one_failed_read_is_a_miss_and_no_more(self, store: KeyedStore, io: FaultIO) -> None:
        """C5."""
        io.inject("read", error(errno.EIO), nth=1)
        assert store.get(KEYS[0]) is None
        stats = store.stats()
        assert (stats.errors["EIO"], stats.misses["io"]) == (1, 1)
        assert store.get_many(KEYS) == VALUES

    def test_a_read_that_fails_costs_no_neighbour(self, tmp_path: Path) -> None:
        """C5. Values next to each other are read in one call."""

        io = BadSector()
        with open_store(tmp_path / "s", io=io) as store:
            store.put_many(KEYS, VALUES)
            place = int(store.volume.records.find(KeyFields(KEYS[3:4]))[0])
            io.bad = store.volume.files.of(place).offset(place)
            assert store.get_many(KEYS) == [*VALUES[:3], None, *VALUES[4:]]

    def test_a_check_keeps_what_the_disk_cannot_read(self, tmp_path: Path) -> None:
        """C5. An error of the disk says nothing about the bytes: they may be right."""
        io = BadSector()
        with open_store(tmp_path / "s", io=io) as store:
            store.put_many(KEYS, VALUES)
            place = int(store.volume.records.find(KeyFields(KEYS[3:4]))[0])
            io.bad = store.volume.files.of(place).offset(place)
            for fix in (True, False, True):
                (finding,) = store.check(fix=fix)
                assert (finding.kind, finding.is_fixed) == ("unreadable", False)
            assert KEYS[3] in store
            io.bad = -1
            assert store.check() == []
            assert store.get_many(KEYS) == VALUES

    def test_a_check_reads_again_what_failed_once(self, store: KeyedStore, io: FaultIO) -> None:
        """C5."""
        offset = store.volume.files.of(int(store.volume.records.live_places()[0])).header
        failures: list[int] = []

        def fail_once(call: Call) -> None:
            if call.offset >= offset.data_offset and not failures:
                failures.append(call.offset)
                raise OSError(errno.EIO, "once")

        io.inject("read", fail_once)
        assert store.check(fix=True) == []
        assert failures
        assert store.get_many(KEYS) == VALUES

    def test_a_disk_that_fails_all_the_time_goes_offline_and_memory_serves_on(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C6."""
        with open_store(tmp_path / "s", io=io, dram="128KiB") as store:
            store.put_many(KEYS, VALUES)
            assert store.get(KEYS[0]) == VALUES[0]
            io.inject("read write sync", error(errno.EIO))
            assert store.get_many(KEYS[1:]) == [None] * 7
            assert store.get(KEYS[1]) is None
            assert store.stats().is_offline
            reads = io.counts["read"]
            assert store.get_many(KEYS) == [VALUES[0]] + [None] * 7
            assert io.counts["read"] == reads
            assert not store.put(b"new", b"1")
            assert store.stats().refused["offline"] == 1
            with pytest.raises(TierOfflineError, match="failed too often and is offline"):
                store.delete(KEYS[0])
            with pytest.raises(TierOfflineError, match="is offline"):
                store.sync()
            io.heal()
        with open_store(tmp_path / "s", io=io) as store:
            assert store.get_many(KEYS) == VALUES

    def test_late_reads_do_not_take_a_disk_offline(self, store: KeyedStore) -> None:
        """C6. A deadline that is too short says nothing about the disk."""
        for _ in range(20):
            store.get(KEYS[0], deadline=0)
        assert not store.stats().is_offline
        assert store.put(b"new", b"1")


class TestSync:
    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    def test_a_failed_sync_promises_nothing_and_the_next_one_everything(
        self, store: KeyedStore, io: FaultIO, tmp_path: Path, code: int
    ) -> None:
        """C7, C8. A second sync of the same file would succeed without what the first one lost."""
        store.sync()
        store.put(b"later", b"after the sync")
        io.inject("sync", error(code), nth=1)
        with pytest.raises(OSError, match="could not be synced") as raised:
            store.sync()
        assert raised.value.errno == code
        assert store.get_many([*KEYS, b"later"]) == [*VALUES, b"after the sync"]
        store.sync()
        io.crash(tmp_path / "after", keep="none")
        with open_store(tmp_path / "after" / "s") as after:
            assert after.get_many([*KEYS, b"later"]) == [*VALUES, b"after the sync"]

    def test_a_failed_sync_leaves_what_an_earlier_one_promised(
        self, store: KeyedStore, io: FaultIO, tmp_path: Path
    ) -> None:
        """C8. The power goes before the next sync."""
        store.sync()
        store.put(b"later", b"after the sync")
        io.inject("sync", error(errno.EIO), nth=1)
        with pytest.raises(OSError, match="could not be synced"):
            store.sync()
        io.crash(tmp_path / "after", keep="random", seed=3)
        with open_store(tmp_path / "after" / "s") as after:
            assert after.get(b"later") in (None, b"after the sync")
            found = after.get_many(KEYS)
            assert [value for value in found if value is not None] == [
                v for v, there in zip(VALUES, found, strict=True) if there is not None
            ]

    def test_a_file_whose_sync_failed_is_replaced(self, store: KeyedStore, io: FaultIO) -> None:
        """C7."""
        before = {path: os.stat(path).st_ino for path in segment_files(store)}
        io.inject("sync", error(errno.EIO), nth=1)
        with pytest.raises(OSError, match="could not be synced"):
            store.sync()
        after = {path: os.stat(path).st_ino for path in segment_files(store)}
        assert after.keys() == before.keys()
        assert sum(after[path] != before[path] for path in after) == 1
        assert store.get_many(KEYS) == VALUES

    def test_moving_a_failed_file_holds_one_value_at_a_time(self, tmp_path: Path) -> None:
        """C7. However much is in the file: each value is written before the next one is read."""

        class Order(FaultIO):
            order = ""

            def read(self, fd: int, buffer: WriteableBuffer, offset: int) -> int:
                self.order += "r" * (memoryview(buffer).nbytes == 8192)
                return super().read(fd, buffer, offset)

            def write(self, fd: int, buffers: Sequence[ReadableBuffer], offset: int) -> int:
                self.order += "w" * (sum(memoryview(buffer).nbytes for buffer in buffers) == 8192)
                return super().write(fd, buffers, offset)

        io, keys = Order(tmp_path), [*KEYS[:6], b"k" * 300]
        with open_store(tmp_path / "s", io=io) as store:
            store.sync()
            assert store.put_many(keys, VALUES[:7]).all()
            io.inject("sync", error(errno.EIO), nth=1)
            io.order = ""
            with pytest.raises(OSError, match="could not be synced"):
                store.sync()
            assert io.order == "rw" * 7
            assert store.get_many(keys) == VALUES[:7]
            store.validate()
        with open_store(tmp_path / "s") as store:
            assert store.get_many(keys) == VALUES[:7]

    def test_a_failed_sync_of_an_emptied_file_harms_nothing(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C7. Files that `clear` emptied are dirty too, and so are those that somebody reads."""
        with open_store(tmp_path / "s", io=io) as store:
            store.put_many(KEYS, VALUES)
            lease = store.lease_many(KEYS, owner="test", seconds=60)
            store.clear()
            io.inject("sync", error(errno.EIO))
            with pytest.raises(OSError, match=r"could not be synced|offline"):
                store.sync()
            io.heal()
            assert [bytes(view) for view in lease.values if view is not None] == VALUES
            lease.release()
            store.validate()

    def test_values_in_files_that_a_resize_added_survive_a_power_loss(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C7. Their names must be durable too."""
        keys = [b"%d" % i for i in range(20)]
        values = [content(i, 16_000) for i in range(20)]
        with open_store(tmp_path / "s", io=io, disk="128KiB") as store:
            store.resize(disk="1MiB")
            assert store.put_many(keys, values).all()
            store.sync()
            io.crash(tmp_path / "after", keep="none")
        with open_store(tmp_path / "after" / "s", disk="1MiB") as after:
            assert after.get_many(keys) == values

    def test_what_a_killed_process_wrote_is_durable_after_the_next_one_syncs(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C7. The next process did not write it, but it can read it."""
        first = open_store(tmp_path / "s", io=io)
        first.put_many(KEYS, VALUES)
        first.volume.abandon()
        with open_store(tmp_path / "s", io=io) as second:
            assert second.get_many(KEYS) == VALUES
            second.sync()
            io.crash(tmp_path / "after", keep="none")
        with open_store(tmp_path / "after" / "s") as after:
            assert after.get_many(KEYS) == VALUES


class TestTransfers:
    @pytest.mark.parametrize("most", [97, 511, 4096])
    def test_short_transfers_are_continued(self, tmp_path: Path, most: int) -> None:
        """C9."""
        io = FaultIO(tmp_path, Overlay())  # direct transfers end at sectors only
        io.inject("read write", short(most))
        with open_store(tmp_path / "s", io=io, disk="192KiB") as store:
            assert store.put_many(KEYS[:2], [VALUES[0][:600], VALUES[1][:5]]).all()
            assert store.get_many(KEYS[:2]) == [VALUES[0][:600], VALUES[1][:5]]

    @pytest.mark.parametrize("interruption", [InterruptedError, BlockingIOError])
    def test_interrupted_transfers_are_repeated(
        self, store: KeyedStore, io: FaultIO, interruption: type[OSError]
    ) -> None:
        """C9."""

        def interrupt(call: Call) -> None:
            raise interruption

        fault = io.inject("read write", interrupt, one_in=2)
        assert store.put(b"new", VALUES[0])
        assert store.get_many([*KEYS, b"new"]) == [*VALUES, VALUES[0]]
        assert fault.hits > 0
        assert store.stats().errors == {}

    def test_a_write_without_progress_is_refused(self, store: KeyedStore, io: FaultIO) -> None:
        """C9."""
        io.inject("write", short(0), nth=1)
        assert not store.put(b"new", b"1")
        assert store.get(b"new") is None
        assert store.put(b"new", b"1")

    def test_a_read_that_ends_too_soon_is_a_miss(self, store: KeyedStore, io: FaultIO) -> None:
        """C9."""
        io.inject("read", short(0), nth=1)
        assert store.get(KEYS[0]) is None
        assert store.get(KEYS[0]) == VALUES[0]

    def test_a_close_that_fails_is_counted_and_closes_the_rest(self, tmp_path: Path) -> None:
        """C10. Each descriptor is closed once: a second time it may be somebody else's."""

        class Failing(FileIO):
            is_broken = False

            def close(self, fd: int) -> None:
                super().close(fd)
                if self.is_broken:
                    raise OSError(errno.EIO, "the last write failed")

        io = Failing()
        store = open_store(tmp_path / "s", io=io)
        store.put_many(KEYS, VALUES)
        store.sync()
        io.is_broken = True
        store.close()
        assert store.stats().errors["EIO"] == 7
        assert descriptors(tmp_path) == set()
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES

    @pytest.mark.parametrize("kind", ["rename", "sync_directory"])
    def test_a_clear_that_fails_changes_nothing_even_after_a_sync(
        self, store: KeyedStore, io: FaultIO, tmp_path: Path, kind: str
    ) -> None:
        """C11. The new epoch may be on disk already; a good sync must take it back."""
        io.inject(kind, error(errno.EIO), nth=1)
        with pytest.raises(OSError, match="injected"):
            store.clear()
        assert store.get_many(KEYS) == VALUES
        assert store.put(b"new", b"1")
        store.sync()
        for keep in ("none", "all"):
            io.crash(tmp_path / keep, keep=keep)
            with open_store(tmp_path / keep / "s") as after:
                assert after.get_many([*KEYS, b"new"]) == [*VALUES, b"1"]
        store.clear()
        assert len(store) == 0

    def test_a_file_that_cannot_be_removed_never_shows_its_values_again(
        self, store: KeyedStore, io: FaultIO, tmp_path: Path
    ) -> None:
        """C11."""
        io.inject("remove", error(errno.EIO))
        with pytest.raises(OSError, match="injected"):
            store.resize(disk="128KiB")
        there = set(store.keys())
        store.delete_many(KEYS)
        io.heal()
        store.sync()
        store.close()
        with open_store(tmp_path / "s") as again:
            assert set(again.keys()) == there - set(KEYS)
            assert again.stats().disk_bytes <= 512 << 10


class TestDescriptors:
    def test_too_many_open_files_are_an_error_that_leaks_none(self, tmp_path: Path) -> None:
        """C12."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
            before, limits = descriptors(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
            for most in range(len(os.listdir("/proc/self/fd")) + 12, 0, -3):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
                try:
                    open_store(tmp_path / "other").close()
                except (OSError, ValueError):
                    pass
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                assert descriptors(tmp_path) == before
            assert store.get_many(KEYS) == VALUES
        open_store(tmp_path / "other").close()

    def test_too_many_open_files_lose_no_value(self, tmp_path: Path, io: FaultIO) -> None:
        """C12. What cannot be opened now is not damaged."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
        io.inject("open", error(errno.EMFILE), name="*.seg")
        with pytest.raises(OSError, match="injected"):
            open_store(tmp_path / "s", io=io)
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES

    def test_too_many_open_files_are_no_damage_to_the_directory(self, tmp_path: Path) -> None:
        """C12. LMDB opens its own files, and says in its own way that it cannot."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
        (file,) = tmp_path.rglob("data.mdb")
        before, limits = file.stat().st_ino, resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        refusals = []
        for most in range(1, highest + 20):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
            try:
                open_store(tmp_path / "s").close()
            except OSError as failure:
                refusals.append(str(failure))
            except ConfigError:
                pass
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert file.stat().st_ino == before
        assert any("data.mdb' cannot be opened" in refusal for refusal in refusals)
        with open_store(tmp_path / "s") as store:
            assert store.get_many(KEYS) == VALUES
            assert store.stats().dropped == {}

    def test_ten_thousand_calls_leave_no_descriptor_behind(self, tmp_path: Path) -> None:
        """C12."""
        with open_store(tmp_path / "s", dram="128KiB") as store:
            before = descriptors(tmp_path)
            keys = [b"%d" % i for i in range(100)]
            for round_ in range(50):
                store.put_many(keys, [content(round_, 500)] * 100)
                store.get_many(keys)
                if round_ % 10 == 0:
                    store.sync()
            assert descriptors(tmp_path) == before


class TestHangingDisk:
    """C13. Nothing here waits for a time to pass but the deadlines themselves."""

    def test_a_get_gives_up_at_its_deadline_and_others_go_on(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """C13."""
        hang = Hang()
        io.inject("read", hang.effect, nth=1)
        assert store.get(KEYS[0], deadline=0.05) is None
        assert store.stats().misses == {"deadline": 1}
        assert store.get_many(KEYS[1:]) == VALUES[1:]
        assert store.put(b"new", b"1")
        hang.release()
        assert store.get_many(KEYS) == VALUES

    def test_the_buffer_of_a_late_read_is_not_used_for_others(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """C13. What arrives late must not land in another value."""
        hangs = [Hang() for _ in range(4)]
        for hang in hangs:
            io.inject("read", hang.effect, nth=1)
            assert store.get(KEYS[0], deadline=0.01) is None
            hang.wait()
            io.heal()
        out = np.zeros((7, 5000), np.uint8)
        for hang in hangs:
            store.get_into(KEYS[1:], out)
            hang.release()
            assert [row.tobytes() for row in out] == VALUES[1:]
        assert store.get_many(KEYS) == VALUES

    def test_a_put_that_hangs_is_refused_and_never_seen(
        self, store: KeyedStore, io: FaultIO
    ) -> None:
        """C13."""
        hang = Hang()
        io.inject("write", hang.effect, nth=1)
        assert not store.put(b"new", VALUES[0], deadline=0.05)
        assert store.get_many(KEYS) == VALUES
        before = [thread for thread in threading.enumerate() if thread.name == "tierstore-put"]
        hang.release()
        for thread in before:
            thread.join(60)
        assert store.get(b"new") is None
        assert store.stats().refused["deadline"] == 1
        assert store.put(b"new", VALUES[0])

    def test_every_deadline_holds_while_a_table_is_written_for_ever(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C13. Tables are written under the lock, so everybody waits for them."""
        store = open_store(tmp_path / "s", io=io, dram="128KiB")
        store.put_many(KEYS, VALUES)
        store.get_many(KEYS)
        hang = Hang()
        io.inject("write", hang.effect, nth=2)
        assert not store.put(b"new", b"1", deadline=0.05)
        hang.wait()
        assert store.get(KEYS[0], deadline=0.05) is None
        assert not store.put(b"other", b"1", deadline=0.05)
        assert len(store.lease_many(KEYS, owner="test", seconds=9, deadline=0.05)) == 0
        with pytest.raises(TierOfflineError, match=r"sync was not done within 0\.05 seconds"):
            store.sync(deadline=0.05)
        with pytest.raises(TierOfflineError, match=r"close was not done within 0\.05 seconds"):
            store.close(deadline=0.05)
        with pytest.raises(ConfigError, match="the store is closed"):
            store.get(KEYS[0])
        stays = "tierstore-kernel"
        closing = [
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("tierstore-") and not thread.name.startswith(stays)
        ]
        hang.release()
        for thread in closing:
            thread.join(60)
        with open_store(tmp_path / "s") as again:
            assert again.get_many(KEYS) == VALUES

    def test_a_sync_that_hangs_can_be_called_again(self, store: KeyedStore, io: FaultIO) -> None:
        """C13."""
        hang = Hang()
        io.inject("sync", hang.effect, nth=1)
        with pytest.raises(TierOfflineError, match="sync was not done"):
            store.sync(deadline=0.05)
        assert store.get_many(KEYS) == VALUES
        assert store.put(b"new", b"1")
        hang.release()
        store.sync(deadline=60)

    def test_prefetches_that_wait_are_bounded(self, tmp_path: Path, io: FaultIO) -> None:
        """C13."""
        with open_store(tmp_path / "s", io=io, dram="128KiB") as store:
            store.put_many(KEYS, VALUES)
            hang = Hang()
            io.inject("read", hang.effect, nth=1)
            first = store.prefetch([KEYS[0]])
            hang.wait()
            others = [store.prefetch([KEYS[i % 8]]) for i in range(64)]
            with pytest.raises(CapacityError, match="64 prefetches wait already"):
                store.prefetch(KEYS)
            assert not first.wait(0)
            hang.release()
            assert all(prefetch.wait(60) for prefetch in [first, *others])
            assert store.stats().hits["disk"] + store.stats().hits["dram"] >= 65
            store.validate()

    def test_large_values_wait_no_longer_than_their_deadline(
        self, tmp_path: Path, io: FaultIO
    ) -> None:
        """C13. Of values that need a buffer of their own one is under way at a time."""
        large = content(1, 3 << 20)
        with open_store(tmp_path / "s", disk="20MiB", segment="4MiB", io=io) as store:
            assert store.put_many([b"a", b"b"], [large, large]).all()
            hang = Hang()
            io.inject("read", hang.effect, nth=1)
            reader = threading.Thread(target=store.get, args=[b"a"])
            reader.start()
            hang.wait()
            assert store.get(b"b", deadline=0.05) is None
            hang.release()
            reader.join(60)
            assert store.get(b"b") == large


class TestPermission:
    def test_a_store_for_reading_serves_and_refuses_changes(self, tmp_path: Path) -> None:
        """C14."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*.seg")}
        message = "the store is open for reading only: open it with read_only=False"
        with open_store(tmp_path / "s", read_only=True, dram="128KiB") as store:
            assert store.get_many(KEYS) == VALUES
            for change in (
                lambda: store.put(b"a", b"1"),
                lambda: store.delete(KEYS[0]),
                store.clear,
                store.sync,
                lambda: store.resize(disk="1MiB"),
                lambda: store.check(fix=True),
            ):
                with pytest.raises(ConfigError) as raised:
                    change()
                assert str(raised.value) == message
            assert store.get_many(KEYS) == VALUES
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.seg")} == files

    def test_several_may_read_one_directory(self, tmp_path: Path) -> None:
        """C14."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
        with (
            open_store(tmp_path / "s", read_only=True) as one,
            open_store(tmp_path / "s", read_only=True) as two,
        ):
            assert one.get_many(KEYS) == two.get_many(KEYS) == VALUES

    def test_there_must_be_something_to_read(self, tmp_path: Path) -> None:
        """C14."""
        with pytest.raises(ConfigError, match="found nothing"):
            open_store(tmp_path / "s", read_only=True)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(os.getuid() != 0, reason="becoming somebody else needs root")
    def test_a_directory_that_may_not_be_written_is_refused(self, tmp_path: Path) -> None:
        """C14."""
        with open_store(tmp_path / "s") as store:
            store.put_many(KEYS, VALUES)
        script = """
            import os, sys, pathlib
            from keyed_stores import open_store
            os.setuid(65534)
            for path in sys.argv[1:]:
                try:
                    open_store(pathlib.Path(path))
                except ValueError as error:
                    print(type(error).__name__, error)
        """
        for parent in [tmp_path, *tmp_path.parents[:3]]:
            parent.chmod(0o755)
        child = in_child(script, tmp_path / "s", tmp_path / "new")
        lines = child.stdout.splitlines()
        assert len(lines) == 2, child.stderr
        for line in lines:
            assert line.startswith("ConfigError path="), child.stderr
            assert "Permission denied" in line


class TestMemory:
    def test_a_value_that_cannot_be_coded_for_lack_of_memory_is_refused(
        self, tmp_path: Path
    ) -> None:
        """C16."""

        class Greedy(ShuffleZstdCodec):
            calls = 0

            def encode(self, blocks: Bytes) -> Bytes:
                self.calls += 1
                if self.calls == 3:
                    raise MemoryError
                return super().encode(blocks)

        with open_store(tmp_path / "s", codec=Greedy()) as store:
            assert store.put(b"old", b"1")
            free = len(store.volume._space.all_free())
            assert store.put_many(KEYS[:3], VALUES[:3]).tolist() == [False] * 3
            assert store.stats().refused == {"memory": 3}
            assert len(store.volume._space.all_free()) == free
            store.validate()
            assert store.put_many(KEYS[:3], VALUES[:3]).all()
            assert store.get_many(KEYS[:3]) == VALUES[:3]

    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (Records, "find"), (Records, "enter"), (Records, "touch"), (Records, "withdraw"),
            (Space, "victims"), (Space, "coldest"), (FreePlaces, "pop"),
            (Volume, "kill"), (Volume, "write_rows"), (Segment, "write_rows"),
            (SegmentFiles, "runs"), (SegmentFiles, "begin"), (SegmentFiles, "live"),
        ],
        ids=str,
    )  # fmt: skip
    def test_a_put_that_runs_out_of_memory_anywhere_leaves_the_store_in_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
    ) -> None:
        """C16. In each call in turn: of two sizes, over old values, with others to evict."""
        real, hits = getattr(kind, name), 1
        sizes = [5000, 12_000, 300, 5000, 12_000, 300, 5000]
        keys = [*KEYS[:4], b"new 1", b"new 2", b"k" * 300]
        values = [content(50 + i, size) for i, size in enumerate(sizes)]
        number = 0
        while hits:
            number += 1
            hits, calls = 0, 0

            def fail(*arguments: Any) -> Any:  # noqa: ANN401
                nonlocal calls, hits
                calls += 1
                if calls == number:  # noqa: B023
                    hits += 1
                    raise MemoryError("injected")
                return real(*arguments)

            with open_store(tmp_path / str(number), disk="320KiB") as store:
                old = dict(zip(KEYS, VALUES, strict=True))
                filling = {b"x %d" % i: content(i, 5000) for i in range(24)}
                store.put_many(list(filling), list(filling.values()))
                store.put_many(KEYS, VALUES)
                with monkeypatch.context() as patch:
                    patch.setattr(kind, name, fail)
                    done = store.put_many(keys, values)
                assert not store.volume.records.pins.any()
                store.validate()
                assert "space" not in {finding.kind for finding in store.check()}
                for key, value, is_done in zip(keys, values, done.tolist(), strict=True):
                    assert store.get(key) in ((value,) if is_done else (old.get(key), None))
                assert hits == (not done.all())
                assert store.put_many(keys, values).all()
                assert store.get_many(keys) == values
        assert number > 1, "it is not called at all"

    def test_memory_that_the_machine_does_not_have_leaves_no_store_behind(
        self, tmp_path: Path
    ) -> None:
        """C16."""
        with pytest.raises(CapacityError, match="this machine does not give a process"):
            open_store(tmp_path / "s", dram=1 << 60)
        assert descriptors(tmp_path) == set()
        open_store(tmp_path / "s").close()


class TestDirectReads:
    def test_a_file_system_without_direct_reads_is_read_through_its_cache(
        self, tmp_path: Path
    ) -> None:
        """C19."""

        with open_store(tmp_path / "s", io=Overlay()) as store:
            store.put_many(KEYS, VALUES)
            assert store.get_many(KEYS) == VALUES
            assert store.stats().reads == "buffered"

    def test_a_direct_read_that_fails_when_probed_falls_back(self, tmp_path: Path) -> None:
        """C19. Some file systems take the flag and refuse the read."""

        class Odd(FileIO):
            def __init__(self) -> None:
                self.direct: set[int] = set()

            def open(self, path: str, flags: int) -> int:
                fd = super().open(path, flags)
                (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
                return fd

            def read(self, fd: int, buffer: object, offset: int) -> int:
                if fd in self.direct:
                    raise OSError(errno.EINVAL, "no direct reads here")
                return super().read(fd, buffer, offset)  # type: ignore[arg-type]

        with open_store(tmp_path / "s", io=Odd()) as store:
            store.put_many(KEYS, VALUES)
            assert store.get_many(KEYS) == VALUES
            assert store.stats().reads == "buffered"
        assert descriptors(tmp_path) == set()

    @pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, 4097, 9999])
    def test_direct_reads_return_values_of_any_length(self, tmp_path: Path, size: int) -> None:
        """C19."""
        with open_store(tmp_path / "s") as store:
            long_key = b"k" * 300
            store.put_many([b"a", long_key], [content(0, size), content(1, size)])
            assert store.get_many([b"a", long_key]) == [content(0, size), content(1, size)]
