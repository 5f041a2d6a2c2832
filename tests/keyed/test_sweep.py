"""C15: every call of the seam that an operation makes fails once, in each of three ways."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from keyed_stores import content, open_store

from tierstore.testing.faults import TRANSFERS, FaultIO, error, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.keyed import KeyedStore
    from tierstore.testing.faults import Call

KEYS = [b"key %d" % i for i in range(6)] + [b"long" * 40]
VALUES = [content(i, 700 * i) for i in range(7)]
NEW = content(99, 9000)
CAPACITY = 512 << 10

Model = dict[bytes, bytes]


class Operation(NamedTuple):
    """A call, what it leaves if it succeeds, and whether an OSError may come out of it."""

    call: Callable[[KeyedStore], object]
    after: Model
    may_raise: bool = False


OLD: Model = dict(zip(KEYS, VALUES, strict=True))


def press(store: KeyedStore) -> None:
    """More than fits: whole files are emptied, and single values leave."""
    for number in range(7):
        store.put_many([b"x%d %d" % (number, i) for i in range(4)], [bytes(16_000)] * 4)


def read_twice(store: KeyedStore) -> None:
    store.get_many(KEYS)
    with store.lease_many(KEYS, owner="sweep", seconds=9):
        store.get_into(KEYS, np.zeros((7, 9000), np.uint8))


OPERATIONS = {
    "get": Operation(read_twice, OLD),
    "prefetch": Operation(lambda store: store.prefetch(KEYS).wait(60), OLD),
    "ask": Operation(
        lambda store: (store.contains_many(KEYS), store.touch_many(KEYS), list(store.keys())), OLD
    ),
    "put": Operation(lambda store: store.put(b"new", NEW), OLD | {b"new": NEW}),
    "put again": Operation(
        lambda store: store.put_many(KEYS[:2], [NEW, b""]), OLD | {KEYS[0]: NEW, KEYS[1]: b""}
    ),
    "put many": Operation(press, OLD),
    "delete": Operation(
        lambda store: store.delete_many(KEYS[:3]), {k: OLD[k] for k in KEYS[3:]}, may_raise=True
    ),
    "sync": Operation(
        lambda store: [store.put(b"new", NEW), store.sync()],  # type: ignore[func-returns-value]
        OLD | {b"new": NEW},
        may_raise=True,
    ),
    "clear": Operation(lambda store: store.clear(), {}, may_raise=True),
    "grow": Operation(lambda store: store.resize(disk=CAPACITY + (128 << 10)), OLD, may_raise=True),
    "shrink": Operation(lambda store: store.resize(disk="192KiB"), OLD, may_raise=True),
    "check": Operation(lambda store: store.check(fix=True), OLD, may_raise=True),
    "close": Operation(
        lambda store: [store.delete(KEYS[0]), store.close()],  # type: ignore[func-returns-value]
        {k: OLD[k] for k in KEYS[1:]},
        may_raise=True,
    ),
}
SURE = {"get", "prefetch", "ask", "put", "put again", "sync", "delete", "grow"}
"""Operations after which nothing may be missing, once they have succeeded."""


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """A closed store of seven values, on a disk that costs little."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=place) as folder:
        with open_store(Path(folder) / "template") as store:
            assert store.put_many(KEYS, VALUES).all()
        yield Path(folder)


def used(template: Path, name: str, *, kinds: str = "*") -> int:
    """Calls of the seam that an operation makes, from an open store on."""
    io = FaultIO(template / "case")
    with fresh(template, io) as store:
        before = io.counts.copy()
        OPERATIONS[name].call(store)
        made = io.counts - before
    shutil.rmtree(template / "case")
    made.pop("reached", None)
    return sum(n for kind, n in made.items() if kinds == "*" or kind in kinds.split())


def fresh(template: Path, io: FaultIO) -> KeyedStore:
    shutil.rmtree(template / "case", ignore_errors=True)
    shutil.copytree(template / "template", template / "case")
    return open_store(template / "case", io=io, dram="128KiB", threads=0)


WAYS: dict[str, tuple[str, Callable[[Call], object]]] = {
    "EIO": ("*", error(errno.EIO)),
    "ENOSPC": ("*", error(errno.ENOSPC)),
    "short": (" ".join(TRANSFERS), short(1)),
    "no progress": (" ".join(TRANSFERS), short(0)),
}


def is_right(store: KeyedStore, allowed: list[Model]) -> None:
    """Every value is one of those that it may be; whatever else there is, is nobody's."""
    keys = sorted(set().union(*allowed))
    for key, value in zip(keys, store.get_many(keys), strict=True):
        assert value is None or value in [model.get(key) for model in allowed], key
    assert {key for key in store if not key.startswith(b"x")} <= set(keys)
    store.validate()
    stats = store.stats()
    assert stats.disk_bytes <= CAPACITY + (128 << 10)
    assert stats.leases == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_of_an_operation_may_fail(template: Path, name: str, way: str) -> None:
    """C15. P1 to P8 hold after it, another try succeeds, and nothing comes back later."""
    operation, (kinds, effect) = OPERATIONS[name], WAYS[way]
    calls = used(template, name, kinds=kinds)
    assert calls > 0 or name == "ask" or (name == "shrink" and kinds != "*")
    for number in range(1, calls + 1):
        io = FaultIO(template / "case")
        store = fresh(template, io)
        fault = io.inject(kinds, effect, nth=number)
        failed = False
        try:
            operation.call(store)
        except (OSError, MemoryError):
            assert operation.may_raise, f"call {number} came out"
            failed = True
        io.heal()
        assert fault.hits == 1 or name in ("prefetch", "put many", "check"), number
        if name == "close":
            assert descriptors_of(io) == 0
            store = open_store(template / "case", io=io, dram="128KiB", threads=0)
        is_right(store, [OLD, operation.after])
        if not store.is_closed and name != "close":
            operation.call(store)
        finish(store, io, template, name, number, failed=failed)
        shutil.rmtree(template / "case")


def finish(
    store: KeyedStore, io: FaultIO, template: Path, name: str, number: int, *, failed: bool
) -> None:
    """The operation has succeeded now: what it left is all there is, also after a power loss."""
    after = OPERATIONS[name].after
    allowed = [OLD, after] if name == "close" and failed else [after]
    if name == "close" and not failed:
        assert {key: store.get(key) for key in after} == after, number
    is_right(store, allowed)
    if name in SURE:
        assert {key: store.get(key) for key in after} == after, number
    assert store.put(b"new", NEW), number
    assert store.get(b"new") == NEW
    store.sync()
    kept = {key: value for key in after | {b"new": NEW} if (value := store.get(key)) is not None}
    io.crash(template / "after", keep="none")
    store.close()
    assert descriptors_of(io) == 0
    for place in ("after", "case"):
        with open_store(template / place) as again:
            is_right(again, [*allowed, {b"new": NEW}])
            assert {key: again.get(key) for key in kept} == kept, (place, number)
    shutil.rmtree(template / "after")


def descriptors_of(io: FaultIO) -> int:
    """Descriptors that were opened through the seam and not closed."""
    return len(io._open)


def test_opening_may_fail_at_each_call_and_leaves_nothing_open(template: Path) -> None:
    """C15. A store that opens after all has lost nothing by it but what cannot be read."""
    for source in ("template", "nothing"):
        counter = FaultIO(template / "case")
        opened(template, source, counter).close()
        for number in range(1, counter.calls + 1):
            for code, kinds in ((errno.EIO, "*"), (errno.ENOSPC, "*"), (errno.EMFILE, "open")):
                io = FaultIO(template / "case")
                io.inject(kinds, error(code), nth=number)
                try:
                    opened(template, source, io).close()
                except (OSError, ValueError, MemoryError):
                    assert descriptors_of(io) == 0, (source, number)
                io.heal()
                with open_store(template / "case", io=io) as store:
                    is_right(store, [OLD])
                    lost = [key for key in KEYS if key not in store]
                    assert source == "nothing" or code != errno.EMFILE or not lost, number
                    assert store.put(b"new", NEW)
                    store.sync()
                shutil.rmtree(template / "case", ignore_errors=True)


def opened(template: Path, source: str, io: FaultIO) -> KeyedStore:
    shutil.rmtree(template / "case", ignore_errors=True)
    if source == "template":
        shutil.copytree(template / "template", template / "case")
    return open_store(template / "case", io=io)
