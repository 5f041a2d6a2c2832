"""Writes of fresh keys: those that survive the end of a process, and those that survive power."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from tierstore.benchmarks.contender import Room, Rows
from tierstore.benchmarks.rounds import Measure
from tierstore.benchmarks.workload import (
    BATCH,
    COMMIT,
    OWN,
    SMALL,
    Course,
    Part,
    against_best,
    check_reads,
    chunks,
    is_own,
    label,
    random_keys,
    random_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.benchmarks.contender import Contender, Put

_CHECKED = 16


def unsynced_puts(course: Course, block: int) -> Part:
    """Put one by one, and in batches or commits of 256; sync nothing."""
    name, state = f"put {label(block)}", f"fresh keys; survives SIGKILL; commits of {COMMIT}"
    writer = _Writer(block, course.plan.puts(block), COMMIT)
    return _measured(course, writer, name, f"MB/s; {state}", is_durable=False)


def synced_puts(course: Course, block: int) -> Part:
    """Put in batches of 64, each synced before the next, where a store can make values durable."""
    name, state = (
        f"put {label(block)}, synced",
        f"fresh keys; survives power loss; syncs of {BATCH}",
    )
    writer = _Writer(block, course.plan.synced_puts(block), BATCH)
    return _measured(course, writer, name, f"MB/s; {state}", is_durable=True)


def _measured(course: Course, writer: _Writer, name: str, unit: str, *, is_durable: bool) -> Part:
    capacity = 2 * (1 + course.repeat) * writer.round_bytes
    with ExitStack() as stack:
        runs: dict[str, Callable[[int], float]] = {}
        for contender in course.running(writer.block, is_durable=is_durable):
            folder = course.folder / contender.name
            room = Room(folder, capacity, 2 * course.plan.warm_bytes, is_durable)
            store = stack.enter_context(closing(contender(room)))
            for form, put in store.puts().items():
                runs[store.name + form] = partial(writer.write, len(runs), store, form, put)
        measures = {name: Measure(unit, course.alternate(name, runs))}
    own = [form for form in runs if is_own(form)]
    if writer.block < SMALL:
        own = [form for form in own if form == f"{OWN} batch"]
    peers = [form for form in runs if not is_own(form)]
    return Part(measures, against_best(name, measures, name, own, peers, at_least=1.0))


class _Writer:
    """Puts the same values under other keys in every round, and for every form."""

    def __init__(self, block: int, puts: int, batch: int) -> None:
        self.block, self.round_bytes = block, puts * block
        self._batch = batch
        self._values = random_values(puts, block, seed=puts)
        self._rows = Rows.of(_CHECKED, block)

    def write(self, place: int, store: Contender, form: str, put: Put, number: int) -> float:
        """MB/s. Some of the values are read back and compared."""
        count = len(self._values)
        keys = random_keys(count, self.block, place, number)
        batches = [(keys[part], self._values[part]) for part in chunks(count, self._batch)]
        begin = time.perf_counter()
        for some, values in batches:
            put(some, values)
        seconds = time.perf_counter() - begin
        get = next(iter(store.gets().values()))
        sample = slice(0, count, -(-count // _CHECKED))
        check_reads(store.name + form, get, keys[sample], self._values[sample], self._rows)
        store.settle()
        return self.round_bytes / seconds / 1e6
