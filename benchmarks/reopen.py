"""Opening a store of many small records: after a close, after SIGKILL, and by scanning.

Each opening happens in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

from tierstore.benchmarks.open_once import Opened
from tierstore.benchmarks.rounds import Measure, Ratio, alternate
from tierstore.benchmarks.workload import OWN, Course, Part, forget
from tierstore.errors import TierstoreError
from tierstore.volume.format import PAGE
from tierstore.volume.manifest import FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BOUND = "bound"
CLOSED, KILLED, SCANNED = f"{OWN} closed", f"{OWN} killed", f"{OWN} scanned"
_PROGRAM = "tierstore.benchmarks.open_once"
_TIMEOUT_SECONDS = 1800.0


def openings(course: Course) -> Part:
    """Open a store of `Plan.records` records of one slot each, and one that was killed."""
    records = course.plan.records
    closed, killed = course.folder / "closed", course.folder / "killed"
    for action, folder in (("fill", closed), ("fill-kill", killed)):
        course.say(f"open: filling the store that will be {folder.name}")
        _child(action, folder, records)
    results = alternate(
        {
            CLOSED: partial(_open, "open", closed, records),
            KILLED: partial(_open, "open-kill", killed, records),
            SCANNED: partial(_scan, closed, records),
        },
        course.repeat,
        lambda number, latest: course.say(
            f"open: round {number} of {course.repeat}: "
            + ", ".join(f"{name} {opened.seconds:.2f} s" for name, opened in latest.items())
        ),
        warm_up=0,
    )
    return _found(records, results)


def _open(action: str, folder: Path, records: int, number: int) -> Opened:
    forget(folder)
    return Opened(**json.loads(_child(action, folder, records)))


def _scan(folder: Path, records: int, number: int) -> Opened:
    """Open a store whose directory is lost, and has to be found again from the segment files."""
    for directory in folder.rglob(FOLDER):
        shutil.rmtree(directory)
    return _open("open", folder, records, number)


def _child(action: str, folder: Path, records: int) -> str:
    """Standard output of the program that opens a store."""
    command = [sys.executable, "-P", "-m", _PROGRAM, action, str(folder), str(records)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
    )
    expected = -signal.SIGKILL if "kill" in action else 0
    if done.returncode != expected:
        raise TierstoreError(f"open: {action} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def _found(records: int, results: Mapping[str, Sequence[Opened]]) -> Part:
    closed = results[CLOSED]
    seconds = {name: [opened.seconds for opened in each] for name, each in results.items()}
    per_record = {
        f"{OWN} tables": [opened.table_bytes / opened.records for opened in closed],
        f"{OWN} memory": [opened.memory_bytes / opened.records for opened in closed],
        f"{OWN} disk": [opened.disk_bytes / opened.records for opened in closed],
    }
    rounds = len(closed)
    scanned = {
        SCANNED: [opened.records * PAGE / opened.seconds / 1e6 for opened in results[SCANNED]]
    }
    opening = f"open {records:,} records"
    metadata, scan = "metadata of a record", "recovery by scan"
    measures = {
        opening: Measure("s; cold", seconds | {BOUND: [2.0] * rounds}),
        metadata: Measure("bytes", per_record | {BOUND: [128.0] * rounds}),
        scan: Measure("MB/s of extents; cold", scanned | {BOUND: [500.0] * rounds}),
    }
    ratios = [
        Ratio(f"{opening}: {CLOSED} / {BOUND}", opening, CLOSED, BOUND, at_most=1.0),
        Ratio(f"{opening}: {KILLED} / {BOUND}", opening, KILLED, BOUND, at_most=1.0),
        *(
            Ratio(f"{metadata}: {name} / {BOUND}", metadata, name, BOUND, at_most=1.0)
            for name in per_record
        ),
        Ratio(f"{scan}: {SCANNED} / {BOUND}", scan, SCANNED, BOUND, at_least=1.0),
    ]
    return Part(measures, ratios)
