"""Which values may be written to disk: all, those asked for again, or what its endurance allows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from tierstore.arguments import check_whole
from tierstore.sizes import parse_size

Fingerprints = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]
Verdicts = npt.NDArray[np.bool_]

DAY_S = 86_400
BURST_S = 3_600
"""Seconds for which an `EnduranceBudget` saves what it did not spend."""

ROWS = 4
CELLS_PER_REQUEST = 4
MOST_REQUESTS = 255
MOST_WINDOW = 1 << 28


class Admission(ABC):
    """Decides which values enter. Knows fingerprints, sizes and time; never keys, bytes or tiers.

    The store asks under its lock, so from one thread at a time, once for each value that it would
    otherwise write. One call with any number of values means the same as one call for each of them,
    in order, at the same time. The same history has the same answers.
    """

    @abstractmethod
    def admit(self, fingerprints: Fingerprints, sizes: Sizes, now: float) -> Verdicts:
        """Whether each value may enter, bool [n].

        fingerprints: uint64 [n], a hash of each key. sizes: int64 [n] bytes, none negative.
        now: seconds of the store's clock, which may stand still or jump either way.
        """


class AdmitAll(Admission):
    """Everything may enter."""

    def admit(self, fingerprints: Fingerprints, sizes: Sizes, now: float) -> Verdicts:
        return np.ones(len(fingerprints), np.bool_)


class AdmitAfter(Admission):
    """A value enters when it is asked for the n-th time, so that what is used once costs no write.

    requests: n, 1 to 255. window: how many requests, of any value, are remembered at least. seed:
    of the hashing.

    Requests are counted in two count-min sketches of fixed size, the running window and the one
    before. A value asked for n times within `window` requests always enters at the n-th; one that
    was not asked for in the last two windows is forgotten. Collisions only ever count too much: of
    values asked for once, with n = 2, at most about one in 40 enters early. A halved sketch would
    forget every value seen once at each halving; hence two of them.
    """

    def __init__(self, requests: int = 2, window: int = 100_000, seed: int = 0) -> None:
        self.requests = check_whole("requests", requests, 1, MOST_REQUESTS)
        self.window = check_whole("window", window, 1, MOST_WINDOW)
        random = np.random.default_rng(check_whole("seed", seed, 0, (1 << 64) - 1))
        # Multiply-shift: the top bits of the product with an odd number.
        odd = random.integers(0, 1 << 63, (ROWS, 1), np.uint64) * np.uint64(2) + np.uint64(1)
        bits = (CELLS_PER_REQUEST * self.window - 1).bit_length()
        self._odd, self._shift = odd, np.uint64(64 - bits)
        self._running = np.zeros((ROWS, 1 << bits), np.uint8)
        self._before = np.zeros_like(self._running)
        self._asked = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the counters: 32 to 64 for each request of the window."""
        return self._running.nbytes + self._before.nbytes

    def admit(self, fingerprints: Fingerprints, sizes: Sizes, now: float) -> Verdicts:
        admitted = np.empty(len(fingerprints), np.bool_)
        start = 0
        while start < len(fingerprints):
            stop = min(len(fingerprints), start + self.window - self._asked)
            admitted[start:stop] = self._count(fingerprints[start:stop]) >= self.requests
            self._asked += stop - start
            start = stop
            if self._asked == self.window:
                self._running, self._before = self._before, self._running
                self._running.fill(0)
                self._asked = 0
        return admitted

    def _count(self, fingerprints: Fingerprints) -> Sizes:
        """How often each has been asked for, this time included; and count it."""
        cells = ((fingerprints * self._odd) >> self._shift).astype(np.int64)
        least = np.full(len(fingerprints), 1 << 62)
        for running, before, at in zip(self._running, self._before, cells, strict=True):
            nth, last = _occurrences(at)
            count = running[at].astype(np.int64) + nth
            np.minimum(least, count + before[at], out=least)
            running[at[last]] = np.minimum(count[last], 255)
        return least


class EnduranceBudget(Admission):
    """Values enter at random, so that the bytes written follow what the disk is rated for.

    bytes_per_day: such as ``"500GB"``. seed: of the draws.

    The budget is earned by the second and saved for an hour at most; a new object starts with an
    hour's savings. While they are more than half, everything enters. Below, a value of mean size
    enters with the probability ``2 * savings / hour``, and one of k times the mean size with the
    k-th power of it: larger values are rejected first (CacheLib rejects by size too, see its
    dynamic random admission policy). A value may overdraw the savings, after which nothing enters
    until they are repaid. In any stretch of time, at most its budget, one hour's savings and one
    value enter; a jump of the clock, either way, earns an hour at most.
    """

    def __init__(self, bytes_per_day: int | str, seed: int = 0) -> None:
        self.bytes_per_day = parse_size(bytes_per_day, "bytes_per_day")
        self._random = np.random.default_rng(check_whole("seed", seed, 0, (1 << 64) - 1))
        self._bytes_per_s = self.bytes_per_day / DAY_S
        self._most = self._bytes_per_s * BURST_S
        self._savings = self._most
        self._then: float | None = None
        self._asked = self._asked_bytes = 0

    def admit(self, fingerprints: Fingerprints, sizes: Sizes, now: float) -> Verdicts:
        if len(sizes):
            self._earn(now)
        draws = self._random.random(len(sizes))
        asked = zip(sizes.tolist(), draws.tolist(), strict=True)
        return np.array([self._spend(size, draw) for size, draw in asked], np.bool_)

    def _earn(self, now: float) -> None:
        if not math.isfinite(now):
            return
        if self._then is not None and now > self._then:
            self._savings += min((now - self._then) * self._bytes_per_s, self._most)
            self._savings = min(self._savings, self._most)
        self._then = now

    def _spend(self, size: int, draw: float) -> bool:
        self._asked += 1
        self._asked_bytes += size
        chance = min(1.0, max(0.0, 2 * self._savings / self._most))
        if size and draw >= chance ** (size * self._asked / self._asked_bytes):
            return False
        self._savings -= size
        return True


def _occurrences(cells: npt.NDArray[np.int64]) -> tuple[Sizes, npt.NDArray[np.int64]]:
    """For each cell how often it has occurred up to there, and the last position of each."""
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    changes = ordered[1:] != ordered[:-1]
    position = np.arange(len(cells))
    start = np.maximum.accumulate(position * np.append(True, changes))
    nth = np.empty(len(cells), np.int64)
    nth[order] = position - start + 1
    return nth, order[np.append(changes, True)]
