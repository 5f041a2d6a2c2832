"""Batches of reads from durable files, many at a time, and the buffers they go to."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from tierstore.deadlines import end_of, left_until
from tierstore.errors import ConfigError, TierOfflineError
from tierstore.io import read_fully

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import WriteableBuffer

    from tierstore.io import FileIO

_MERGED_BYTES = 1 << 20
_MERGED_BUFFERS = 1024
_RUNS_AT_ONCE = 16
_FOR_ONE = 16
"""Runs from which on one thread with a ring beats many without."""


class Read(NamedTuple):
    """One request: fill `buffer` with the bytes at `offset` of the file `fd`.

    `check` is called after that, in the thread that read, beside other reads; an exception of it
    is the outcome of the request.
    """

    fd: int
    offset: int
    buffer: WriteableBuffer
    check: Callable[[], None] | None = None


class LateReadError(TierOfflineError, TimeoutError):
    """A read was not done in time. Its buffer may change until `is_settled`."""

    def __init__(self, message: str, batch: _Batch | None) -> None:
        super().__init__(errno.ETIMEDOUT, message)
        self._batch = batch

    @property
    def is_settled(self) -> bool:
        """Whether the buffer is the caller's again: no thread will touch it any more."""
        return self._batch is None or self._batch.is_settled

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call that once the buffer is the caller's again: now, or in the thread that reads."""
        if self._batch is None or not self._batch.add_settling(call):
            call()


class _Batch:
    """The requests of one call, as runs: ranges of a file that follow each other, read as one.

    Whoever takes part takes some runs at a time, in order, and then leaves. `begun` counts runs
    that were taken, `active` those who hold some. The lock guards both; an outcome is written by
    the one that holds its run.
    """

    def __init__(self, requests: Sequence[Read]) -> None:
        self.answered = threading.Event()
        """Set when there is nothing more to wait for."""
        self.runs = _merged(requests)
        self.is_cancelled = False
        self.is_for_one = False
        """Whether whoever takes part takes all of it."""
        self._requests = requests
        self._outcomes: list[Exception | None] = [_UNKNOWN] * len(requests)
        self._lock = threading.Lock()
        self._begun = self._active = 0
        self._settling: list[Callable[[], None]] = []

    @property
    def has_more(self) -> bool:
        """Whether runs are left to take."""
        return self._begun < len(self.runs) and not self.is_cancelled

    @property
    def is_settled(self) -> bool:
        """Whether nobody holds a run, nor can take one."""
        with self._lock:
            return not self._active and not self.has_more

    def take(self, hands: int) -> list[list[int]]:
        """The next runs, fewer towards the end so that so many `hands` finish together."""
        with self._lock:
            if not self.has_more:
                return []
            left = len(self.runs) - self._begun
            count = left if self.is_for_one else _share(left, hands)
            first, self._begun = self._begun, self._begun + count
            self._active += 1
            return self.runs[first : self._begun]

    def perform(self, io: FileIO, runs: list[list[int]]) -> None:
        """Read runs that were taken, then leave."""
        try:
            for run in self._read_many(io, runs) if self.is_for_one else runs:
                if self.is_cancelled:
                    break
                if len(run) == 1 or not self._read_as_one(io, run):
                    for number in run:
                        self._outcomes[number] = _outcome(io, self._requests[number])
        except Exception as error:  # a thread that dies would keep its caller waiting
            self._fail(runs, error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._active -= 1
            if self._active or self.has_more:
                return
            self.answered.set()
            settling, self._settling = self._settling, []
        for call in settling:
            call()

    def _read_many(self, io: FileIO, runs: list[list[int]]) -> list[list[int]]:
        """Read many runs at once; returns those that are left."""
        own = [[self._requests[number] for number in run] for run in runs]
        wanted = [(each[0].fd, each[0].offset, [read.buffer for read in each]) for each in own]
        left = dict(enumerate(runs))
        with closing(io.read_many(wanted)) as reading:
            for position, count in reading:
                if count == _nbytes(wanted[position][2]):
                    self._note(left.pop(position), own[position])
                if self.is_cancelled:
                    break
        return list(left.values())

    def _fail(self, runs: list[list[int]], error: Exception) -> None:
        for run in runs:
            for number in run:
                if self._outcomes[number] is _UNKNOWN:
                    self._outcomes[number] = _bare(error)

    def _read_as_one(self, io: FileIO, run: list[int]) -> bool:
        """Whether one read filled all; if not, one bad place must not cost its neighbours."""
        requests = [self._requests[number] for number in run]
        buffers = [request.buffer for request in requests]
        try:
            count = io.read_into(requests[0].fd, buffers, requests[0].offset)
        except OSError:
            return False
        if count != _nbytes(buffers):
            return False
        self._note(run, requests)
        return True

    def _note(self, run: list[int], requests: Sequence[Read]) -> None:
        """The outcomes of requests whose bytes are there."""
        for number, request in zip(run, requests, strict=True):
            self._outcomes[number] = _checked(request)

    def cancel(self) -> None:
        """Begin no more runs."""
        with self._lock:
            self.is_cancelled = True
            if not self._active:
                self.answered.set()

    def add_settling(self, call: Callable[[], None]) -> bool:
        """Have that called when the batch is settled; False if it is."""
        with self._lock:
            if not self._active:
                return False
            self._settling.append(call)
            return True

    def outcomes(self) -> list[Exception | None]:
        """What is known, and a late outcome for the rest. Requires: answered or cancelled."""
        with self._lock:
            known = self._outcomes.copy()
            begun, is_active = self._begun, self._active > 0
        if _UNKNOWN not in known:
            return known
        running = LateReadError(
            "a read is not done: the time was up, or the reader closed", self if is_active else None
        )
        known = [running if outcome is _UNKNOWN else outcome for outcome in known]
        untouched = LateReadError(
            "a read was not begun: the time was up, or the reader closed", None
        )
        for run in self.runs[begun:]:
            for number in run:
                known[number] = untouched
        return known


_UNKNOWN = Exception("an outcome that is not known yet")


def _share(runs: int, hands: int) -> int:
    return min(_RUNS_AT_ONCE, max(1, runs // (2 * hands)))


def _merged(requests: Sequence[Read]) -> list[list[int]]:
    """Numbers of requests by place in the files, together where one read can serve them."""
    places = [request[:2] for request in requests]
    runs: list[list[int]] = []
    end: tuple[int, int] | None = None
    nbytes = 0
    for number in sorted(range(len(places)), key=places.__getitem__):
        fd, offset = place = places[number]
        size = memoryview(requests[number].buffer).nbytes
        nbytes += size
        if place == end and nbytes <= _MERGED_BYTES and len(runs[-1]) < _MERGED_BUFFERS:
            runs[-1].append(number)
        else:
            runs.append([number])
            nbytes = size
        end = (fd, offset + size)
    return runs


def _nbytes(buffers: Sequence[WriteableBuffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def _outcome(io: FileIO, request: Read) -> Exception | None:
    try:
        read_fully(io, request.fd, request.buffer, request.offset)
    except Exception as error:
        return _bare(error)
    return _checked(request)


def _checked(request: Read) -> Exception | None:
    try:
        if request.check is not None:
            request.check()
    except Exception as error:
        return _bare(error)
    return None


def _bare(error: Exception) -> Exception:
    """Without its traceback, which would keep the callers' frames, and what they hold, alive."""
    return error.with_traceback(None)


class _Queue:
    """Batches with runs left. Workers hold this, not the pool, so that a lost pool ends them."""

    def __init__(self, io: FileIO, threads: int) -> None:
        self.io = io
        self.threads = threads
        self.workers: list[threading.Thread] = []
        self.is_closed = False
        self._process = os.getpid()
        self._arrived = threading.Condition(threading.Lock())
        self._waiting: deque[_Batch] = deque()
        self._live: weakref.WeakSet[_Batch] = weakref.WeakSet()
        self._idle = 0

    def add(self, batch: _Batch, hands: int) -> bool:
        """Have up to `hands` workers take part; False if the queue is closed."""
        if os.getpid() != self._process:
            raise ConfigError(
                "a ReadPool was used in a fork of the process that made it: make one after forking"
            )
        with self._arrived:
            if self.is_closed:
                return False
            self._live.add(batch)
            hands = min(hands, self.threads)
            if hands:
                self._waiting.append(batch)
                self._arrived.notify(hands)
            missing = min(hands - self._idle, self.threads - len(self.workers))
            while missing > 0 and self._start_worker():
                missing -= 1
            return True

    def _start_worker(self) -> bool:
        worker = threading.Thread(target=_work, args=(self,), name="tierstore-read", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # the system gives no more threads
            return False
        self.workers.append(worker)
        return True

    def take(self) -> tuple[_Batch, list[list[int]]] | None:
        """Runs of the batch whose turn it is, once there are some; None when all is over."""
        with self._arrived:
            while not self.is_closed:
                while self._waiting:
                    batch = self._waiting.popleft()
                    runs = batch.take(self.threads)
                    if batch.has_more:
                        self._waiting.append(batch)
                    if runs:
                        return batch, runs
                self._idle += 1
                self._arrived.wait()
                self._idle -= 1
        return None

    def drop(self, batch: _Batch) -> None:
        """Offer a batch to workers no more."""
        with self._arrived:
            if batch in self._waiting:
                self._waiting.remove(batch)

    def close(self) -> list[_Batch]:
        """End idle workers, and others after their runs; returns the batches that have a caller."""
        if os.getpid() != self._process:  # workers stay behind in a fork, and may hold the lock
            return []
        with self._arrived:
            self.is_closed = True
            self._arrived.notify_all()
            live = list(self._live)
        for batch in live:
            batch.cancel()
        return live


def _work(queue: _Queue) -> None:
    while (taken := queue.take()) is not None:
        batch, runs = taken
        batch.perform(queue.io, runs)
        # An idle worker must not keep the buffers of its last batch alive.
        del taken, batch, runs


class Reading:
    """A batch of reads under way."""

    def __init__(self, queue: _Queue, batch: _Batch, until: float | None) -> None:
        self._queue = queue
        self._batch = batch
        self._until = until

    def wait(self) -> list[Exception | None]:
        """The outcome of each request, as of `ReadPool.read`, at the deadline at the latest."""
        batch, until = self._batch, self._until
        try:
            if until is None or not self._queue.workers:
                self._take_part()
            batch.answered.wait(left_until(until))
        except BaseException:  # an interrupt: the caller is about to reuse or free the buffers
            batch.cancel()
            batch.answered.wait(left_until(until))
            raise
        finally:
            batch.cancel()
            self._queue.drop(batch)
        return batch.outcomes()

    def _take_part(self) -> None:
        while self._until is None or time.monotonic() < self._until:
            runs = self._batch.take(self._queue.threads + 1)
            if not runs:
                return
            self._batch.perform(self._queue.io, runs)


class ReadPool:
    """Reads batches of requests, with many of them under way at once.

    Any thread may call; batches of several callers take turns. What waits is what the callers
    themselves wait for, and at most `threads` reads hang with a disk that hangs.

    Parameters
    ----------
    threads: reads under way at once. 0 reads in the calling thread, one after the other.
    """

    def __init__(self, io: FileIO, threads: int = 32) -> None:
        if threads < 0:
            raise ConfigError(f"threads={threads} in ReadPool: expected 0 or more")
        self._queue = _Queue(io, threads)
        self._end = weakref.finalize(self, self._queue.close)

    def read(
        self, requests: Sequence[Read], deadline: float | None = None
    ) -> list[Exception | None]:
        """Fill the buffers; the outcome of each request, None where all is well.

        Others: the OSError; `TierOfflineError` if the file ends too soon; what the check raised;
        `LateReadError` for what is not done after `deadline` seconds, or when the pool closes.
        What was not begun by then never will be, but a thread that hangs in the operating system
        still has its buffers: keep them, unused, until the error `is_settled`.

        Without a deadline the caller takes part in reading. A pool without threads looks at the
        time between reads only. ConfigError in a fork of the process that made the pool.
        """
        return self._begin(requests, deadline, 0 if deadline is not None else 1).wait()

    def begin(self, requests: Sequence[Read], deadline: float | None = None) -> Reading:
        """As `read`, but return at once: threads read while the caller does something else.

        The buffers are not the caller's before `Reading.wait` returned, which also takes part in
        what is left to do; a pool without threads does all of it there. A batch of 16 runs or more
        without a deadline is read by one thread, by io_uring where there is one.
        """
        return self._begin(requests, deadline, 0)

    def _begin(self, requests: Sequence[Read], deadline: float | None, callers: int) -> Reading:
        until = end_of(deadline)
        batch = _Batch(requests)
        batch.is_for_one = until is None and self._can_be_for_one(batch)
        hands = 1 if batch.is_for_one else len(batch.runs)
        if not self._queue.add(batch, hands - callers) or not batch.runs:
            batch.cancel()
        return Reading(self._queue, batch, until)

    def _can_be_for_one(self, batch: _Batch) -> bool:
        return len(batch.runs) >= _FOR_ONE and self._queue.threads > 0 and self._queue.io.reads_many

    def close(self, deadline: float = 5.0) -> bool:
        """Refuse further reads and wait for those under way; whether all threads ended.

        After `deadline` seconds, callers that still wait get late outcomes and threads that hang
        are left alone: they end with the process. May be called again.
        """
        until = time.monotonic() + deadline
        self._end.detach()
        live = self._queue.close()
        for worker in self._queue.workers:
            worker.join(left_until(until))
        for batch in live:
            batch.answered.wait(left_until(until))
            batch.answered.set()
        return not any(worker.is_alive() for worker in self._queue.workers)
