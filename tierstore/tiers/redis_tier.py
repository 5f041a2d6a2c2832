"""Blocks of one process on a Redis server or cluster."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tierstore.errors import (
    CapacityError,
    CorruptBlockError,
    TierFullError,
    TierOfflineError,
)
from tierstore.interfaces import DONE, Bytes, Completion, Ids, Tier
from tierstore.kernels.element import is_host
from tierstore.sizes import format_size, parse_size
from tierstore.tiers.memory import copy
from tierstore.tiers.server import (
    BATCH_BYTES,
    BATCH_SLOTS,
    CHECK_BYTES,
    RedisServer,
    Transfer,
    check_ttl,
    in_batches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future

    from _typeshed import ReadableBuffer

    from tierstore.layout import BlockLayout
    from tierstore.tiers.server import Command

    Span = tuple[int, int, int]
    """Number, first byte and end of a part in a block."""
    Place = tuple[int, int]
    """A slot, and a row of the caller's array."""

_FIELD_BYTES = 96
"""What a server needs for a field beside its value, about."""
_KEY_BYTES = 4 << 20
_KEY_SLOTS = 256


class RedisTier(Tier):
    """Blocks of this process in the memory of a Redis server or cluster.

    Several slots are the fields of one hash, a field for each part, under a prefix that is random:
    two tiers never share a slot. Each field ends in an xxh3-128 bound to the prefix, the slot, the
    part and the write. A read of damaged or outdated bytes is a CorruptBlockError, counted in
    `damaged`; of a part that the server dropped a TierOfflineError, counted in `lost`: run it with
    ``maxmemory-policy noeviction``. Where it is out of memory, a write is a TierFullError.

    What a process leaves behind expires `ttl` seconds after its last call; a tier that is not
    called for so long loses its blocks.

    Parameters
    ----------
    url: ``redis://host:port/db``, ``rediss://`` (TLS), ``unix://path``; ``redis+cluster://`` or
        ``rediss+cluster://`` with any node of a cluster.
    limit: bytes of the server's memory that slots may take, the server's own needs included as far
        as they are known.
    timeout: seconds that any single wait for the server may take.
    connections: batches under way at once.
    """

    def __init__(
        self,
        layout: BlockLayout,
        url: str,
        limit: int | str,
        *,
        ttl: float = 86_400.0,
        timeout: float = 5.0,
        connections: int = 4,
        name: str = "remote",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_ttl(name, ttl)
        self.name = name
        self.layout = layout
        self.damaged = self.lost = 0
        self._limit_bytes = parse_size(limit, name)
        self._server = RedisServer(url, name, timeout, connections)
        self._ttl_ms, self._clock, self._refreshed = int(ttl * 1000), clock, clock()
        self._prefix = b"tierstore:blocks:1:" + os.urandom(8).hex().encode()
        self._hash = xxhash.xxh3_128(self._prefix)
        stored = [part for part in layout.parts if part.is_stored]
        self._spans: dict[str, Span] = {
            part.name: (number, layout.offset(part.name), layout.offset(part.name) + part.nbytes)
            for number, part in enumerate(stored)
        }
        self._slot_bytes = layout.block_bytes + len(stored) * (CHECK_BYTES + _FIELD_BYTES)
        self._slots_of_key = max(1, min(_KEY_SLOTS, _KEY_BYTES // layout.block_bytes))
        self._batch = max(1, min(BATCH_SLOTS, BATCH_BYTES // layout.block_bytes))
        self._writes = 0
        self._written = np.zeros((0, len(stored)), np.uint64)
        """Number of the last write of each part of each slot; 0 before the first."""
        self._lock = threading.Lock()
        self._server.run([("PING",)])

    @property
    def capacity(self) -> int:
        return len(self._written)

    @property
    def limit(self) -> int:
        return self._limit_bytes // self._slot_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity * self._slot_bytes

    @property
    def medium(self) -> str:
        return self._server.place

    def resize(self, slots: int) -> None:
        if slots > self.limit:
            raise CapacityError(
                f"{self.name}: {slots} blocks take {format_size(slots * self._slot_bytes)}, over "
                f"the limit of {format_size(self._limit_bytes)}: raise the limit"
            )
        if slots < self.capacity:
            self._drop(slots)
        resized = np.zeros((slots, len(self._spans)), np.uint64)
        kept = min(slots, self.capacity)
        resized[:kept] = self._written[:kept]
        self._written = resized

    def _drop(self, first: int) -> None:
        """Remove slots from number `first` on; what cannot be removed now expires."""
        whole = -(-first // self._slots_of_key)
        keys = range(whole, -(-self.capacity // self._slots_of_key))
        commands: list[Command] = [("UNLINK", self._key(key)) for key in keys]
        cut = range(first, min(whole * self._slots_of_key, self.capacity))
        if cut:
            fields = [_field(slot, part) for slot in cut for part, _, _ in self._spans.values()]
            commands.append(("HDEL", self._key(whole - 1), *fields))
        try:
            for batch in in_batches(commands, BATCH_SLOTS):
                self._server.run(batch)
        except TierOfflineError:
            return

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self._chosen(parts)
        if is_host(out):
            return Transfer(self._reads(slots, out, rows, spans))
        staged = np.zeros((len(slots), self.layout.block_bytes), np.uint8)
        everything = np.arange(len(slots), dtype=np.int32)

        def spread() -> None:
            for start, stop in self.layout.spans(parts):
                copy(staged, everything, out, rows, start, stop)

        return Transfer(self._reads(slots, staged, everything, spans), spread)

    def _reads(self, slots: Ids, out: Bytes, rows: Ids, spans: list[Span]) -> list[Future[None]]:
        self._keep()
        return [
            self._server.start(partial(self._read_batch, batch, out, spans))
            for batch in self._by_key(slots, rows)
        ]

    def _read_batch(self, batch: Sequence[Place], out: Bytes, spans: list[Span]) -> None:
        commands: list[Command] = []
        wanted: list[list[tuple[int, int, Span]]] = []
        for key, blocks in groupby(batch, lambda block: block[0] // self._slots_of_key):
            fields = [
                (slot, row, span)
                for slot, row in blocks
                for span in spans
                if self._written[slot, span[0]]
            ]
            if fields:
                names = [_field(slot, span[0]) for slot, _, span in fields]
                commands.append(("HMGET", self._key(key), *names))
                wanted.append(fields)
        if not commands:
            return
        for fields, values in zip(wanted, self._server.run(commands), strict=True):
            self._server.check(values)
            for (slot, row, span), value in zip(fields, values, strict=True):
                part, start, stop = span
                out[row, start:stop] = self._checked(slot, part, stop - start, value)

    def _checked(self, slot: int, part: int, nbytes: int, value: bytes | None) -> Bytes:
        if value is None:
            with self._lock:
                self.lost += 1
            raise TierOfflineError(
                errno.EIO,
                f"{self.name}: {self.medium} no longer has slot {slot}: expected what was written "
                "there; give the server more memory and maxmemory-policy noeviction",
            )
        data = memoryview(value)[:nbytes]
        if len(value) != nbytes + CHECK_BYTES or value[nbytes:] != self._check(slot, part, data):
            with self._lock:
                self.damaged += 1
            raise CorruptBlockError(
                errno.EIO, f"{self.name}: slot {slot} on {self.medium} holds other bytes than ours"
            )
        return np.frombuffer(data, np.uint8)

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        spans = self._chosen(parts)
        if not spans:
            return DONE
        self._keep()
        if not is_host(blocks):
            from tierstore.arrays import cupy

            blocks = cupy().asnumpy(blocks[cupy().asarray(rows)])
            rows = np.arange(len(slots), dtype=np.int32)
        self._writes += 1
        for part, _, _ in spans:
            self._written[slots, part] = self._writes
        return Transfer(
            [
                self._server.start(partial(self._write_batch, batch, blocks, spans))
                for batch in self._by_key(slots, rows)
            ]
        )

    def _write_batch(self, batch: Sequence[Place], blocks: Bytes, spans: list[Span]) -> None:
        commands: list[Command] = []
        for key, members in groupby(batch, lambda block: block[0] // self._slots_of_key):
            words: list[object] = []
            for slot, row in members:
                for part, start, stop in spans:
                    data = np.ascontiguousarray(blocks[row, start:stop]).data
                    stored = b"".join((data, self._check(slot, part, data)))
                    words += (_field(slot, part), stored)
            commands.append(("HSET", self._key(key), *words))
            commands.append(("PEXPIRE", self._key(key), self._ttl_ms))
        for reply in self._server.run(commands):
            if self._server.is_full(reply):
                raise TierFullError(
                    f"{self.name}: {self.medium} is out of memory ({reply}): raise its maxmemory "
                    "or lower the limit of the tier"
                ) from reply
            self._server.check(reply)

    def _chosen(self, parts: Collection[str] | None) -> list[Span]:
        """The spans of `parts`; ConfigError for one that is not stored."""
        self.layout.spans(parts)
        names = self._spans if parts is None else set(parts)
        return [span for name, span in self._spans.items() if name in names]

    def _by_key(self, slots: Ids, rows: Ids) -> Iterator[Sequence[Place]]:
        """Slots with their rows in bounded batches, neighbours together."""
        pairs = sorted(zip(slots.tolist(), rows.tolist(), strict=True))
        return in_batches(pairs, self._batch)

    def _check(self, slot: int, part: int, data: ReadableBuffer) -> bytes:
        state = self._hash.copy()
        state.update(struct.pack("<qqQ", slot, part, self._written[slot, part]))
        state.update(data)
        return state.digest()

    def _key(self, number: int) -> bytes:
        return b"%b:%d" % (self._prefix, number)

    def _keep(self) -> None:
        """Let every slot live on, when a third of its time is over."""
        now = self._clock()
        if (now - self._refreshed) * 3000 < self._ttl_ms:
            return
        self._refreshed = now
        keys = range(-(-self.capacity // self._slots_of_key))
        for batch in in_batches(keys, BATCH_SLOTS):
            self._server.run([("PEXPIRE", self._key(key), self._ttl_ms) for key in batch])

    def sync(self) -> None:
        """A server's memory has nothing to sync."""

    def close(self) -> None:
        if self.capacity:
            self.resize(0)
        self._server.close()


def _field(slot: int, part: int) -> bytes:
    return b"%d.%d" % (slot, part)
