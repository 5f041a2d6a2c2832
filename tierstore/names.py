"""Named prefixes: which blocks each name holds, as records in the store and as counts beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.interfaces import Bytes
    from tierstore.keyed import KeyedStore

ENTRY_TAG = b"prefix:"
TAIL_TAG = b"tail:"
MOST_NAME_BYTES = 500

_DIGEST_BYTES = 16
_HEAD = Struct("<8s5I")
_MAGIC = b"TSname\x00\x01"
_ENTRIES_AT_ONCE = 32


def block_keys(digests: Bytes, block_tokens: int, block_bytes: int) -> Bytes:
    """Where the store keeps the blocks with these keys, digests uint8 [n, 16].

    Both sizes are part of it, so blocks of two sizes never take each other's place.
    """
    tag = np.frombuffer(b"block:%dx%d:" % (block_tokens, block_bytes), np.uint8)
    return np.hstack([np.broadcast_to(tag, (len(digests), len(tag))), digests])


def entry_key(name: bytes) -> bytes:
    """Where the store keeps the entry of a name. ConfigError if it is not 1 to 500 bytes."""
    if not isinstance(name, bytes) or not 0 < len(name) <= MOST_NAME_BYTES:
        raise ConfigError(f"name={name!r}: expected 1 to {MOST_NAME_BYTES} bytes")
    return ENTRY_TAG + name


def tail_key(name: bytes) -> bytes:
    """Where the store keeps the partial last block of a name."""
    return TAIL_TAG + name


@dataclass(frozen=True)
class NamedPrefix:
    """What a name stands for.

    tokens: uint32 [n], all of them. digests: uint8 [n // block_tokens, 16], the keys of the whole
    blocks, of `block_bytes` bytes each. extra: as given to `hash_blocks`.
    """

    tokens: npt.NDArray[np.uint32]
    digests: Bytes
    block_tokens: int
    block_bytes: int
    extra: bytes = b""

    def block_keys(self) -> list[bytes]:
        """Where the store keeps the whole blocks."""
        keys = block_keys(self.digests, self.block_tokens, self.block_bytes)
        return [key.tobytes() for key in keys]

    def pack(self) -> bytes:
        """The entry's bytes: magic, five sizes, extra, tokens and keys, all little-endian."""
        sizes = len(self.tokens), len(self.digests), self.block_tokens, self.block_bytes
        tokens = self.tokens.astype("<u4").tobytes()
        head = _HEAD.pack(_MAGIC, *sizes, len(self.extra))
        return head + self.extra + tokens + self.digests.tobytes()

    @classmethod
    def unpack(cls, entry: bytes) -> NamedPrefix | None:
        """The prefix that `pack` wrote; None for any other bytes."""
        if len(entry) < _HEAD.size:
            return None
        magic, tokens, blocks, block_tokens, block_bytes, extra = _HEAD.unpack_from(entry)
        at = _HEAD.size + extra
        if magic != _MAGIC or len(entry) != at + 4 * tokens + _DIGEST_BYTES * blocks:
            return None
        if block_tokens == 0 or blocks != tokens // block_tokens:
            return None
        ids = np.frombuffer(entry, "<u4", tokens, at)
        digests = np.frombuffer(entry, np.uint8, offset=at + 4 * tokens)
        digests = digests.reshape(blocks, _DIGEST_BYTES)
        return cls(ids, digests, block_tokens, block_bytes, entry[_HEAD.size : at])


class References:
    """How many names hold each block of a store.

    The entries in the store are the truth; chains and counts beside it follow from them. A name
    whose entry the store has lost holds nothing. `lock` is held around every change of names.
    """

    def __init__(self, store: KeyedStore) -> None:
        self.lock = Lock()
        self._blocks_of: dict[bytes, list[bytes]] = {}
        self._holders: Counter[bytes] = Counter()
        for name, prefix in _entries(store):
            self.hold(name, prefix.block_keys())

    def hold(self, name: bytes, blocks: list[bytes]) -> list[bytes]:
        """Let `name` hold these blocks and no others; returns those that nobody holds any more."""
        before = self._blocks_of.pop(name, [])
        if blocks:
            self._blocks_of[name] = blocks
        self._holders.update(blocks)
        return self._give_up(before)

    def forget_lost(self, store: KeyedStore) -> None:
        """Let names go whose entries are no longer in the store."""
        names = list(self._blocks_of)
        if not names:
            return
        there = store.contains_many([entry_key(name) for name in names]).tolist()
        for name, is_there in zip(names, there, strict=True):
            if not is_there:
                self._give_up(self._blocks_of.pop(name))

    def _give_up(self, blocks: list[bytes]) -> list[bytes]:
        self._holders.subtract(blocks)
        gone = [block for block in dict.fromkeys(blocks) if not self._holders[block]]
        for block in gone:
            del self._holders[block]
        return gone


_references: WeakKeyDictionary[KeyedStore, References] = WeakKeyDictionary()
_references_lock = Lock()


def references_of(store: KeyedStore) -> References:
    """The references of a store, rebuilt from its entries when first asked for."""
    with _references_lock:
        found = _references.get(store)
        if found is None:
            found = _references[store] = References(store)
        return found


def names_of(store: KeyedStore) -> list[bytes]:
    """Names with an entry in the store, in no particular order."""
    return [key.removeprefix(ENTRY_TAG) for key in store.keys(prefix=ENTRY_TAG)]


def _entries(store: KeyedStore) -> Iterator[tuple[bytes, NamedPrefix]]:
    names = names_of(store)
    for at in range(0, len(names), _ENTRIES_AT_ONCE):
        some = names[at : at + _ENTRIES_AT_ONCE]
        for name, entry in zip(some, store.get_many([entry_key(n) for n in some]), strict=True):
            prefix = None if entry is None else NamedPrefix.unpack(entry)
            if prefix is not None:
                yield name, prefix
