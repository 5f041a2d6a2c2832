"""The directory of a volume, in LMDB: what each group of rows was at the latest commit.

It is a cache of facts: everything in it can be found again by reading the segment files' tables. It
lets a store open without checking rows one by one, and shows when a table is not what it was.

===========================  ==========================================================
key                          value
===========================  ==========================================================
``m``                        version u32, epoch u64, sequence u64, clean u8
``g`` segment u32 group u32  generation u64, xxh3-128 of the group's rows (keys big-endian)
===========================  ==========================================================

Every value ends with the xxh3-64 of its key and itself, bound to the namespace.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb
import xxhash

from tierstore.errors import CorruptBlockError
from tierstore.identity import FORMAT_VERSION
from tierstore.volume.lmdbfile import used_bytes
from tierstore.volume.segment import reserve

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from tierstore.io import FileIO

FOLDER = "directory"
FILES = ("data.mdb", "lock.mdb")
_META = struct.Struct("<IQQB")
_GROUP = struct.Struct("<Q16s")
_GROUP_KEY = struct.Struct(">sII")
_SMALLEST_MAP = 1 << 16
_NOT_THE_FILE = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ENOSPC,
        errno.EDQUOT, errno.EAGAIN,
    }
)  # fmt: skip
"""Errors that say nothing about what is in a file."""

Groups = dict[tuple[int, int], tuple[int, bytes]]
"""(segment, group) to (generation, digest of its rows)."""


@dataclass(frozen=True)
class Commit:
    """The state of the volume as of a commit."""

    epoch: int
    sequence: int
    is_clean: bool
    """Nothing was written afterwards: tables that differ are damaged."""


class Manifest:
    """The LMDB environment of one volume. Any thread may call.

    CorruptBlockError from the constructor if what is there is no sound LMDB environment: mapping
    such a file could kill the process.
    """

    def __init__(
        self, io: FileIO, directory: str, identity: bytes, most_bytes: int, *, read_only: bool
    ) -> None:
        self._identity = identity
        self._most_bytes = most_bytes
        # LMDB's map must not grow while a transaction is open.
        self._lock = threading.Lock()
        self.path = os.path.join(directory, FOLDER)
        if not os.path.isdir(self.path):
            if read_only:
                raise CorruptBlockError(f"{self.path!r} is missing")
            io.make_directory(self.path)
            io.sync_directory(directory)
        file = os.path.join(self.path, FILES[0])
        is_new = not os.path.lexists(file) or not os.path.getsize(file)
        size = max(_SMALLEST_MAP, 0 if is_new else used_bytes(file))
        try:
            self._env = lmdb.open(
                self.path, map_size=size, mode=0o600, readonly=read_only, max_dbs=0, max_readers=16,
                lock=not read_only,
            )  # fmt: skip
        except lmdb.Error as error:
            if _code(error) in _NOT_THE_FILE:
                raise OSError(_code(error), f"{file!r} cannot be opened ({error})") from error
            raise CorruptBlockError(f"{file!r} is no directory of a store ({error})") from error
        if not read_only:
            try:
                self._reserve(io, file)
                if is_new:
                    io.sync_directory(self.path)
            except BaseException:
                self._env.close()
                raise

    def _reserve(self, io: FileIO, file: str) -> None:
        """Have all bytes that commits may need. OSError, or CapacityError if the disk is full."""
        fd = io.open(file, os.O_RDWR)
        try:
            if io.size(fd) < self._most_bytes:
                reserve(io, fd, file, self._most_bytes)
                io.sync(fd)
        finally:
            io.close(fd)

    @staticmethod
    def discard(io: FileIO, directory: str) -> None:
        """Remove the environment of a volume; rows say everything that it did."""
        for name in FILES:
            with suppress(FileNotFoundError):
                io.remove(os.path.join(directory, FOLDER, name))

    def load(self) -> tuple[Commit | None, Groups, int]:
        """The latest commit, what it says of groups, and how many values were damaged."""
        commit, groups, damaged = None, Groups(), 0
        for key, body in self._entries():
            if body is None:
                damaged += 1
            elif key == b"m":
                version, epoch, sequence, clean = _META.unpack(body)
                if version == FORMAT_VERSION:
                    commit = Commit(epoch, sequence, bool(clean))
            else:
                _, segment, group = _GROUP_KEY.unpack(key)
                groups[segment, group] = _GROUP.unpack(body)
        return commit, groups, damaged

    def damaged_keys(self) -> list[bytes]:
        """Keys whose values do not match their check, or that are none of ours."""
        return [key for key, body in self._entries() if body is None]

    def _entries(self) -> list[tuple[bytes, bytes | None]]:
        """Every key with its value, None for a damaged one."""
        with self._reading() as transaction:
            entries = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
        return [(key, self._checked(key, value)) for key, value in entries]

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """A transaction that changes nothing. CorruptBlockError if LMDB cannot read."""
        try:
            with self._lock, self._env.begin() as transaction:
                yield transaction
        except lmdb.Error as error:
            raise CorruptBlockError(errno.EIO, f"{self.path!r} cannot be read ({error})") from error

    def known(self, segment: int, groups: Iterable[int]) -> Groups:
        """What the latest commit says of some groups of a segment."""
        found = Groups()
        with self._reading() as transaction:
            for group in groups:
                key = _GROUP_KEY.pack(b"g", segment, group)
                body = self._checked(key, bytes(transaction.get(key, b"")))
                if body is not None:
                    found[segment, group] = _GROUP.unpack(body)
        return found

    def all_keys(self) -> list[bytes]:
        """Every key."""
        return [key for key, _ in self._entries()]

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget values, in one durable transaction; OSError, and no change, if that fails."""
        try:
            with self._lock, self._env.begin(write=True) as transaction:
                for key in keys:
                    transaction.delete(key)
        except lmdb.Error as error:
            raise self._failure(error) from error

    def forget(self, segments: Collection[int]) -> None:
        """Forget what was known of segments that are gone, like `remove`."""
        about = {key: group_of(key) for key in self.all_keys()} if segments else {}
        keys = [key for key, group in about.items() if group and group[0] in segments]
        if keys:
            self.remove(keys)

    def _checked(self, key: bytes, value: bytes) -> bytes | None:
        body, check = value[:-8], value[-8:]
        expected = _META.size if key == b"m" else _GROUP.size
        is_known = key == b"m" or (len(key) == _GROUP_KEY.size and key[:1] == b"g")
        is_right = is_known and len(body) == expected and check == self._check(key, body)
        return body if is_right else None

    def _check(self, key: bytes, body: bytes) -> bytes:
        return xxhash.xxh3_64_digest(self._identity + key + body)

    def commit(self, commit: Commit, groups: Mapping[tuple[int, int], tuple[int, bytes]]) -> None:
        """Write all of it in one durable transaction; OSError, and no change, if that fails.

        A full map grows, up to the bytes that the volume keeps for it.
        """
        entries = {b"m": _META.pack(FORMAT_VERSION, commit.epoch, commit.sequence, commit.is_clean)}
        for (segment, group), fact in groups.items():
            entries[_GROUP_KEY.pack(b"g", segment, group)] = _GROUP.pack(*fact)
        with self._lock:
            while True:
                try:
                    with self._env.begin(write=True) as transaction:
                        for key, body in entries.items():
                            transaction.put(key, body + self._check(key, body))
                except lmdb.MapFullError as error:
                    try:
                        self._grow(error)
                    except lmdb.Error as failed:
                        raise self._failure(failed) from failed
                except lmdb.Error as error:
                    raise self._failure(error) from error
                else:
                    return

    def _failure(self, error: lmdb.Error) -> OSError:
        return OSError(
            max(_code(error), 0) or errno.EIO,
            f"{self.path!r}: the directory was not written ({error})",
        )

    def _grow(self, error: lmdb.Error) -> None:
        size = self._env.info()["map_size"] * 2
        if size > self._most_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{self.path!r}: the directory is full at its limit of {self._most_bytes} bytes",
            ) from error
        self._env.set_mapsize(size)

    @property
    def nbytes(self) -> int:
        """Bytes of the environment's file."""
        return os.path.getsize(os.path.join(self.path, FILES[0]))

    def close(self) -> None:
        """Close the environment. A second call does nothing."""
        self._env.close()


class NoManifest(Manifest):
    """Stands for a directory that is damaged, in a volume that is open for reading only."""

    nbytes = 0

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, FOLDER)

    def _entries(self) -> list[tuple[bytes, bytes | None]]:
        return []

    def known(self, segment: int, groups: Iterable[int]) -> Groups:
        return Groups()

    def close(self) -> None:
        pass


def _code(error: lmdb.Error) -> int:
    """The system's number of an error; LMDB's own are below 0, and 0 is neither."""
    return int(getattr(error, "code", None) or 0)


def group_of(key: bytes) -> tuple[int, int] | None:
    """Segment and group that a key is about."""
    if len(key) != _GROUP_KEY.size or key[:1] != b"g":
        return None
    _, segment, group = _GROUP_KEY.unpack(key)
    return segment, group
