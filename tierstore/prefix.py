"""KV blocks that are found by the tokens they stand for, and shared by all prompts that begin so.

Block i of a prompt has the key ``hash_blocks(tokens, block_tokens)[i]``, which depends on all
tokens up to its end. So two prompts share blocks exactly as long as they agree, whoever computed
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from tierstore.chain import Chain, check_count, hash_blocks, trailer_bytes
from tierstore.deadlines import end_of, left_until
from tierstore.errors import ConfigError
from tierstore.names import (
    NamedPrefix,
    block_keys,
    entry_key,
    names_of,
    references_of,
    tail_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.chain import Tokens
    from tierstore.interfaces import Bytes
    from tierstore.keyed import KeyedStore
    from tierstore.lease import Lease

__all__ = ["NamedPrefix", "PrefixCache", "PrefixLease", "hash_blocks"]

_SCRATCH_BYTES = 16 << 20
_LEAST_ROWS = 8


class PrefixCache:
    """Prompts' KV blocks in a `KeyedStore`, shared between all prompts that begin alike.

    store: must keep bytes as they are (a lossless codec). block_tokens, block_bytes: tokens and
    bytes of a block. Caches over one store share their names; blocks of other sizes are other
    blocks. Threads may call at once.

    The value of a block is its bytes, its token ids, and a SHA-256 proof of all that came before,
    `extra` included. Reads compare both, so a block that another prompt left under the same key is
    a miss: bytes returned were put for exactly these tokens after exactly these. Anything may leave
    the store at any time, also what a name holds.
    """

    def __init__(self, store: KeyedStore, *, block_tokens: int, block_bytes: int) -> None:
        self.store = store
        self.block_tokens = check_count("block_tokens", block_tokens)
        self.block_bytes = check_count("block_bytes", block_bytes)
        self.value_bytes = self.block_bytes + trailer_bytes(self.block_tokens)
        """Bytes of a block in the store, with what proves it."""
        self._references = references_of(store)

    def put(
        self, tokens: Tokens | Sequence[int], blocks: Bytes, *, first: int = 0, extra: bytes = b""
    ) -> int:
        """Store the blocks of a prompt from number `first` on; returns how many were written.

        blocks: uint8 [n, block_bytes], one row for each whole block of `tokens` after `first`.
        Those that are in the store are not written again; the store may refuse others.
        """
        chain = self.chain(tokens, extra=extra)
        self._check_blocks("blocks", blocks)
        if first < 0 or first + len(blocks) != len(chain):
            raise ConfigError(
                f"blocks of {len(blocks)} rows, first={first}: expected {len(chain)} whole blocks "
                f"in all for these {len(chain.ids)} tokens, {self.block_tokens} each"
            )
        return self.put_chain(chain, blocks, first)

    def chain(self, tokens: Tokens | Sequence[int], *, extra: bytes = b"") -> Chain:
        """A prompt's keys and proofs, to be computed once where its blocks go in several steps."""
        return Chain(tokens, self.block_tokens, extra)

    def put_chain(self, chain: Chain, blocks: Bytes, first: int) -> int:
        """`put` for a prompt from `chain`; the blocks need not reach its end."""
        self._check_blocks("blocks", blocks)
        last = self._last(chain, blocks, first)
        keys = self._keys(chain.digests)
        missing = first + np.flatnonzero(~_contains(self.store, keys[first:last]))
        stored = 0
        for rows in _batches(missing, self.value_bytes):
            values = np.empty((len(rows), self.value_bytes), np.uint8)
            for value, row in zip(values, rows.tolist(), strict=True):
                value[: self.block_bytes] = blocks[row - first]
            values[:, self.block_bytes :] = chain.trailers[rows]
            stored += int(np.count_nonzero(self.store.put_many(keys[rows], values)))
        self._touch(keys)
        return stored

    def put_values(self, chain: Chain, values: Bytes, first: int) -> int:
        """`put_chain` without a copy, and whether the store has the blocks or not.

        values: uint8 [n, value_bytes], each a block and room for what proves it, which is filled
        in here.
        """
        self._check_rows("values", values, self.value_bytes)
        rows = np.arange(first, self._last(chain, values, first))
        values[:, self.block_bytes :] = chain.trailers[rows]
        keys = self._keys(chain.digests)
        stored = int(np.count_nonzero(self.store.put_many(keys[rows], values)))
        self._touch(keys)
        return stored

    def _last(self, chain: Chain, blocks: Bytes, first: int) -> int:
        """The number after that of the last block; ConfigError if the chain has no such blocks."""
        last = first + len(blocks)
        if not 0 <= first <= last <= len(chain):
            raise ConfigError(
                f"blocks of {len(blocks)} rows, first={first}: expected at most {len(chain)} in all"
            )
        return last

    def match(self, tokens: Tokens | Sequence[int], *, extra: bytes = b"") -> int:
        """How many blocks from the start are in the store, by their keys alone.

        Only an answer of the moment, to plan with: `get_into` and `lease` may find fewer.
        """
        return self._run(self._keys(hash_blocks(tokens, self.block_tokens, extra=extra)))

    def match_chain(self, chain: Chain) -> int:
        """`match` for a prompt from `chain`."""
        return self._run(self._keys(chain.digests))

    def get_into(
        self,
        tokens: Tokens | Sequence[int],
        out: Bytes,
        *,
        first: int = 0,
        extra: bytes = b"",
        deadline: float | None = None,
    ) -> int:
        """Copy the longest stored run of blocks from number `first` on; returns how many.

        out: uint8 [n, block_bytes], for n blocks at most; rows after the run are left alone.
        deadline: seconds from now, after which the rest is a miss.
        """
        end = end_of(deadline)
        chain = self.chain(tokens, extra=extra)
        return self.get_chain_into(chain, out, first, left_until(end))

    def get_chain_into(
        self, chain: Chain, out: Bytes, first: int = 0, deadline: float | None = None
    ) -> int:
        """`get_into` for a prompt from `chain`."""
        self._check_blocks("out", out)
        end, got = end_of(deadline), 0
        step = min(len(out), _at_once(self.value_bytes))
        scratch = np.empty((step, self.value_bytes), np.uint8)
        while got < len(out):
            values = scratch[: len(out) - got]
            count = self.get_values(chain, values, first + got, left_until(end))
            out[got : got + count] = values[:count, : self.block_bytes]
            got += count
            if count < len(values):
                break
        return got

    def get_values(
        self, chain: Chain, values: Bytes, first: int = 0, deadline: float | None = None
    ) -> int:
        """The longest stored run of blocks from number `first` on, in place; returns how many.

        values: uint8 [n, value_bytes], each a block and then what proves it. If `value_bytes` are
        whole pages, those of `aligned_rows` come from the disk without a copy. Rows after the run
        hold anything.
        """
        self._check_rows("values", values, self.value_bytes)
        if first < 0:
            raise ConfigError(f"first={first}: expected the number of a block, 0 or more")
        keys = self._keys(chain.digests)
        run = self._run(keys[first : first + len(values)])
        if not run:
            return 0
        rows = slice(first, first + run)
        sizes = self.store.get_into(keys[rows], values[:run], deadline=deadline)
        proven = (values[:run, self.block_bytes :] == chain.trailers[rows]).all(axis=1)
        count = _leading(proven & (sizes == self.value_bytes))
        self._touch(keys[: first + count])
        return count

    def lease(
        self, tokens: Tokens | Sequence[int], *, owner: str, seconds: float, extra: bytes = b""
    ) -> PrefixLease:
        """Hold the longest stored run of blocks from the start, to read them in place.

        owner, seconds: who holds it, and for how long at most.
        """
        chain = self.chain(tokens, extra=extra)
        keys = self._keys(chain.digests)
        run = self._run(keys)
        while True:
            lease = self.store.lease_many(keys[:run], owner=owner, seconds=seconds)
            proven = [
                value is not None and value[self.block_bytes :] == trailer.data
                for value, trailer in zip(lease.values, chain.trailers[:run], strict=True)
            ]
            count = _leading(np.array(proven, np.bool_))
            if count == run:
                self._touch(keys[:run])
                return PrefixLease(lease, self.block_bytes)
            # Blocks after a gap are of no use to anyone here: hold the run before it only.
            lease.release()
            run = count

    # Names

    def retain(
        self,
        name: bytes,
        tokens: Tokens | Sequence[int],
        tail: Bytes | None = None,
        *,
        extra: bytes = b"",
    ) -> bool:
        """Let `name` stand for these tokens, and hold their whole blocks; False if refused.

        tail: uint8 [m], the bytes of the tokens after the last whole block. They are the name's
        own. A name that stood for other tokens holds the new ones instead; blocks that nobody
        holds any more are deleted, as by `forget`. Refused, nothing has changed, but that an
        earlier tail may be lost.
        """
        chain = self.chain(tokens, extra=extra)
        if tail is not None:
            _check_tail("tail", tail)
            if not len(chain.tail_ids):
                raise ConfigError(
                    f"tail of {len(tail)} bytes: these {len(chain.ids)} tokens are whole blocks "
                    f"of {self.block_tokens}; put() those"
                )
        prefix = NamedPrefix(
            chain.ids, chain.digests, self.block_tokens, self.block_bytes, chain.extra
        )
        with self._references.lock:
            self._references.forget_lost(self.store)
            # A tail proves its tokens, so one beside an entry of other tokens is a miss.
            if tail is not None and not self.store.put(tail_key(name), _with_proof(tail, chain)):
                return False
            if not self.store.put(entry_key(name), prefix.pack()):
                if tail is not None:
                    self.store.delete(tail_key(name))
                return False
            if tail is None:
                self.store.delete(tail_key(name))
            self._hold(name, prefix.block_keys())
        return True

    def forget(self, name: bytes) -> bool:
        """Delete a name, its tail, and the blocks that no other name holds; False if unknown."""
        with self._references.lock:
            self._references.forget_lost(self.store)
            was_there = self.store.delete(entry_key(name))
            self.store.delete(tail_key(name))
            self._hold(name, [])
        return was_there

    def names(self) -> list[bytes]:
        """Names in the store, in no particular order."""
        return names_of(self.store)

    def find(self, name: bytes) -> NamedPrefix | None:
        """What a name stands for; None if the store does not have it."""
        entry = self.store.get(entry_key(name))
        return None if entry is None else NamedPrefix.unpack(entry)

    def get_tail_into(self, name: bytes, out: Bytes) -> int:
        """Copy the tail of a name, uint8 [m]; returns its tokens, 0 if there is no such tail."""
        _check_tail("out", out)
        prefix = self.find(name)
        value = self.store.get(tail_key(name))
        if prefix is None or value is None:
            return 0
        chain = Chain(prefix.tokens, prefix.block_tokens, prefix.extra)
        if value[len(out) :] != chain.tail_trailer:
            return 0
        out[:] = np.frombuffer(value, np.uint8, len(out))
        return len(chain.tail_ids)

    def _check_blocks(self, name: str, blocks: Bytes) -> None:
        self._check_rows(name, blocks, self.block_bytes)

    def _check_rows(self, name: str, blocks: Bytes, width: int) -> None:
        is_right = isinstance(blocks, np.ndarray) and blocks.dtype == np.uint8 and blocks.ndim == 2
        if not is_right or blocks.shape[1] != width:
            raise ConfigError(f"{name}: expected uint8 [blocks, {width}], found {_kind(blocks)}")

    def _hold(self, name: bytes, blocks: list[bytes]) -> None:
        gone = self._references.hold(name, blocks)
        if gone:
            self.store.delete_many(gone)

    def _keys(self, digests: Bytes) -> Bytes:
        return block_keys(digests, self.block_tokens, self.block_bytes)

    def _run(self, keys: Bytes) -> int:
        return _leading(_contains(self.store, keys))

    def _touch(self, keys: Bytes) -> None:
        """Count the blocks as used, the first as the last: a chain is lost from its end."""
        if len(keys):
            self.store.touch_many(keys[::-1])


class PrefixLease:
    """A run of blocks from the start of a prompt, unchanged while the lease lives.

    After its deadline the store may end it when it needs the room.
    """

    def __init__(self, lease: Lease, block_bytes: int) -> None:
        self._lease = lease
        self._block_bytes = block_bytes

    def __len__(self) -> int:
        """How many blocks."""
        return len(self._lease.values)

    @property
    def blocks(self) -> list[memoryview]:
        """New read-only views [block_bytes] of the blocks; none after the end.

        Views, and arrays made from them, must be gone by `release`: they keep the hold alive.
        """
        values = [value for value in self._lease.values if value is not None]
        return [value[: self._block_bytes] for value in values]

    @property
    def is_live(self) -> bool:
        """Whether the blocks still are what they were."""
        return self._lease.is_live

    def release(self) -> None:
        """End the lease. ConfigError if it has ended already."""
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.release()


def _with_proof(tail: Bytes, chain: Chain) -> bytes:
    return tail.tobytes() + chain.tail_trailer


def _contains(store: KeyedStore, keys: Bytes) -> npt.NDArray[np.bool_]:
    return store.contains_many(keys) if len(keys) else np.zeros(0, np.bool_)


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many of the first flags are all set."""
    return len(flags) if flags.all() else int(flags.argmin())


def _batches(rows: npt.NDArray[np.int64], size: int) -> list[npt.NDArray[np.int64]]:
    """Rows in groups whose values, `size` bytes each, take some 16 MiB together."""
    step = _at_once(size)
    return [rows[at : at + step] for at in range(0, len(rows), step)]


def _at_once(size: int) -> int:
    return max(_LEAST_ROWS, _SCRATCH_BYTES // size)


def _check_tail(name: str, tail: Bytes) -> None:
    if not isinstance(tail, np.ndarray) or tail.dtype != np.uint8 or tail.ndim != 1:
        raise ConfigError(f"{name}: expected uint8 [bytes], found {_kind(tail)}")


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
