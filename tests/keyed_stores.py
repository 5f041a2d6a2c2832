"""Small keyed stores, and what tests look at around them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.testing.faults import hanging

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierstore.testing.faults import Call

IDENTITY = Identity(model="test")
SEGMENT = 64 << 10
KEYS = [b"key %d" % i for i in range(8)]

METHODS: dict[str, Callable[[KeyedStore], object]] = {
    "put": lambda store: store.put(b"a", b"1"),
    "get": lambda store: store.get(KEYS[0]),
    "get_into": lambda store: store.get_into(KEYS, np.zeros((8, 5000), np.uint8)),
    "contains": lambda store: store.contains(KEYS[0]),
    "in": lambda store: KEYS[0] in store,
    "touch": lambda store: store.touch(KEYS[0]),
    "lease": lambda store: store.lease(KEYS[0], owner="test", seconds=1),
    "prefetch": lambda store: store.prefetch(KEYS),
    "keys": lambda store: store.keys(),
    "iter": iter,
    "delete": lambda store: store.delete(KEYS[0]),
    "clear": lambda store: store.clear(),
    "sync": lambda store: store.sync(),
    "resize": lambda store: store.resize(disk="1MiB"),
    "check": lambda store: store.check(),
}
TESTS = os.path.dirname(os.path.abspath(__file__))


def open_store(path: Path, **options: Any) -> KeyedStore:  # noqa: ANN401
    """A store of 7 segments of 64 KiB, without a memory tier."""
    return KeyedStore(path, IDENTITY, **{"disk": "512KiB", "segment": SEGMENT, **options})


def content(seed: int, size: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(seed).bytes(size)


VALUES = [content(i, 5000) for i in range(8)]


def filled(path: Path, **options: Any) -> KeyedStore:  # noqa: ANN401
    """A store of eight values."""
    store = open_store(path, **{"dram": "128KiB", **options})
    assert store.put_many(KEYS, VALUES).all()
    return store


def descriptors(path: Path) -> set[str]:
    """Descriptors of this process to files below a directory."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing itself
            continue
        if target.startswith(f"{path}/"):
            found.add(f"{number} {target}")
    return found


def segment_files(store: KeyedStore) -> list[str]:
    """Paths of the store's segment files."""
    return [segment.path for segment in store.volume.files.by_number.values()]


class Hang:
    """An effect: the call waits until `release`; `arrived` tells that it is there."""

    def __init__(self) -> None:
        self.arrived, self._released = threading.Event(), threading.Event()
        self.effect: Callable[[Call], object] = hanging(self._released, self.arrived)

    def wait(self) -> None:
        """Until a call hangs."""
        assert self.arrived.wait(60), "nothing hangs"

    def release(self) -> None:
        """Let it go on."""
        self._released.set()


def in_child(
    script: str, *arguments: object, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, where the test helpers can be imported."""
    lines = textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", lines, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *sys.path])},
    )  # fmt: skip
