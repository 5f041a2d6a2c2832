"""The stores that ours is measured against, each used the best way that it offers."""

from __future__ import annotations

import os
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import lmdb

from tierstore.benchmarks.contender import Contender, Get, Look, Put, Room, Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAP_SLACK = 1 << 30
_FILE_BYTES = 32 << 10


class Lmdb(Contender):
    """LMDB, with one transaction for each call."""

    name = "lmdb"
    about = (
        "copies out of its map; a commit for each batch of puts, made durable by sync=True; "
        "no checksums"
    )

    def __init__(self, room: Room) -> None:
        room.folder.mkdir(parents=True, exist_ok=True)
        size = 2 * room.capacity + _MAP_SLACK
        self._environment = lmdb.open(str(room.folder), map_size=size, sync=room.is_durable)

    def gets(self) -> Mapping[str, Get]:
        return {
            "": self._get,
            " batch": self._get_batch,
            " bytes": self._get_bytes,
            " view": self._view,
            " view batch": self._view_batch,
        }

    def puts(self) -> Mapping[str, Put]:
        return {"": self._put, " batch": self._put_batch}

    def _get(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        begin = partial(self._environment.begin, buffers=True)
        for key, row in zip(keys, rows.views, strict=False):
            with begin() as transaction:
                row[:] = transaction.get(key, b"")

    def _get_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        with self._environment.begin(buffers=True) as transaction:
            get = transaction.get
            for key, row in zip(keys, rows.views, strict=False):
                row[:] = get(key, b"")

    def _get_bytes(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key in keys:
            with self._environment.begin() as transaction:
                look((transaction.get(key),))

    def _view(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        begin = partial(self._environment.begin, buffers=True)
        for key in keys:
            with begin() as transaction:
                look((transaction.get(key),))

    def _view_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        with self._environment.begin(buffers=True) as transaction:
            get = transaction.get
            look([get(key) for key in keys])

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, value in zip(keys, values, strict=True):
                transaction.put(key, value)

    def _put_batch(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(zip(keys, values, strict=True))

    def close(self) -> None:
        self._environment.close()


class DiskCache(Contender):
    """diskcache as it comes: values from 32 KiB on in files of their own, which it never syncs."""

    name = "diskcache"
    package = "diskcache"
    about = (
        "without eviction; values from 32 KiB on in files of their own, which are never synced; "
        "no checksums"
    )

    _least_file_bytes = _FILE_BYTES

    @classmethod
    def takes_part(cls, block: int, is_durable: bool) -> bool:
        return not is_durable

    def __init__(self, room: Room) -> None:
        cache: Any = import_module("diskcache").Cache
        self._is_durable = room.is_durable
        self._cache = cache(
            str(room.folder),
            eviction_policy="none",
            cull_limit=0,
            size_limit=1 << 50,
            disk_min_file_size=self._least_file_bytes,
            sqlite_mmap_size=2 * room.capacity + _MAP_SLACK,
            # 2 is FULL: the log is synced at each commit. 1 is NORMAL, the default.
            sqlite_synchronous=2 if room.is_durable else 1,
        )

    def gets(self) -> Mapping[str, Get]:
        return {"": self._get, " bytes": self._get_bytes}

    def puts(self) -> Mapping[str, Put]:
        batch: dict[str, Put] = {" batch": self._put_batch}
        return batch if self._is_durable else {"": self._put} | batch

    def _get(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key, row in zip(keys, rows.views, strict=False):
            value = self._cache.get(key, read=True)
            if isinstance(value, bytes):
                row[:] = value
            else:
                with value:
                    value.readinto(row)

    def _get_bytes(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key in keys:
            look((self._cache.get(key),))

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._cache.set(key, value)

    def _put_batch(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        with self._cache.transact():
            self._put(keys, values)

    def close(self) -> None:
        self._cache.close()


class SqliteCache(DiskCache):
    """diskcache with all values in SQLite, where it can make them durable."""

    name = "diskcache-sqlite"
    about = "diskcache with all values in SQLite; made durable by synchronous=FULL; no checksums"

    _least_file_bytes = 1 << 40

    @classmethod
    def takes_part(cls, block: int, is_durable: bool) -> bool:
        return is_durable or block >= _FILE_BYTES


class RocksDict(Contender):
    """RocksDB by way of rocksdict, without compression: the values are incompressible."""

    name = "rocksdict"
    package = "rocksdict"
    about = (
        "RocksDB, raw bytes, no compression; made durable by a synced log; verifies checksums of "
        "what it reads from files, not of its cache"
    )

    _BACKGROUND = (
        "rocksdb.num-running-compactions",
        "rocksdb.compaction-pending",
        "rocksdb.num-running-flushes",
        "rocksdb.mem-table-flush-pending",
    )

    def __init__(self, room: Room) -> None:
        self._module: Any = import_module("rocksdict")
        options = self._module.Options(raw_mode=True)
        options.set_compression_type(self._module.DBCompressionType.none())
        tables = self._module.BlockBasedOptions()
        if room.memory:
            tables.set_block_cache(self._module.Cache(room.memory))
        else:
            tables.disable_cache()
        options.set_block_based_table_factory(tables)
        room.folder.mkdir(parents=True, exist_ok=True)
        self._rows = self._module.Rdict(str(room.folder), options)
        self._writing = self._module.WriteOptions()
        self._writing.sync = room.is_durable

    def gets(self) -> Mapping[str, Get]:
        return {
            "": self._get,
            " batch": self._get_batch,
            " bytes": self._get_bytes,
            " bytes batch": self._get_bytes_batch,
        }

    def puts(self) -> Mapping[str, Put]:
        batch: dict[str, Put] = {" batch": self._put_batch}
        return batch if self._writing.sync else {"": self._put} | batch

    def _get(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        get = self._rows.get
        for key, row in zip(keys, rows.views, strict=False):
            row[:] = get(key)

    def _get_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for row, value in zip(rows.views, self._rows.get(list(keys)), strict=False):
            row[:] = value

    def _get_bytes(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key in keys:
            look((self._rows.get(key),))

    def _get_bytes_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        look(self._rows.get(list(keys)))

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._rows.put(key, value)

    def _put_batch(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        batch = self._module.WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        self._rows.write(batch, self._writing)

    def settle(self) -> None:
        self._rows.flush()
        while any(map(self._rows.property_int_value, self._BACKGROUND)):
            time.sleep(0.005)
        super().settle()

    def close(self) -> None:
        self._rows.close()


class Files(Contender):
    """A file for each value in one directory."""

    name = "files"
    about = (
        "one file for each value, all in one directory, read into the caller's buffer by readv; "
        "made durable by fsync of each file and of the directory; no checksums, not atomic"
    )

    def __init__(self, room: Room) -> None:
        room.folder.mkdir(parents=True, exist_ok=True)
        self._is_durable = room.is_durable
        self._directory = os.open(room.folder, os.O_RDONLY | os.O_DIRECTORY)

    def gets(self) -> Mapping[str, Get]:
        return {"": self._get, " bytes": self._get_bytes}

    def puts(self) -> Mapping[str, Put]:
        return {" batch" if self._is_durable else "": self._put}

    def _get(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        directory = self._directory
        for key, row in zip(keys, rows.views, strict=False):
            file = os.open(key.hex(), os.O_RDONLY, dir_fd=directory)
            os.readv(file, [row])
            os.close(file)

    def _get_bytes(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        size = rows.array.shape[1]
        for key in keys:
            file = os.open(key.hex(), os.O_RDONLY, dir_fd=self._directory)
            look((os.read(file, size),))
            os.close(file)

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        files = (self._written(key, value) for key, value in zip(keys, values, strict=True))
        if self._is_durable:
            self._sync(list(files))
        else:
            for file in files:
                os.close(file)

    def _written(self, key: bytes, value: bytes) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = os.open(key.hex(), flags, 0o600, dir_fd=self._directory)
        os.write(file, value)
        return file

    def _sync(self, files: Iterable[int]) -> None:
        for file in files:
            os.fsync(file)
            os.close(file)
        os.fsync(self._directory)

    def close(self) -> None:
        os.close(self._directory)


PEERS: tuple[type[Contender], ...] = (Lmdb, DiskCache, SqliteCache, RocksDict, Files)


def is_installed(contender: type[Contender]) -> bool:
    """Whether the package is here that a peer needs."""
    return contender.package is None or find_spec(contender.package) is not None
