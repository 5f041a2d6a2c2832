"""The bytes of a segment file, field by field; docs/format.md says the same in prose.

A segment file is a header page, a table of rows, and extents::

    header (4 KiB) | row 0, row 1, ... (padded to 4 KiB) | extent 0 | extent 1 | ...

All extents of a file have the same size, a multiple of 4 KiB. Row i describes extent i. Everything
is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.identity import FORMAT_VERSION

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.interfaces import Bytes

PAGE = 4096
GROUP = 128
"""Rows that the directory vouches for together."""

ROW = np.dtype(
    [
        ("sequence", "<u8"),
        ("checksum", "V16"),
        ("stored_bytes", "<u4"),
        ("value_bytes", "<u4"),
        ("key_bytes", "<u2"),
        ("codec", "u1"),
        ("state", "u1"),
        ("valid", "<u4"),
        ("key", "V48"),
        ("check", "<u8"),
    ]
)
"""One row of the extent table. valid: blocks that the extent holds, for extents of many."""

ROW_BYTES = ROW.itemsize
FREE, LIVE, DEAD = 0, 1, 2
CODECS = ("raw", "shuffle+zstd", "int8", "int4", "k8v4", "fp8")
"""Names of the codecs, in the order of their numbers in rows."""

PAYLOAD_BYTES_MOST = (1 << 32) - PAGE
KEY_BYTES_MOST = 511
KEY_INLINE = 48
"""A longer key has its first 40 bytes and its xxh3-64 in the row, and follows the value whole."""

MAGIC = b"TIERSEG\n"
_HEADER = struct.Struct("<8sII16sQQQQQQ")


@dataclass(frozen=True)
class Header:
    """The first page of a segment file.

    identity: digest of the namespace. generation: a sequence number that no other use of this file
    has. extent_bytes, extents: size and number of the extents; both 0 in a blank file.
    """

    identity: bytes
    epoch: int
    number: int
    generation: int
    extent_bytes: int
    extents: int

    @property
    def data_offset(self) -> int:
        """Where extent 0 begins."""
        return PAGE + whole_pages(self.extents * ROW_BYTES)

    def encode(self) -> bytes:
        """The page: the fields, their xxh3-128, zeros."""
        body = _HEADER.pack(
            MAGIC, FORMAT_VERSION, PAGE, self.identity, self.epoch, self.number, self.generation,
            self.extent_bytes, self.extents, self.data_offset,
        )  # fmt: skip
        return (body + xxhash.xxh3_128_digest(body)).ljust(PAGE, b"\0")

    @classmethod
    def decode(cls, page: bytes, size: int) -> Header | None:
        """The header of a file of `size` bytes; None if the page is not one.

        StoreMismatchError if it is of another version of the format.
        """
        body = bytes(page[: _HEADER.size])
        check = bytes(page[_HEADER.size : _HEADER.size + 16])
        if len(body) < _HEADER.size or check != xxhash.xxh3_128_digest(body):
            return None
        magic, version, _, identity, epoch, number, generation, extent_bytes, extents, start = (
            _HEADER.unpack(body)
        )
        if magic != MAGIC:
            return None
        if version != FORMAT_VERSION:
            raise StoreMismatchError(
                f"a segment file has format version {version}, expected {FORMAT_VERSION}: use the "
                "release that wrote it"
            )
        header = cls(identity, epoch, number, generation, extent_bytes, extents)
        is_possible = (
            start == header.data_offset
            and extent_bytes % PAGE == 0
            and (extent_bytes > 0) == (extents > 0)
            and start + extent_bytes * extents <= size
        )
        return header if is_possible else None


def extents_in(segment_bytes: int, extent_bytes: int) -> int:
    """How many extents of a size fit into a segment file beside header and rows."""
    extents = (segment_bytes - PAGE) // (extent_bytes + ROW_BYTES)
    while (
        extents and PAGE + whole_pages(extents * ROW_BYTES) + extents * extent_bytes > segment_bytes
    ):
        extents -= 1
    return max(extents, 0)


def extent_size(nbytes: int) -> int:
    """The smallest size class that holds so many bytes.

    Classes are 1 to 8 pages, then four to each power of two: at most a fifth of one is unused.
    """
    pages = max(1, -(-nbytes // PAGE))
    if pages > 8:
        step = 1 << ((pages - 1).bit_length() - 3)
        pages = -(-pages // step) * step
    return pages * PAGE


def whole_pages(nbytes: int) -> int:
    """The multiple of `PAGE` that has room for so many bytes."""
    return -(-nbytes // PAGE) * PAGE


def check_key(key: bytes) -> None:
    """ConfigError unless `key` is 1 to 511 bytes."""
    if not isinstance(key, bytes | bytearray | memoryview):
        raise ConfigError(f"key {key!r}: expected bytes, found {type(key).__name__}")
    if not 1 <= len(key) <= KEY_BYTES_MOST:
        raise ConfigError(
            f"key of {len(key)} bytes: expected 1 to {KEY_BYTES_MOST}; hash longer ones"
        )


def key_field(key: bytes) -> bytes:
    """What a row says of a key, without the zeros that follow a short one."""
    if len(key) <= KEY_INLINE:
        return key
    return key[: KEY_INLINE - 8] + xxhash.xxh3_64_digest(key)


class KeyFields:
    """What the rows of some keys hold of them: fields uint64 [n, 6], lengths uint64 [n].

    tails: position and rest of each key that is too long for a row. ConfigError for a bad key.
    """

    __slots__ = ("fields", "lengths", "tails")

    def __init__(self, keys: Sequence[bytes] | Bytes) -> None:
        self.tails: dict[int, bytes] = {}
        if isinstance(keys, np.ndarray):
            self._from_array(keys)
            return
        if not isinstance(keys, Sequence):
            raise ConfigError(
                f"keys: expected a sequence of bytes, found {type(keys).__name__}: make a list of "
                "what can be read only once"
            )
        lengths = [len(key) if type(key) is bytes else -1 for key in keys]
        if lengths and (min(lengths) < 1 or max(lengths) > KEY_INLINE):
            keys, lengths = self._with_long(keys)
        joined = b"".join([key.ljust(KEY_INLINE, b"\0") for key in keys])
        self.fields = np.frombuffer(joined, np.uint64).reshape(-1, 6)
        self.lengths = np.array(lengths, np.uint64)

    def _from_array(self, keys: Bytes) -> None:
        if keys.ndim != 2 or keys.dtype != np.uint8 or not 1 <= keys.shape[1] <= KEY_INLINE:
            raise ConfigError(
                f"keys are an array {keys.dtype} {keys.shape}: expected uint8 [n, 1 to "
                f"{KEY_INLINE}]; give longer keys as bytes"
            )
        fields = np.zeros((len(keys), KEY_INLINE), np.uint8)
        fields[:, : keys.shape[1]] = keys
        self.fields = fields.view(np.uint64)
        self.lengths = np.full(len(keys), keys.shape[1], np.uint64)

    def _with_long(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        short = []
        for position, key in enumerate(keys):
            check_key(key)
            if len(key) > KEY_INLINE:
                self.tails[position] = bytes(key)
            short.append(key_field(bytes(key)))
        return short, [len(key) for key in keys]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, positions: npt.NDArray[np.int64]) -> KeyFields:
        """Those keys alone."""
        own = KeyFields.__new__(KeyFields)
        own.fields, own.lengths = self.fields[positions], self.lengths[positions]
        own.tails = {
            new: self.tails[old] for new, old in enumerate(positions.tolist()) if old in self.tails
        }
        return own

    def latest(self) -> npt.NDArray[np.int64]:
        """Of each key the position of the last that is equal to it."""
        rows = np.column_stack([self.fields, self.lengths])
        whole, step = rows.tobytes(), rows.strides[0]
        keys = [whole[at : at + step] for at in range(0, len(whole), step)]
        last = {key: position for position, key in enumerate(keys)}
        return np.array([last[key] for key in keys], np.int64)


def payload_checksum(digest: bytes, row: bytes, binding: bytes) -> bytes:
    """The checksum of stored bytes, bound to what their row says and to their place.

    digest: xxh3-128 of the bytes on disk, the tail of a long key included. row: the row's bytes, of
    which checksum, state and check do not count. binding: the `place_binding` and the extent's
    number.
    """
    return xxhash.xxh3_128_digest(digest + binding + row[:8] + row[24:35] + row[36:88])


def place_binding(header: Header) -> bytes:
    """What ties a row and its payload to their file; the extent's number, u64, follows it."""
    return header.identity + struct.pack("<QQQ", header.epoch, header.number, header.generation)


def row_check(row: bytes, binding: bytes) -> int:
    """xxh3-64 of a row up to its check, and of its place."""
    return xxhash.xxh3_64_intdigest(row[: ROW_BYTES - 8] + binding)
