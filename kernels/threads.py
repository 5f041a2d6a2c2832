"""Spread the rows of one kernel call over threads when the work pays for waking them."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

# For less (some hundred microseconds) waking a thread costs more than it saves.
_WORTH_A_THREAD = 4_000_000


def thread_count() -> int:
    """Threads a kernel may use: ``TIERSTORE_THREADS``, else the processors of this process."""
    wanted = os.environ.get("TIERSTORE_THREADS")
    if wanted:
        return max(1, int(wanted))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    parts = min(thread_count(), rows) if work >= _WORTH_A_THREAD else 1
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
