"""Cold random reads: the page cache is empty, and ours and fio's pass it by."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.benchmarks import fio
from tierstore.benchmarks.contender import Room, Rows, is_filling
from tierstore.benchmarks.gets import fill
from tierstore.benchmarks.keyed import Unchecked, full_segments
from tierstore.benchmarks.rounds import Measure, Ratio
from tierstore.benchmarks.workload import (
    OWN,
    Course,
    Part,
    against_best,
    check_reads,
    chunks,
    forget,
    is_own,
    label,
    random_keys,
    random_values,
    timed_reads,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.benchmarks.contender import Contender

COLD_BATCH = 512
DEPTH = 32
FIO = "fio"


def cold_gets(course: Course) -> Part:
    """Read what no memory holds, in random order, beside fio on our own segment files."""
    block = course.plan.cold_block
    name = f"get {label(block)}, cold"
    reader = _ColdReader(course, block)
    runs: dict[str, Callable[[int], float]] = {}
    for contender in course.running(block):
        reader.fill(contender)
        course.say(f"{name}: filled {contender.name}")
        runs[contender.name] = partial(reader.read, contender, contender.name)
    peers = [each for each in runs if not is_own(each)]
    runs[Unchecked.name] = partial(reader.read, Unchecked, OWN)
    notes = _add_fio(course, runs)
    measures = {name: Measure("MB/s; cold, random", course.alternate(name, runs))}
    details: dict[str, object] = {name: reader.reports}
    ratios = against_best(name, measures, name, [OWN], peers)
    if FIO in runs:
        ratios.append(Ratio(f"{name}: {OWN} / {FIO}", name, OWN, FIO, at_least=0.9))
    says = f"{name}, time with checksums / without"
    ratios.append(Ratio(says, name, Unchecked.name, OWN, at_most=1.05))
    return Part(measures, ratios, notes, details)


def _add_fio(course: Course, runs: dict[str, Callable[[int], float]]) -> list[str]:
    """Let fio take part, if it can read the files; else a note says why not."""
    block, total = course.plan.cold_block, course.plan.cold_read_bytes
    files = full_segments(course.folder / OWN)
    try:
        fio.random_read(files, block, block, DEPTH, seed=0)
    except fio.FioError as error:
        return [f"Nothing to compare cold reads with: {error}."]
    runs[FIO] = lambda number: fio.random_read(files, block, total, DEPTH, seed=number)
    return []


class _ColdReader:
    """Opens a store for each turn, after the page cache has lost its files."""

    def __init__(self, course: Course, block: int) -> None:
        plan = course.plan
        self.reports: dict[str, dict[str, object]] = {}
        self._folder, self._block = course.folder, block
        self._keys = random_keys(plan.cold_bytes // block, block)
        self._values = random_values(len(self._keys), block, seed=block)
        self._reads = min(plan.cold_read_bytes // block, len(self._keys))
        self._rows = Rows.of(min(COLD_BATCH, self._reads), block)

    def _open(self, contender: type[Contender], folder: str) -> Contender:
        return contender(Room(self._folder / folder, len(self._keys) * self._block))

    def fill(self, contender: type[Contender]) -> None:
        """Make a store and close it."""
        with closing(self._open(contender, contender.name)) as store:
            fill(store, self._keys, self._values)

    def read(self, contender: type[Contender], folder: str, number: int) -> float:
        """MB/s. Each block is read at most once; the last batch once more, to compare it."""
        order = np.random.default_rng(number).permutation(len(self._keys))[: self._reads]
        parts = [order[part].tolist() for part in chunks(self._reads, len(self._rows.views))]
        batches = [[self._keys[index] for index in part] for part in parts]
        forget(self._folder / folder)
        with closing(self._open(contender, folder)) as store:
            # Of the forms that fill the caller's rows the last one reads most at once.
            form, get = [each for each in store.gets().items() if is_filling(each[0])][-1]
            seconds = timed_reads(get, batches, self._rows)
            expected = [self._values[index] for index in parts[-1]]
            check_reads(contender.name + form, get, batches[-1], expected, self._rows)
            if report := store.report():
                self.reports[contender.name] = report
        return self._reads * self._block / seconds / 1e6
