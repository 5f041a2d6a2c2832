"""Running a schedule, with threads for each resource, or predicting how long it takes."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.kernels.threads import shared_by
from tierstore.schedules import CALLER, SCHEDULES, STAGES, WAITING, Schedule, Stage, Task, schedule
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Calls = Mapping[str, Callable[[Task], None]]
    """What to do for a task of each stage."""
    Durations = Mapping[str, float] | Callable[[Task], float]
    """Seconds of a task: those of its stage, none where that is missing, or any function of it."""

__all__ = [
    "CALLER",
    "SCHEDULES",
    "STAGES",
    "Pipeline",
    "Run",
    "Schedule",
    "Stage",
    "Task",
    "Timeline",
    "perform",
    "schedule",
    "simulate",
]


def simulate(tasks: Schedule, durations: Durations) -> Timeline:
    """When each task runs if nothing but the schedule holds it up; the clock begins at 0.

    A task starts when those it comes after have ended and its resource has done all that stand
    before it in the schedule. ConfigError for a duration below 0.
    """
    timeline, ends, free = Timeline("simulated"), list[float](), dict[str, float]()
    for task in tasks:
        seconds = durations(task) if callable(durations) else durations.get(task.stage, 0.0)
        if not seconds >= 0:
            raise ConfigError(f"{task.stage} of {seconds} s: expected a duration of at least 0")
        start = max([free.get(task.resource, 0.0), *(ends[before] for before in task.after)])
        free[task.resource] = start + seconds
        ends.append(start + seconds)
        _note(timeline, task, start, start + seconds)
    return timeline


def perform(tasks: Schedule, calls: Calls, timeline: Timeline | None = None) -> None:
    """Do all tasks in the calling thread, one after the other."""
    for task in tasks:
        _do(task, calls, timeline)


def _do(task: Task, calls: Calls, timeline: Timeline | None) -> None:
    if timeline is None:
        calls[task.stage](task)
        return
    start = time.perf_counter()
    calls[task.stage](task)
    _note(timeline, task, start, time.perf_counter())


def _note(timeline: Timeline, task: Task, start: float, end: float) -> None:
    timeline.add(
        task.stage, task.resource, start, end,
        step=task.step, layer=task.layer, micro_batch=task.micro_batch,
    )  # fmt: skip


def _worker(task: Task) -> str:
    """Who does a task: its resource or, of one that waits, the second of two in turn.

    While one hands out what a device brought, the device has the requests of the other.
    """
    is_second = task.resource in WAITING and task.micro_batch % 2 == 1 and task.micro_batch > 0
    return f"{task.resource} 2" if is_second else task.resource


class Run:
    """A schedule under way. The lock guards what is done and who is still at work."""

    def __init__(self, tasks: Schedule, calls: Calls, timeline: Timeline | None) -> None:
        self._tasks = tasks
        self._calls = calls
        self._timeline = timeline
        self._is_done = [False] * len(tasks)
        self._changed = threading.Condition(threading.Lock())
        self._error: BaseException | None = None
        self._own: dict[str, list[int]] = {}
        for position, task in enumerate(tasks):
            self._own.setdefault(_worker(task), []).append(position)
        self._computers = {_worker(task) for task in tasks if task.resource not in WAITING}
        self._at_work = set(self._own) - {CALLER}

    @property
    def workers(self) -> list[str]:
        """Those that need a thread of their own."""
        return sorted(self._at_work)

    def work(self, worker: str) -> None:
        """Do the tasks of a worker; after an error anywhere, begin no more of them."""
        try:
            for position in self._own.get(worker, ()):
                if not self._wait_for(self._tasks[position].after):
                    return
                with shared_by(self._computing()):
                    _do(self._tasks[position], self._calls, self._timeline)
                with self._changed:
                    self._is_done[position] = True
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, the caller must hear of it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            with self._changed:
                self._at_work.discard(worker)
                self._changed.notify_all()

    def _wait_for(self, positions: Sequence[int]) -> bool:
        """Whether those are done; False after an error."""
        with self._changed:
            while self._error is None and not all(map(self._is_done.__getitem__, positions)):
                self._changed.wait()
            return self._error is None

    def _computing(self) -> int:
        """Workers that compute and have work left: so many share the processors."""
        with self._changed:
            return sum(not self._is_done[self._own[worker][-1]] for worker in self._computers)

    def wait_for(self, stage: str) -> None:
        """Return when all tasks of a stage are done, or an error keeps them from it."""
        self._wait_for([i for i, task in enumerate(self._tasks) if task.stage == stage])

    def wait(self) -> None:
        """Do the caller's tasks, and return when all are done; raise the first error of any.

        Nothing of this run is under way any more then.
        """
        self.work(CALLER)
        while True:
            try:
                with self._changed:
                    while self._at_work:
                        self._changed.wait()
                break
            except BaseException as error:  # an interrupt: others still use what the caller owns
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
        first, self._error = self._error, None
        if first is not None:
            try:
                raise first
            finally:
                # Its traceback holds this frame: a cycle would keep what all its frames hold.
                del first


_Jobs = queue.SimpleQueue[tuple[Run, str] | None]


class Pipeline:
    """Threads for the resources of schedules, started by the first run that needs them.

    A resource that waits for a device has two, which take turns by micro-batch; others have one.

    timeline: what notes when each task ran; None for nothing.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self._threads: dict[str, tuple[threading.Thread, _Jobs]] = {}
        self._end = weakref.finalize(self, _end, self._threads)

    def start(self, tasks: Schedule, calls: Calls) -> Run:
        """Begin what other threads have to do; `Run.wait` does the rest.

        Runs begun later get a thread when it has done its tasks of this one.
        """
        if not self._end.alive:
            raise ConfigError("the pipeline is closed: make another one")
        run = Run(tasks, calls, self.timeline)
        # All threads first: one that cannot be had must not leave the others waiting for its tasks.
        queues = [(self._jobs_of(worker), worker) for worker in run.workers]
        for jobs, worker in queues:
            jobs.put((run, worker))
        return run

    def _jobs_of(self, worker: str) -> _Jobs:
        if worker not in self._threads:
            jobs: _Jobs = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(jobs,), name=f"tierstore-{worker}", daemon=True
            )
            thread.start()
            self._threads[worker] = thread, jobs
        return self._threads[worker][1]

    def close(self) -> None:
        """End the threads when they have done what was begun. A second call does nothing."""
        self._end()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        run, worker = job
        run.work(worker)
        # An idle thread must not keep what its last run worked on.
        del job, run


def _end(threads: dict[str, tuple[threading.Thread, _Jobs]]) -> None:
    for _, jobs in threads.values():
        jobs.put(None)
    for thread, _ in threads.values():
        if thread is not threading.current_thread():
            thread.join()
    threads.clear()
