"""Stored bytes without the store: finds, changes and seals them as docs/format.md says.

Nothing of the store's own code is used here, so that a test that looks at files is an oracle.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096
ROW_BYTES = 96
HEADER = struct.Struct("<8sII16sQQQQQQ")
CHECKED_HEADER_BYTES = HEADER.size + 16
ROW = struct.Struct("<Q16sIIHBBI48sQ")
LIVE, DEAD = 1, 2


class Row(NamedTuple):
    """One row of an extent table."""

    sequence: int
    checksum: bytes
    stored_bytes: int
    value_bytes: int
    key_bytes: int
    codec: int
    state: int
    valid: int
    key: bytes
    check: int


class Record(NamedTuple):
    """Where a row and its payload are."""

    path: Path
    extent: int
    row_at: int
    payload_at: int
    row: Row
    binding: bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the payload and, after it, of a long key."""
        return self.row.stored_bytes + (self.row.key_bytes if self.row.key_bytes > 48 else 0)


def namespace(store: Path) -> Path:
    """The only namespace in a store's directory."""
    (folder,) = [path for path in store.iterdir() if path.is_dir()]
    return folder


def segments(store: Path) -> list[Path]:
    """The segment files, in order."""
    return sorted((namespace(store) / "segments").glob("*.seg"))


def rows(path: Path) -> Iterator[Record]:
    """Every row of a segment file that was ever written."""
    data = path.read_bytes()
    if not any(data[: HEADER.size]):
        return
    _, _, _, identity, epoch, number, generation, extent_bytes, extents, start = HEADER.unpack_from(
        data
    )
    for extent in range(extents):
        row_at = PAGE + extent * ROW_BYTES
        row = Row(*ROW.unpack_from(data, row_at))
        binding = identity + struct.pack("<QQQQ", epoch, number, generation, extent)
        if row.sequence:
            yield Record(path, extent, row_at, start + extent * extent_bytes, row, binding)


def live(store: Path) -> dict[bytes, Record]:
    """The live record of each key of up to 48 bytes (of longer ones, of its 48-byte field)."""
    return {
        record.row.key[: min(record.row.key_bytes, 48)]: record
        for path in segments(store)
        for record in rows(path)
        if record.row.state == LIVE
    }


def read(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def write(path: Path, offset: int, data: bytes) -> None:
    """Replace bytes of a file."""
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def flip(path: Path, offset: int, bit: int) -> None:
    """Change one bit; `bit` counts from that of lowest value in the byte at `offset`."""
    at, mask = offset + bit // 8, 1 << bit % 8
    write(path, at, bytes([read(path, at, 1)[0] ^ mask]))


def seal(record: Record, row: Row, payload: bytes) -> None:
    """Write another row and payload in a record's place, with checksums that are right."""
    fields = ROW.pack(*row._replace(checksum=bytes(16), check=0))
    digest = xxhash.xxh3_128_digest(payload)
    covered = digest + record.binding + fields[:8] + fields[24:35] + fields[36:88]
    body = fields[:8] + xxhash.xxh3_128_digest(covered) + fields[24:88]
    check = xxhash.xxh3_64_intdigest(body + record.binding)
    write(record.path, record.row_at, body + struct.pack("<Q", check))
    write(record.path, record.payload_at, payload)
