"""What the store benchmark moves: incompressible values, keys, and a check of what came back."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tierstore.benchmarks.contender import Contender, Get, Look, Rows, Value, is_filling
from tierstore.benchmarks.rounds import Measure, Ratio, Say, Spread, alternate, listed
from tierstore.errors import CorruptBlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

OWN = "tierstore"
KEY_BYTES = 32
BATCH = 64
"""Keys of a batch call, and puts between two syncs."""

COMMIT = 256
"""Puts of a batch call or a commit where nothing is synced."""

SMALL = 64 << 10
"""Blocks of fewer bytes are compared by the batch call alone."""

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured; all but the last three in bytes.

    Attributes
    ----------
    blocks: sizes of a value.
    warm_bytes: values of the store that is read warm.
    read_bytes, put_bytes, synced_bytes: moved in a round by each form of a call.
    cold_bytes: values of the store that is read cold. cold_read_bytes: read of them in a round.
    most_calls: blocks that a form moves in a round at most, however small they are.
    most_syncs: batches that are synced in a round at most.
    records: in the store that is opened.
    """

    blocks: tuple[int, ...] = (4 * _KIB, 64 * _KIB, _MIB)
    warm_bytes: int = 256 * _MIB
    read_bytes: int = 256 * _MIB
    put_bytes: int = 256 * _MIB
    synced_bytes: int = 128 * _MIB
    cold_block: int = 64 * _KIB
    cold_bytes: int = 1024 * _MIB
    cold_read_bytes: int = 512 * _MIB
    most_calls: int = 16_384
    most_syncs: int = 32
    records: int = 1_000_000

    def reads(self, block: int) -> int:
        """Blocks that each form reads in a round."""
        return _whole(min(self.read_bytes // block, self.most_calls), BATCH)

    def puts(self, block: int) -> int:
        """Blocks that each form puts in a round without a sync."""
        return _whole(min(self.put_bytes // block, self.most_calls), COMMIT)

    def synced_puts(self, block: int) -> int:
        """Blocks that each form puts and syncs in a round."""
        return _whole(min(self.synced_bytes // block, self.most_syncs * BATCH), BATCH)


@dataclass(frozen=True, slots=True)
class Course:
    """What all parts of the benchmark are run with.

    Attributes
    ----------
    folder: on the disk that is measured; empty.
    contenders: the stores that are installed, ours first.
    repeat: rounds that count.
    """

    say: Say
    folder: Path
    contenders: tuple[type[Contender], ...]
    plan: Plan
    repeat: int

    def running(self, block: int, *, is_durable: bool = False) -> list[type[Contender]]:
        """The contenders that have something to show for such values."""
        return [each for each in self.contenders if each.takes_part(block, is_durable)]

    def alternate(
        self, name: str, runs: Mapping[str, Callable[[int], float]]
    ) -> dict[str, list[float]]:
        """Rates of every run in every round."""

        def after_round(number: int, latest: Mapping[str, float]) -> None:
            self.say(f"{name}: round {number} of {self.repeat}: {listed(latest)}")

        return alternate(runs, self.repeat, after_round)


@dataclass(slots=True)
class Part:
    """What one part of the benchmark found."""

    measures: dict[str, Measure] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)

    def add(self, other: Part) -> None:
        """Append what another part found."""
        self.measures |= other.measures
        self.ratios += other.ratios
        self.notes += other.notes
        self.details |= other.details


def label(size: int) -> str:
    """A block size as it is written in the names of measures."""
    return f"{size // _MIB} MiB" if size % _MIB == 0 else f"{size / _KIB:g} KiB"


def random_values(count: int, size: int, *, seed: int) -> list[bytes]:
    """So many different values that no codec makes smaller."""
    generator = np.random.default_rng(seed)
    return [generator.bytes(size) for _ in range(count)]


def random_keys(count: int, *seed: int) -> list[bytes]:
    """Keys that depend on `seed` alone; those of two seeds have none in common."""
    generator = np.random.default_rng(seed)
    return [generator.bytes(KEY_BYTES) for _ in range(count)]


def chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover so many, the last one maybe shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def ignore(values: Sequence[Value | None]) -> None:
    """Looks at nothing: for the clock."""


def timed_reads(get: Get, batches: Iterable[Sequence[bytes]], rows: Rows) -> float:
    """Seconds that the batches take."""
    look: Look = ignore
    begin = time.perf_counter()
    for batch in batches:
        get(batch, rows, look)
    return time.perf_counter() - begin


def check_reads(
    form: str, get: Get, keys: Sequence[bytes], expected: Sequence[bytes], rows: Rows
) -> None:
    """CorruptBlockError unless a form of reading gives just the bytes that were put."""
    found: list[bytes] = []
    rows.array.fill(0)
    get(keys, rows, lambda values: found.extend(bytes(value or b"") for value in values))
    if is_filling(form):
        found = [bytes(row) for row, _ in zip(rows.views, keys, strict=False)]
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    if wrong:
        raise CorruptBlockError(
            f"{form}: {wrong} of {len(keys)} values are not what was put; its figures mean nothing"
        )


def forget(folder: Path) -> None:
    """Drop the page cache of all files below a folder, as far as no one has them mapped."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def is_own(configuration: str) -> bool:
    """Whether a configuration is one of ours."""
    return configuration.split()[0] == OWN


def best(measure: Measure, names: Iterable[str]) -> str | None:
    """Of some configurations of a measure the one with the greatest median; None without any."""
    medians = {name: Spread.of(measure.values[name]).median for name in names}
    return max(medians, key=medians.__getitem__, default=None)


def against_best(
    says: str,
    measures: Mapping[str, Measure],
    name: str,
    own: Iterable[str],
    peers: Iterable[str],
    at_least: float | None = None,
) -> list[Ratio]:
    """Our best form over the peers' best form; empty where one side has none."""
    above, below = best(measures[name], own), best(measures[name], peers)
    if above is None or below is None:
        return []
    return [Ratio(f"{says}: {above} / {below}", name, above, below, at_least=at_least)]


def _whole(count: int, batch: int) -> int:
    """Whole batches, or one that is shorter."""
    return count // batch * batch or max(count, 1)
