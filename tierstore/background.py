"""Work that must not hold up its caller: with a deadline, or in the background."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from tierstore.errors import CapacityError, TierOfflineError
from tierstore.events import emit

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_MOST_WAITING = 64


def in_time(call: Callable[[], _Result], deadline: float | None, what: str) -> _Result:
    """What that returns, in `deadline` seconds; else TierOfflineError, and it goes on alone."""
    if deadline is None:
        return call()
    returned: list[_Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=run, name=f"tierstore-{what}", daemon=True)
    worker.start()
    worker.join(deadline)
    if worker.is_alive():
        raise TierOfflineError(
            errno.ETIMEDOUT,
            f"{what} was not done within {deadline} seconds: the disk hangs, or the deadline is "
            "too short",
        )
    if raised:
        raise raised[0]
    return returned[0]


class Prefetch:
    """A prefetch under way."""

    def __init__(self) -> None:
        self._done = threading.Event()

    @classmethod
    def done(cls) -> Prefetch:
        """One with nothing to do."""
        prefetch = cls()
        prefetch.finish()
        return prefetch

    def finish(self) -> None:
        """Let those who wait go on."""
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is done, after at most `timeout` seconds."""
        return self._done.wait(timeout)


_Jobs = queue.Queue[tuple[Callable[[], None], Prefetch] | None]


class Prefetcher:
    """One daemon thread that does prefetches in order, started by the first."""

    def __init__(self) -> None:
        self._queue: _Jobs = queue.Queue(_MOST_WAITING)
        self._workers: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._is_closed = False
        self._end = weakref.finalize(self, _end, self._queue, self._workers)

    def add(self, call: Callable[[], None]) -> Prefetch:
        """Have that done. CapacityError if too many wait already."""
        prefetch = Prefetch()
        with self._starting:
            if self._is_closed:
                return Prefetch.done()
            try:
                self._queue.put_nowait((call, prefetch))
            except queue.Full as error:
                raise CapacityError(
                    f"{_MOST_WAITING} prefetches wait already: wait for some of them first"
                ) from error
            if not self._workers:
                worker = threading.Thread(
                    target=_work, args=(self._queue,), name="tierstore-prefetch", daemon=True
                )
                worker.start()
                self._workers.append(worker)
        return prefetch

    def close(self) -> None:
        """Do nothing more; those who wait go on."""
        with self._starting:
            self._is_closed = True
            self._end.detach()
            _stop(self._queue)


def _stop(waiting: _Jobs) -> None:
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            break
        if job is not None:
            job[1].finish()
    waiting.put(None)


def _end(waiting: _Jobs, workers: list[threading.Thread]) -> None:
    """Stop, and wait: a thread that is inside compiled code when Python ends may abort it."""
    _stop(waiting)
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join(1.0)


def _work(waiting: _Jobs) -> None:
    while (job := waiting.get()) is not None:
        call, prefetch = job
        try:
            call()
        except Exception as error:
            emit(
                _log, logging.WARNING, "prefetch.failed", f"a prefetch failed: {error!r}",
                error=repr(error),
            )  # fmt: skip
        finally:
            prefetch.finish()
        del job, call  # an idle worker must not keep the store alive
