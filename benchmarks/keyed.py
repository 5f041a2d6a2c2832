"""Our keyed store as a contender."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.benchmarks.contender import Contender, Get, Look, Put, Room, Rows
from tierstore.benchmarks.workload import OWN
from tierstore.errors import CapacityError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.volume.format import LIVE, PAGE, ROW, ROW_BYTES, Header
from tierstore.volume.segment import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_OWNER, _LEASE_SECONDS = "benchmark", 60.0
_DISK_SLACK = 64 << 20
IDENTITY = Identity(model="benchmark", dtype="uint8")


class Keyed(Contender):
    """A `KeyedStore` on its defaults, apart from the room it has."""

    name = OWN
    about = (
        "KeyedStore, raw codec; a checksum of everything that comes from disk; made durable by "
        "sync() after each batch"
    )

    def __init__(self, room: Room) -> None:
        self._is_durable = room.is_durable
        disk = room.capacity + room.capacity // 4 + _DISK_SLACK
        self.store = KeyedStore(room.folder, IDENTITY, disk=disk, dram=room.memory or None)

    def gets(self) -> Mapping[str, Get]:
        return {
            "": self._get,
            " batch": self._get_batch,
            " bytes": self._get_bytes,
            " bytes batch": self._get_bytes_batch,
            " view": self._view,
            " view batch": self._view_batch,
        }

    def puts(self) -> Mapping[str, Put]:
        return {"": self._put, " batch": self._put_batch}

    def _get(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        get_into = self.store.get_into
        for key, row in zip(keys, rows.singles, strict=False):
            get_into((key,), row)

    def _get_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        self.store.get_into(keys, rows.array[: len(keys)])

    def _get_bytes(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key in keys:
            look((self.store.get(key),))

    def _get_bytes_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        look(self.store.get_many(keys))

    def _view(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        for key in keys:
            with self.store.lease(key, owner=_OWNER, seconds=_LEASE_SECONDS) as lease:
                look(lease.values)

    def _view_batch(self, keys: Sequence[bytes], rows: Rows, look: Look) -> None:
        with self.store.lease_many(keys, owner=_OWNER, seconds=_LEASE_SECONDS) as lease:
            look(lease.values)

    def _put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        stored = [self.store.put(key, value) for key, value in zip(keys, values, strict=True)]
        self._finish(all(stored))

    def _put_batch(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        self._finish(bool(np.all(self.store.put_many(keys, values))))

    def _finish(self, is_stored: bool) -> None:
        if not is_stored:
            raise CapacityError(
                f"benchmark: the store refused values: {dict(self.store.stats().refused)}"
            )
        if self._is_durable:
            self.store.sync()

    def report(self) -> dict[str, object]:
        return asdict(self.store.stats())

    def close(self) -> None:
        self.store.close()


class Unchecked(Keyed):
    """The same store, which believes what it reads from disk: to see what checksums cost."""

    name = f"{OWN} unchecked"
    about = f"{OWN} reading from disk without checksums, which it has no option for"

    def __init__(self, room: Room) -> None:
        super().__init__(room)
        files = self.store.volume.files
        files.reads = partial(files.reads, verify=False)  # type: ignore[method-assign]


def full_segments(folder: Path) -> list[Path]:
    """Segment files of the stores below a folder in which every extent holds a value."""
    return [path for path in sorted(folder.rglob(f"*{SUFFIX}")) if _is_full(path)]


def metadata_bytes(folder: Path) -> int:
    """Bytes on disk below a folder that are no extents: headers, rows, directories."""
    total = 0
    for path in folder.rglob("*"):
        if path.suffix == SUFFIX:
            with path.open("rb") as file:
                header = Header.decode(file.read(PAGE), path.stat().st_size)
            total += header.data_offset if header is not None and header.extents else 0
        elif path.is_file():
            total += path.stat().st_blocks * 512
    return total


def _is_full(path: Path) -> bool:
    with path.open("rb") as file:
        header = Header.decode(file.read(PAGE), path.stat().st_size)
        if header is None or not header.extents:
            return False
        rows = np.frombuffer(file.read(header.extents * ROW_BYTES), ROW)
    return bool((rows["state"] == LIVE).all())
