"""Whether an LMDB file is sound. LMDB believes what it maps: damage there can end the process.

The file is walked page by page before LMDB sees it: its newest meta page, the tree of values, the
tree of free pages, and that no page serves twice. What values mean is for their own checksums.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import CorruptBlockError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = min(mmap.PAGESIZE, 1 << 15)
_HEADER = struct.Struct("<QHHHH")
_TREE = struct.Struct("<IHHQQQQQ")
_META = struct.Struct("<IIQQ")
_NODE = struct.Struct("<HHHH")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_INTEGER_KEYS = 8
_BIG = 1
_MOST_DEPTH = 16
_NONE = (1 << 64) - 1


@dataclass(frozen=True)
class _Tree:
    """The root of a tree, as a meta page describes it."""

    page_bytes: int
    flags: int
    depth: int
    entries: int
    root: int

    @classmethod
    def decode(cls, page: bytes, offset: int) -> _Tree:
        page_bytes, flags, depth, _, _, _, entries, root = _TREE.unpack_from(page, offset)
        return cls(page_bytes, flags, depth, entries, root)


class _Damage(Exception):
    """What is wrong."""


def used_bytes(file: str) -> int:
    """Bytes of an LMDB file that are in use. CorruptBlockError if it is not sound, or is none."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _Walk(fd).last_page * _PAGE + _PAGE
    except (_Damage, struct.error) as error:
        raise CorruptBlockError(f"{file!r} is no sound LMDB file: {error}") from error
    finally:
        os.close(fd)


class _Walk:
    """One walk through a file; _Damage from the constructor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen: set[int] = set()
        self.last_page = 1
        meta = max((self._page(0), self._page(1)), key=_meta_number)
        magic, version, _, _ = _META.unpack_from(meta, _HEADER.size)
        start = _HEADER.size + _META.size
        free, values = _Tree.decode(meta, start), _Tree.decode(meta, start + _TREE.size)
        self.last_page, number = struct.unpack_from("<QQ", meta, start + 2 * _TREE.size)
        is_known = (magic, version, free.page_bytes) == (_MAGIC, _VERSION, _PAGE)
        _require(is_known and (free.flags, values.flags) == (_INTEGER_KEYS, 0), "a meta page")
        _require(number < 1 << 63, "a transaction's number")
        size = os.fstat(fd).st_size
        _require((self.last_page + 1) * _PAGE <= size, f"{size} bytes, less than are in use")
        for _, flags, _ in self._entries(values):
            _require(flags == 0, "a large value")
        self._check_free(free)

    def _page(self, number: int) -> bytes:
        _require(0 <= number <= self.last_page, f"page {number}, past the last")
        page = os.pread(self._fd, _PAGE, number * _PAGE)
        _require(len(page) == _PAGE, f"no page {number}")
        return page

    def _take(self, number: int, expected: int) -> bytes:
        """A page that nothing else uses."""
        _require(number >= 2 and number not in self._seen, f"page {number}, used twice")
        page = self._page(number)
        self._seen.add(number)
        own, _, kind, _, _ = _HEADER.unpack_from(page)
        _require((own, kind) == (number, expected), f"page {number}, of another kind")
        return page

    def _entries(self, tree: _Tree) -> Iterator[tuple[bytes, int, bytes]]:
        """Key, flags and data of every entry of a tree."""
        if tree.root == _NONE:
            _require(tree.entries == tree.depth == 0, "a tree without a root")
            return
        _require(1 <= tree.depth <= _MOST_DEPTH, f"a tree {tree.depth} pages deep")
        count, last = 0, None
        for key, flags, data in self._below(tree.root, tree.depth):
            order = key[::-1] if tree.flags else key
            _require(bool(key) and (last is None or last < order), "keys out of order")
            last = order
            count += 1
            yield key, flags, data
        _require(count == tree.entries, f"{count} entries instead of {tree.entries}")

    def _below(self, number: int, depth: int) -> Iterator[tuple[bytes, int, bytes]]:
        is_leaf = depth == 1
        page = self._take(number, _LEAF if is_leaf else _BRANCH)
        for low, high, flags, key, at in _nodes(page, is_leaf=is_leaf):
            if not is_leaf:
                yield from self._below(low | high << 16 | flags << 32, depth - 1)
                continue
            _require(flags in (0, _BIG), "an entry of another kind")
            size = low | high << 16
            data = page[at : at + size]
            if flags == _BIG:
                data = self._overflow(int.from_bytes(page[at : at + 8], "little"), size)
            yield key, flags, data

    def _overflow(self, number: int, size: int) -> bytes:
        page = self._take(number, _OVERFLOW)
        pages = int.from_bytes(page[12:16], "little")
        _require(pages == -(-(_HEADER.size + size) // _PAGE), "an overflow page")
        for other in range(number + 1, number + pages):
            _require(other not in self._seen, f"page {other}, used twice")
            page += self._page(other)
            self._seen.add(other)
        return page[_HEADER.size : _HEADER.size + size]

    def _check_free(self, tree: _Tree) -> None:
        """Free pages are in no tree, and are free once."""
        free: list[int] = []
        for _, _, data in self._entries(tree):
            _require(len(data) >= 8 and len(data) % 8 == 0, "a list of free pages")
            count, *pages = struct.unpack(f"<{len(data) // 8}Q", data)
            _require(count <= len(pages), "a list of free pages")
            own = pages[:count]
            _require(own == sorted(own, reverse=True), "a list of free pages")
            free.extend(own)
        _require(len(set(free)) == len(free), "a page that is free twice")
        is_possible = not free or (min(free) >= 2 and max(free) <= self.last_page)
        _require(is_possible and self._seen.isdisjoint(free), "a free page that is in use")


def _meta_number(page: bytes) -> int:
    """Number of the transaction that wrote a meta page."""
    at = _HEADER.size + _META.size + 2 * _TREE.size + 8
    return int.from_bytes(page[at : at + 8], "little")


def _nodes(page: bytes, *, is_leaf: bool) -> Iterator[tuple[int, int, int, bytes, int]]:
    """Low and high word, flags, key, and where the data begins, of each node of a page."""
    _, _, _, lower, upper = _HEADER.unpack_from(page)
    _require(_HEADER.size < lower <= upper <= _PAGE and lower % 2 == 0, "bounds of a page")
    starts = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", page, _HEADER.size)
    ends: dict[int, int] = {}
    for start in starts:
        _require(upper <= start <= _PAGE - _NODE.size, "a node outside its page")
        low, high, flags, key_bytes = _NODE.unpack_from(page, start)
        at = start + _NODE.size + key_bytes
        data_bytes = (8 if flags & _BIG else low | high << 16) if is_leaf else 0
        ends[start] = at + data_bytes + (at + data_bytes) % 2
        _require(ends[start] <= _PAGE, "a node that leaves its page")
        yield low, high, flags, page[start + _NODE.size : at], at
    for start in sorted(ends):
        _require(start == upper, "nodes that overlap")
        upper = ends[start]
    _require(upper == _PAGE and len(ends) == len(starts), "nodes that overlap")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _Damage(f"found {what}")
