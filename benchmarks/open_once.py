"""Fills or opens a store of many small records, in a process of its own.

::

    python -m tierstore.benchmarks.open_once {fill,fill-kill,open,open-kill} FOLDER RECORDS

``open`` prints an `Opened` as JSON; ``kill`` ends by SIGKILL, with some values not synced.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.benchmarks.keyed import IDENTITY, metadata_bytes
from tierstore.benchmarks.workload import KEY_BYTES
from tierstore.keyed import KeyedStore
from tierstore.volume.format import PAGE

_PUTS = 4096
_SAMPLE = 1000
_DISK_SLACK = 256 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening took.

    Attributes
    ----------
    memory_bytes: by which the process's own memory grew.
    table_bytes: what the store says that it needs of that to describe the records.
    disk_bytes: of the files that are not values.
    """

    seconds: float
    records: int
    memory_bytes: int
    table_bytes: int
    disk_bytes: int


def _key(record: int) -> bytes:
    return hashlib.blake2b(record.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def _value(record: int) -> bytes:
    return record.to_bytes(8, "big")


def _store(folder: Path, records: int) -> KeyedStore:
    return KeyedStore(folder, IDENTITY, disk=records * PAGE * 5 // 4 + _DISK_SLACK)


def _fill(folder: Path, records: int) -> KeyedStore:
    store = _store(folder, records)
    for start in range(0, records, _PUTS):
        batch = range(start, min(start + _PUTS, records))
        store.put_many([_key(record) for record in batch], [_value(record) for record in batch])
    return store


def _timed_open(folder: Path, records: int) -> KeyedStore:
    """Open it, check some of it, and print what it took."""
    _load_kernels()
    before, begin = _own_memory(), time.perf_counter()
    store = _store(folder, records)
    seconds = time.perf_counter() - begin
    memory = _own_memory() - before
    found = Opened(
        seconds, len(store), memory, store.stats().metadata_bytes, metadata_bytes(folder)
    )
    print(json.dumps(asdict(found)), flush=True)
    sample = range(0, records, max(1, records // _SAMPLE))
    values = store.get_many([_key(record) for record in sample])
    if found.records < records or values != [_value(record) for record in sample]:
        sys.exit(f"{found.records} of {records} records were there, or a value was wrong")
    return store


def _load_kernels() -> None:
    """Have everything loaded that the first store of a process loads."""
    with tempfile.TemporaryDirectory() as folder:
        for records in (2, 3):
            _fill(Path(folder) / "first", records).close()
    gc.collect()


def _own_memory() -> int:
    """Bytes of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def _die(store: KeyedStore) -> None:
    """Sync, put values that are not synced, and end without a close."""
    store.sync()
    store.put_many([os.urandom(KEY_BYTES) for _ in range(_PUTS)], [b"unsynced"] * _PUTS)
    os.kill(os.getpid(), signal.SIGKILL)


def _main(action: str, folder: Path, records: int) -> None:
    store = _fill(folder, records) if "fill" in action else _timed_open(folder, records)
    if "kill" in action:
        _die(store)
    store.close()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
