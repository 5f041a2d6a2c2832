"""Replaying a skewed trace through queue policies, and through libCacheSim's where it is installed.

Zipf 1.0 over 100,000 blocks, 1,000,000 requests, capacity 10,000. Times are of this process's CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Ratio, Say, alternate, listed
from tierstore.policies import S3FIFO, Belady
from tierstore.policies.replay import POLICIES, next_uses
from tierstore.traces.generators import zipf
from tierstore.traces.readers import ORACLE_RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from tierstore.policies import QueuePolicy

_REQUESTS, _BLOCKS, _CAPACITY, _SEED = 1_000_000, 100_000, 10_000, 42
_LIBRARY = "libcachesim"
_HASHPOWER = 18
_TARGETS = {"lru": 10.0, "clock": 10.0, "s3-fifo": 4.0, "arc": 4.0, "sieve": 4.0}
_SPEED, _MISSES = "million requests a second of CPU time", "misses"
_OURS: dict[str, Callable[[], QueuePolicy]] = {
    **POLICIES,
    "s3-fifo": partial(S3FIFO, promote_at=2),
    "belady": partial(Belady, bypass=False),
}
"""In the dialects of libCacheSim."""
_THEIRS = {
    "fifo": "FIFO", "lru": "LRU", "clock": "Clock", "lfu": "LFU", "sieve": "Sieve", "arc": "ARC",
    "s3-fifo": "S3FIFO", "2q": "TwoQ", "lirs": "LIRS", "slru": "SLRU", "gdsf": "GDSF",
    "belady": "Belady",
}  # fmt: skip


class Run(NamedTuple):
    """What one replay took, in seconds, and its misses."""

    seconds: float
    misses: int


def run(say: Say, *, repeat: int = 5) -> Findings:
    """Replay every policy so many times."""
    return measure(say, repeat=repeat, requests=_REQUESTS, blocks=_BLOCKS, capacity=_CAPACITY)


def measure(say: Say, *, repeat: int, requests: int, blocks: int, capacity: int) -> Findings:
    """Replay a trace of that size; targets are for the default one."""
    machine = Machine.here()
    trace = zipf(requests, blocks, 1.0, _SEED)
    keys, future = trace.keys, next_uses(trace.keys)
    runs = {name: partial(_ours, name, keys, future, capacity) for name in _OURS}
    with tempfile.TemporaryDirectory() as directory:
        if importlib.util.find_spec(_LIBRARY) is not None:
            path = _write(Path(directory) / "trace.bin", keys, future)
            for name, of_library in _THEIRS.items():
                runs[_theirs_name(name)] = partial(_theirs, of_library, path, requests, capacity)
        results = alternate(runs, repeat, partial(_tell, say, requests))
    speeds = {name: [requests / r.seconds / 1e6 for r in each] for name, each in results.items()}
    misses = {name: [float(r.misses) for r in each] for name, each in results.items()}
    return Findings(
        benchmark="replay",
        machine=machine,
        baseline=_theirs_name("lru") if _theirs_name("lru") in runs else "lru",
        settings={"requests": requests, "blocks": blocks, "capacity": capacity, "rounds": repeat},
        configurations={name: _description(name) for name in runs},
        measures={
            "speed": Measure(_SPEED, speeds),
            "misses": Measure(_MISSES, misses),
        },
        ratios=_ratios(runs),
        notes=[*_targets(speeds), *_notes(misses)],
    )


def _theirs_name(name: str) -> str:
    return f"{name}, {_LIBRARY}"


def _description(name: str) -> str:
    return "replayed by libCacheSim" if name.endswith(_LIBRARY) else "replayed by tierstore"


def _ours(
    name: str,
    keys: npt.NDArray[np.int32],
    future: npt.NDArray[np.int64],
    capacity: int,
    number: int,
) -> Run:
    policy = _OURS[name]()
    policy.start(int(keys.max()) + 1, capacity)
    policy.expect(future)
    begun = time.process_time()
    hits = policy.request(keys)
    return Run(time.process_time() - begun, len(keys) - int(hits.sum()))


def _theirs(of_library: str, path: Path, requests: int, capacity: int, number: int) -> Run:
    library: Any = importlib.import_module(_LIBRARY)
    reader = library.TraceReader(
        str(path), library.TraceType.ORACLE_GENERAL_TRACE, library.ReaderInitParam()
    )
    cache = getattr(library, of_library)(capacity, hashpower=_HASHPOWER)
    begun = time.process_time()
    ratio, _ = cache.process_trace(reader)
    return Run(time.process_time() - begun, round(ratio * requests))


def _write(path: Path, keys: npt.NDArray[np.int32], future: npt.NDArray[np.int64]) -> Path:
    records = np.zeros(len(keys), ORACLE_RECORD)
    records["time"] = np.arange(len(keys)) // 1000
    records["id"], records["size"] = keys, 1
    records["next_access"] = np.where(future < len(keys), future, -1)
    records.tofile(path)
    return path


def _tell(say: Say, requests: int, number: int, latest: Mapping[str, Run]) -> None:
    speeds = {name: requests / each.seconds / 1e6 for name, each in latest.items()}
    say(f"round {number}: {listed(speeds)}")


def _ratios(runs: Mapping[str, object]) -> list[Ratio]:
    speeds = [
        Ratio(f"speed, {name} / libCacheSim", "speed", name, _theirs_name(name))
        for name in _THEIRS
        if _theirs_name(name) in runs
    ]
    misses = [
        Ratio(f"misses, {name} / libCacheSim", "misses", name, _theirs_name(name))
        for name in _THEIRS
        if _theirs_name(name) in runs
    ]
    return speeds + misses


def _targets(speeds: Mapping[str, list[float]]) -> list[str]:
    """Whether each target is reached; a speed is no ratio of two configurations."""
    medians = {name: statistics.median(speeds[name]) for name in _TARGETS}
    return [
        f"{name}: {medians[name]:.1f} million a second, target {target:.0f}: "
        + ("met" if medians[name] >= target else "not met")
        for name, target in _TARGETS.items()
    ]


def _notes(misses: Mapping[str, list[float]]) -> list[str]:
    pairs = [name for name in _THEIRS if _theirs_name(name) in misses]
    if not pairs:
        return [f"{_LIBRARY} is not installed (extra oracle): nothing to compare with"]
    equal = [name for name in pairs if misses[name] == misses[_theirs_name(name)]]
    return [f"equal misses in tierstore and libCacheSim: {', '.join(equal)}"]
