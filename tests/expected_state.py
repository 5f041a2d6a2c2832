"""What a store must hold, kept outside it so that it outlives the process that uses the store.

A file of two numbers for each key: the version that is there (0: none), and the version that an
operation under way is about to put there. After a crash a key has one of the two.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt

KEYS = 48
ABSENT = 0
_NOTHING_PENDING = -1
_SIZES = (1, 100, 3000, 4097, 9000, 30_000)


def key(number: int) -> bytes:
    """The key of a number; some are too long for a row."""
    name = b"key-%d" % number
    return name if number % 6 else name.ljust(100, b".") + b"%d" % number


def value(number: int, version: int) -> bytes:
    """The value of a version of a key; no two are alike."""
    coin = random.Random(number * 1_000_003 + version)
    size = _SIZES[(number + version) % len(_SIZES)]
    return b"%d:%d;" % (number, version) + coin.randbytes(size)


class ExpectedState:
    """The file, mapped: what is written here is there when the process is killed."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        shape = (KEYS + 1, 2)
        self._table: npt.NDArray[np.int64] = np.memmap(
            path, np.int64, "w+" if is_new else "r+", shape=shape
        )
        if is_new:
            self._table[:, 0], self._table[:, 1] = ABSENT, _NOTHING_PENDING

    def next_version(self) -> int:
        """A version that was never used."""
        self._table[KEYS, 0] += 1
        return int(self._table[KEYS, 0])

    def begin(self, number: int, version: int) -> None:
        """An operation is about to put a version there, or ABSENT."""
        self._table[number, 1] = version

    def end(self, number: int, *, done: bool = True) -> None:
        """It came to its end, and did so or changed nothing."""
        if done:
            self._table[number, 0] = self._table[number, 1]
        self._table[number, 1] = _NOTHING_PENDING

    def settle(self, number: int, version: int) -> None:
        """This is what was found."""
        self._table[number] = version, _NOTHING_PENDING

    def committed(self, number: int) -> int:
        """The version that is there when nothing is under way."""
        return int(self._table[number, 0])

    def allowed(self, number: int) -> set[int]:
        """Versions of which one is there."""
        return {int(version) for version in self._table[number] if version >= 0}

    def check(self, found: Iterable[bytes | None], *, may_lose: bool) -> int:
        """Settle what was found under the keys, in order; how many were there.

        AssertionError if a value is none of those that the key may have, or if one is missing that
        no operation was taking away (unless the store `may_lose` values for lack of room).
        """
        there = 0
        for number, data in enumerate(found):
            versions = self.allowed(number)
            match = ABSENT
            if data is not None:
                same = [v for v in versions - {ABSENT} if value(number, v) == data]
                assert same, f"key {number}: {data[:20]!r} is none of the versions {versions}"
                match, there = same[0], there + 1
            assert match in versions or may_lose, f"key {number} is lost: expected {versions}"
            self.settle(number, match)
        return there
