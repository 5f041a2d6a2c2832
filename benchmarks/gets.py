"""Warm reads: into a caller's buffer, as new bytes, and in place."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.benchmarks.contender import Get, Room, Rows, is_filling
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
    timed_reads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tierstore.benchmarks.contender import Contender
    from tierstore.benchmarks.rounds import Ratio


def warm_gets(course: Course, block: int) -> Part:
    """Read values of one size that every store has put, read once, and can keep in memory."""
    name, plan = f"get {label(block)}", course.plan
    count = max(1, plan.warm_bytes // block)
    keys, values = random_keys(count, block), random_values(count, block, seed=block)
    reader = WarmReader(keys, values, plan.reads(block))
    with ExitStack() as stack:
        runs: dict[str, Callable[[int], float]] = {}
        stores: list[Contender] = []
        for contender in course.running(block):
            room = Room(course.folder / contender.name, count * block, memory=2 * count * block)
            store = stack.enter_context(closing(contender(room)))
            stores.append(store)
            fill(store, keys, values)
            for form, get in store.gets().items():
                runs[store.name + form] = partial(reader.read, store.name + form, get)
            course.say(f"{name}: filled {store.name}")
        rates = course.alternate(name, runs)
        reports = {store.name: report for store in stores if (report := store.report())}
    measures = {name: Measure("MB/s; warm", rates)}
    return Part(measures, _ratios(measures, name, block), details={name: reports})


def fill(store: Contender, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    """Put everything the fastest way, and let the store come to rest."""
    put = list(store.puts().values())[-1]
    for part in chunks(len(keys), COMMIT):
        put(keys[part], values[part])
    store.settle()


class WarmReader:
    """Reads in an order that is the same for all in a round, and another in the next one."""

    def __init__(self, keys: Sequence[bytes], values: Sequence[bytes], reads: int) -> None:
        self._keys, self._values, self._reads = keys, values, reads
        self._rows = Rows.of(BATCH, len(values[0]))

    def read(self, name: str, get: Get, number: int) -> float:
        """MB/s; in round 0 everything is read once more, and else the last batch, and checked."""
        order = np.random.default_rng(number).permutation(np.arange(self._reads) % len(self._keys))
        parts = [order[part].tolist() for part in chunks(self._reads, BATCH)]
        batches = [[self._keys[index] for index in part] for part in parts]
        seconds = timed_reads(get, batches, self._rows)
        checked = parts[-1:]
        if number == 0:
            checked = [
                list(range(len(self._keys)))[part] for part in chunks(len(self._keys), BATCH)
            ]
        for part in checked:
            batch, expected = (
                [each[index] for index in part] for each in (self._keys, self._values)
            )
            check_reads(name, get, batch, expected, self._rows)
        return self._reads * len(self._values[0]) / seconds / 1e6


_KINDS: Mapping[str, Callable[[str], bool]] = {
    "buffer": is_filling,
    "view": lambda form: "view" in form.split(),
    "bytes": lambda form: "bytes" in form.split(),
}


def _ratios(measures: Mapping[str, Measure], name: str, block: int) -> list[Ratio]:
    """Each kind of ours against the best of the peers; small blocks count through the batch call.

    Most peers can only copy, so views are compared with their best copy, and apart from that with
    the one peer that has views, for which there is no target.
    """
    is_small = block < SMALL
    forms = list(measures[name].values)
    own, peers = (
        {
            kind: [form for form in forms if is_own(form) is ours and is_kind(form)]
            for kind, is_kind in _KINDS.items()
        }
        for ours in (True, False)
    )
    if is_small:
        own["buffer"] = [form for form in own["buffer"] if form == f"{OWN} batch"]
    rows = (
        ("into a buffer", "buffer", "buffer", 1.0),
        ("as a view, against a copy", "view", "buffer", None if is_small else 1.5),
        ("as a view", "view", "view", None),
        ("as bytes", "bytes", "bytes", None),
    )
    return [
        ratio
        for says, kind, other, target in rows
        for ratio in against_best(f"{name} {says}", measures, name, own[kind], peers[other], target)
    ]
