"""Spread the rows of one kernel call over threads when the work pays for waking them."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

# For less (some hundred microseconds) waking a thread costs more than it saves.
_WORTH_A_THREAD = 4_000_000


def thread_count() -> int:
    """Threads a kernel may use: ``TIERSTORE_THREADS``, else the processors of this process."""
    wanted = os.environ.get("TIERSTORE_THREADS")
    if wanted:
        return max(1, int(wanted))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Share(threading.local):
    """What the calling thread may use of them: one part of so many."""

    parts = 1


_share = _Share()


@contextmanager
def shared_by(callers: int) -> Iterator[None]:
    """Kernels that this thread calls use its share where so many threads call some at once.

    Threads that all wake others for every kernel take turns on the processors, and each of them
    waits for its slowest part.
    """
    before, _share.parts = _share.parts, max(1, callers)
    try:
        yield
    finally:
        _share.parts = before


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, thread_count() - 1), thread_name_prefix="tierstore-kernel")


if hasattr(os, "register_at_fork"):  # Windows has no fork.
    os.register_at_fork(after_in_child=_pool.cache_clear)


def over_rows(rows: int, work: int, run: Callable[[int, int], None]) -> None:
    """Call ``run(first, last)`` so that every row in ``range(rows)`` is covered exactly once.

    work: multiply-adds, or bytes to copy, which take about as long.

    No part is running any more when this returns or raises, so that arrays may be used again.
    """
    parts = min(thread_count() // _share.parts, rows) if work >= _WORTH_A_THREAD else 1
    if parts <= 1:
        run(0, rows)
        return
    cuts = [rows * part // parts for part in range(parts + 1)]
    waiting = [_pool().submit(run, cuts[i], cuts[i + 1]) for i in range(1, parts)]
    try:
        run(0, cuts[1])
    finally:
        failures = [part.exception() for part in waiting]
    for failure in failures:
        if failure is not None:
            raise failure
