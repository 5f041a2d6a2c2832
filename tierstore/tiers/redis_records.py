"""Records on a Redis server or cluster, which several machines share."""

from __future__ import annotations

import errno
import struct
import threading
from concurrent.futures import wait
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tierstore.errors import ConfigError, TierOfflineError
from tierstore.interfaces import RecordTier
from tierstore.sizes import parse_size
from tierstore.tiers.server import (
    BATCH_BYTES,
    BATCH_SLOTS,
    CHECK_BYTES,
    RedisServer,
    Transfer,
    check_ttl,
    in_batches,
)
from tierstore.volume.format import check_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    from _typeshed import ReadableBuffer

    from tierstore.tiers.server import Command

_LONGEST_NAMESPACE = 255


class RedisRecords(RecordTier):
    """Records in a Redis server or cluster.

    A value stands under ``tierstore:records:1:``, the namespace in hexadecimal, a colon and the
    key. It ends in an xxh3-128 bound to namespace and key, which is checked before the bytes are
    used. Servers may evict records as they like.

    Parameters
    ----------
    url: as for `RedisTier`. Nothing is connected before the first call, so a server may come later.
    namespace: 1 to 255 bytes that differ wherever values mean different things:
        ``Identity.digest``.
    max_value_bytes: longer values are not written, and never read.
    ttl: seconds that a value lives after its write; None: as long as the server keeps it.
    timeout: seconds that any single wait for the server may take.
    """

    def __init__(
        self,
        url: str,
        namespace: bytes,
        *,
        max_value_bytes: int | str = "64MiB",
        ttl: float | None = None,
        timeout: float = 1.0,
        connections: int = 4,
        name: str = "shared",
    ) -> None:
        if not 1 <= len(namespace) <= _LONGEST_NAMESPACE:
            raise ConfigError(
                f"{name}: a namespace of {len(namespace)} bytes: expected 1 to "
                f"{_LONGEST_NAMESPACE}, for example Identity.digest"
            )
        if ttl is not None:
            check_ttl(name, ttl)
        self.name = name
        self.damaged = self.refused = 0
        self.max_value_bytes = parse_size(max_value_bytes, "max_value_bytes")
        self._life: Command = () if ttl is None else ("PX", int(ttl * 1000))
        self._server = RedisServer(url, name, timeout, connections)
        self._prefix = b"tierstore:records:1:" + namespace.hex().encode() + b":"
        self._hash = xxhash.xxh3_128(self._prefix)
        self._lock = threading.Lock()

    @property
    def medium(self) -> str:
        return self._server.place

    def read(self, keys: Sequence[bytes], deadline: float | None = None) -> list[bytes | None]:
        last = self.max_value_bytes + CHECK_BYTES
        # A range, since whoever can write there could make a plain GET as long as they like.
        commands: list[Command] = [
            ("GETRANGE", self._prefix + key, 0, last) for key in self._valid(keys)
        ]
        most = max(1, min(BATCH_SLOTS, (64 << 20) // self.max_value_bytes))
        values: list[bytes | None] = [None] * len(keys)
        replies = self._ask(commands, most, deadline)
        for i, (key, reply) in enumerate(zip(keys, replies, strict=True)):
            values[i] = self._checked(key, reply)
        return values

    def _checked(self, key: bytes, reply: bytes | Exception) -> bytes | None:
        if isinstance(reply, Exception):
            if not str(reply).startswith("WRONGTYPE"):
                self._server.check(reply)
        elif not reply:
            return None
        elif len(reply) >= CHECK_BYTES:
            value = reply[:-CHECK_BYTES]
            if reply[-CHECK_BYTES:] == self._check(key, value):
                return value
        with self._lock:
            self.damaged += 1
        return None

    def write(
        self, keys: Sequence[bytes], values: Sequence[ReadableBuffer]
    ) -> npt.NDArray[np.bool_]:
        last = {key: i for i, key in enumerate(self._valid(keys))}
        if len(values) != len(keys):
            raise ConfigError(
                f"{self.name}: {len(keys)} keys and {len(values)} values: expected a value for "
                "each key"
            )
        written = np.zeros(len(keys), np.bool_)
        sizes = [memoryview(value).nbytes for value in values]
        fits = [i for i in sorted(last.values()) if sizes[i] <= self.max_value_bytes]

        def put(batch: list[int]) -> None:
            replies = self._server.run([self._set(keys[i], values[i]) for i in batch])
            for i, reply in zip(batch, replies, strict=True):
                if not self._server.is_full(reply):
                    self._server.check(reply)
                    written[i] = True

        under_way = [self._server.start(partial(put, batch)) for batch in _shared_out(fits, sizes)]
        Transfer(under_way).wait()
        written[:] = [written[last[key]] for key in keys]
        with self._lock:
            self.refused += int((~written).sum())
        return written

    def _set(self, key: bytes, value: ReadableBuffer) -> Command:
        data = memoryview(value).cast("B")
        return ("SET", self._prefix + key, b"".join((data, self._check(key, data))), *self._life)

    def remove(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return self._counts("UNLINK", keys, None)

    def clear(self) -> None:
        found = self._server.keys(self._prefix)
        while batch := list(islice(found, BATCH_SLOTS)):
            for reply in self._ask([("UNLINK", key) for key in batch], BATCH_SLOTS):
                self._server.check(reply)

    def contains(
        self, keys: Sequence[bytes], deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        return self._counts("EXISTS", keys, deadline)

    def _counts(
        self, command: str, keys: Sequence[bytes], deadline: float | None
    ) -> npt.NDArray[np.bool_]:
        commands: list[Command] = [(command, self._prefix + key) for key in self._valid(keys)]
        replies = self._ask(commands, BATCH_SLOTS, deadline)
        for reply in replies:
            self._server.check(reply)
        return np.array(replies, np.int64) > 0

    def _valid(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        for key in keys:
            check_key(key)
        return keys

    def _ask(
        self, commands: Sequence[Command], most: int, deadline: float | None = None
    ) -> list[Any]:
        """Replies to `commands`, in bounded batches; TierOfflineError if they come too late."""
        batches = list(in_batches(commands, most))
        answers: list[list[Any]] = [[] for _ in batches]

        def ask(i: int) -> None:
            answers[i] = self._server.run(batches[i])

        under_way = [self._server.start(partial(ask, i)) for i in range(len(batches))]
        late = wait(under_way, deadline).not_done
        if late:
            for future in late:
                future.cancel()
            raise TierOfflineError(
                errno.ETIMEDOUT,
                f"{self.name}: {self.medium} did not answer within {deadline} s: raise the "
                "deadline, or see what holds the server up",
            )
        for future in under_way:
            future.result()
        return [reply for replies in answers for reply in replies]

    def _check(self, key: bytes, value: ReadableBuffer) -> bytes:
        state = self._hash.copy()
        state.update(struct.pack("<H", len(key)))
        state.update(key)
        state.update(value)
        return state.digest()

    def close(self) -> None:
        self._server.close()


def _shared_out(numbers: Iterable[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """`numbers` in batches of bounded length and bytes; ``sizes[i]`` bytes belong to number i."""
    batch: list[int] = []
    room = BATCH_BYTES
    for i in numbers:
        if batch and (sizes[i] > room or len(batch) == BATCH_SLOTS):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(i)
        room -= sizes[i]
    if batch:
        yield batch
