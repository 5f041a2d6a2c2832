"""Whether what many threads read at once can have been there."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType
    from typing import Self

_NEVER = float("inf")
_SHOWN = 20
_LOCKS = 64


class Operation:
    """One call on a store: begins when it is made and ends with its ``with`` block.

    Set `value` inside the block: of a get what it returned, None for a miss. Set `is_refused` if a
    put was refused: then its value may be seen by gets under way, and by none that begins later.
    An operation that ends with an exception may have happened or not.
    """

    __slots__ = ("_history", "begin", "end", "is_refused", "is_sure", "key", "kind", "value")

    def __init__(
        self,
        history: History,
        kind: Literal["put", "delete", "get"],
        key: Hashable,
        value: Hashable | None,
    ) -> None:
        self.kind = kind
        self.key = key
        self.value = value
        self.begin = 0
        self.end: float = _NEVER
        self.is_refused = False
        self.is_sure = True
        self._history = history

    def __enter__(self) -> Self:
        self._history._begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_sure = error is None and not self.is_refused
        self._history._end(self)

    def __str__(self) -> str:
        end = "now" if self.end == _NEVER else f"{self.end:.0f}"
        return f"{self.kind} {self.value!r} [{self.begin}, {end}]"


@dataclass
class _Key:
    """What can still be read of one key: writes that may be the last, and gets under way."""

    writes: list[Operation]
    gets: list[Operation]


class History:
    """Checks each get against the puts and deletes around it, while threads run.

    A get may return the value of a put that began before the get ended, unless another put or
    delete of the key both began after that put had ended and ended before the get began. A miss is
    right at any time: a cache may drop what it likes. Everything else is a stale or foreign value.

    Values must differ between puts of a key, or a stale one cannot be told. Memory stays in
    proportion to the keys, and the operations under way: what can no longer be read is forgotten.

    ::

        history = History()
        with history.put(key, value) as put:
            put.is_refused = not store.put(key, value)
        with history.get(key) as got:
            got.value = store.get(key)
        history.check()
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Operations that ended by kind: "put", "refused", "delete", "hit", "miss", "failed"."""
        self._ticks = count(1)
        self._keys: dict[Hashable, _Key] = {}
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._summary = threading.Lock()
        self._wrong: list[str] = []
        self._wrong_count = 0

    def put(self, key: Hashable, value: Hashable) -> Operation:
        """A put of that value, which must not be None."""
        if value is None:
            raise ConfigError("History.put: expected a value, found None, which stands for a miss")
        return Operation(self, "put", key, value)

    def delete(self, key: Hashable) -> Operation:
        """A removal of the key, by `delete` or `clear`."""
        return Operation(self, "delete", key, None)

    def get(self, key: Hashable) -> Operation:
        """A read of the key; set the operation's `value`."""
        return Operation(self, "get", key, None)

    @property
    def size(self) -> int:
        """Operations that are remembered."""
        return sum(len(known.writes) + len(known.gets) for known in list(self._keys.values()))

    def check(self) -> None:
        """AssertionError if a get was wrong, with the first ones."""
        with self._summary:
            if self._wrong_count:
                raise AssertionError(
                    f"{self._wrong_count} of {self.counts['hit']} values that were read cannot "
                    "have been there:\n" + "\n".join(self._wrong)
                )

    def _begin(self, operation: Operation) -> None:
        with self._lock(operation.key):
            known = self._keys.setdefault(operation.key, _Key([], []))
            operation.begin = next(self._ticks)
            (known.gets if operation.kind == "get" else known.writes).append(operation)

    def _end(self, operation: Operation) -> None:
        with self._lock(operation.key):
            operation.end = next(self._ticks)
            known = self._keys[operation.key]
            if operation.kind == "get":
                known.gets.remove(operation)
                outcome = self._outcome(operation, known.writes)
            else:
                outcome = "refused" if operation.is_refused else operation.kind
            _forget(known)
        with self._summary:
            self.counts[outcome] += 1

    def _lock(self, key: Hashable) -> threading.Lock:
        return self._locks[hash(key) % _LOCKS]

    def _outcome(self, get: Operation, writes: list[Operation]) -> str:
        if not get.is_sure:
            return "failed"
        if get.value is None:
            return "miss"
        last = _last_before(get.begin, writes)
        if not any(_may_be_read(write, get, last) for write in writes):
            self._complain(get, writes)
        return "hit"

    def _complain(self, get: Operation, writes: list[Operation]) -> None:
        with self._summary:
            self._wrong_count += 1
            if len(self._wrong) < _SHOWN:
                around = ", ".join(map(str, writes)) or "none"
                self._wrong.append(f"key {get.key!r}: {get}; writes it can have seen: {around}")


def _last_before(moment: float, writes: list[Operation]) -> int:
    """When the last write began that had ended at a moment; what ended before that is gone."""
    return max((w.begin for w in writes if w.is_sure and w.end < moment), default=0)


def _may_be_read(write: Operation, get: Operation, last: int) -> bool:
    if write.kind != "put" or write.value != get.value or write.end < last:
        return False
    return not (write.is_refused and write.end < get.begin)


def _forget(known: _Key) -> None:
    """Drop writes that no get can return any more: neither one under way nor a later one."""
    oldest = min((get.begin for get in known.gets), default=_NEVER)
    last = _last_before(oldest, known.writes)
    known.writes[:] = [
        write
        for write in known.writes
        if write.end >= last and not (write.is_refused and write.end < oldest)
    ]
