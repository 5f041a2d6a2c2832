"""The keyed store against lmdb, diskcache, rocksdict and plain files on one disk.

Everything takes its turn in every round; a value that comes back wrong ends the benchmark.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.benchmarks.cold import FIO, cold_gets
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.gets import warm_gets
from tierstore.benchmarks.keyed import Keyed, Unchecked
from tierstore.benchmarks.machine import Machine, file_system_of
from tierstore.benchmarks.peers import PEERS, is_installed
from tierstore.benchmarks.puts import synced_puts, unsynced_puts
from tierstore.benchmarks.reopen import BOUND, openings
from tierstore.benchmarks.workload import Course, Part, Plan, label
from tierstore.errors import CapacityError, ConfigError
from tierstore.sizes import format_size
from tierstore.volume.format import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tierstore.benchmarks.contender import Contender
    from tierstore.benchmarks.rounds import Say

_FORMS_AT_ONCE = 13
PARTS = ("get", "put", "cold", "open")
_FORMS = (
    "A name alone stands for one call for each key; 'batch' for one call for 64 keys, or 256 puts "
    "without a sync; 'bytes' for new bytes objects instead of the caller's buffer; 'view' for the "
    "store's own memory, read by nobody. Ratios take the best form of each side."
)
_SETTLED = (
    "After each turn of puts everything is synced, and rocksdict flushes and compacts, outside the "
    "time that counts."
)


def run(
    say: Say,
    *,
    repeat: int = 5,
    disk: str | Path | None = None,
    parts: str = ",".join(PARTS),
    records: int = 1_000_000,
) -> Findings:
    """Measure on the disk that the directory `disk` lies on; some 20 GB of it are used."""
    plan = Plan(records=records)
    return measure(say, plan, repeat=repeat, disk=disk or tempfile.gettempdir(), parts=parts)


def measure(
    say: Say, plan: Plan, *, repeat: int, disk: str | Path, parts: str = ",".join(PARTS)
) -> Findings:
    """Measure what `plan` says, in new directories below `disk` that are removed again."""
    chosen = _chosen(parts)
    _check_disk(Path(disk), plan, repeat)
    machine, found = Machine.here(), Part()
    peers = tuple(each for each in PEERS if is_installed(each))
    contenders: tuple[type[Contender], ...] = (Keyed, *peers)
    for part in _parts(chosen, plan):
        with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=disk) as folder:
            found.add(part(Course(say, Path(folder), contenders, plan, repeat)))
    return Findings(
        benchmark="store",
        machine=machine,
        baseline="files",
        settings={
            "values": ", ".join(map(label, plan.blocks)),
            "read warm": format_size(plan.warm_bytes),
            "read cold": format_size(plan.cold_bytes),
            "records opened": plan.records,
            "file system": file_system_of(Path(disk)),
            "measured": ", ".join(chosen),
        },
        configurations=_configurations(found),
        measures=found.measures,
        ratios=found.ratios,
        notes=[_FORMS, _SETTLED, *found.notes],
        details=found.details,
    )


def _chosen(parts: str) -> list[str]:
    chosen = parts.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise ConfigError(f"parts={parts!r}: expected some of {', '.join(PARTS)}, with commas")
    return chosen


def _check_disk(disk: Path, plan: Plan, repeat: int) -> None:
    """Make the directory. CapacityError if its disk has too little room for the largest part."""
    put = max(plan.puts(block) * block for block in plan.blocks)
    needed = max(_FORMS_AT_ONCE * (1 + repeat) * put, 4 * plan.records * PAGE, 8 * plan.cold_bytes)
    disk.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise CapacityError(
            f"store: about {format_size(needed)} of disk are needed at a time, and "
            f"{format_size(free)} are free in {str(disk)!r}: name another directory with --disk, "
            "or pass a smaller --repeat or --records"
        )


def _parts(chosen: list[str], plan: Plan) -> Iterator[Callable[[Course], Part]]:
    """What is measured, one after the other; each has a directory to itself."""
    if "get" in chosen:
        yield from (partial(warm_gets, block=block) for block in plan.blocks)
    if "put" in chosen:
        yield from (partial(unsynced_puts, block=block) for block in plan.blocks)
        yield from (partial(synced_puts, block=block) for block in plan.blocks)
    if "cold" in chosen:
        yield cold_gets
    if "open" in chosen:
        yield openings


def _configurations(found: Part) -> Mapping[str, str]:
    """What the stores are, and whatever else has values."""
    known: tuple[type[Contender], ...] = (Keyed, *PEERS)
    others = {
        Unchecked.name: Unchecked.about,
        FIO: "fio, io_uring, direct, on the segment files of our store",
        BOUND: "the target",
    }
    stores = {each.name: _about(each) for each in known}
    measured = {name for measure in found.measures.values() for name in measure.values}
    forms = {
        name: f"{name.split()[0]}, called by the form {' '.join(name.split()[1:])!r}"
        for name in sorted(measured - set(stores) - set(others))
    }
    return stores | {name: text for name, text in others.items() if name in measured} | forms


def _about(contender: type[Contender]) -> str:
    return contender.about if is_installed(contender) else "not installed"
