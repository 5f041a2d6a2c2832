"""A pipeline does the tasks of a schedule in threads, and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.kernels import threads
from tierstore.kernels.threads import over_rows
from tierstore.pipeline import SCHEDULES, STAGES, Pipeline, Task, perform, schedule
from tierstore.schedules import WAITING
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ATTENTION = STAGES[:4]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    before = set(threading.enumerate())
    pipeline = Pipeline()
    yield pipeline
    pipeline.close()
    assert set(threading.enumerate()) <= before, "a thread is left"


class Log:
    """What began and ended, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Task]] = []
        self.threads: dict[str, set[str]] = {}

    def do(self, task: Task) -> None:
        self.events.append(("begin", task))
        self.threads.setdefault(task.resource, set()).add(threading.current_thread().name)
        self.events.append(("end", task))

    def calls(self, **others: Callable[[Task], None]) -> dict[str, Callable[[Task], None]]:
        return {stage.name: self.do for stage in STAGES} | others


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_tasks_run_in_the_order_of_their_needs(
    name: str, layers: int, parts: int, ahead: int
) -> None:
    tasks, log = schedule(name, layers, parts, ahead=ahead, steps=2), Log()
    pipeline = Pipeline()
    pipeline.start(tasks, log.calls()).wait()
    pipeline.close()
    began = [task for event, task in log.events if event == "begin"]
    assert sorted(began) == sorted(tasks)
    for task in tasks:
        begin = log.events.index(("begin", task))
        for before in task.after:
            assert ("end", tasks[before]) in log.events[:begin]
    turns: dict[tuple[str, int], list[Task]] = {}
    for task in tasks:
        turn = task.micro_batch % 2 if task.resource in WAITING else 0
        turns.setdefault((task.resource, turn), []).append(task)
    for own in turns.values():
        assert [task for task in began if task in own] == own
    for resource, names in log.threads.items():
        assert len(names) == sum(of == resource for of, _ in turns)


def test_stages_of_different_micro_batches_run_at_once(pipeline: Pipeline) -> None:
    """Select of 2, judge of 1 and fetch of 0 meet; one after the other they never would."""
    meeting = threading.Barrier(3, timeout=20)
    meets = {("select", 2), ("judge", 1), ("fetch", 0)}

    def do(task: Task) -> None:
        if (task.stage, task.micro_batch) in meets:
            meeting.wait()

    calls = dict.fromkeys(("select", "judge", "fetch", "compute"), do)
    pipeline.start(schedule("sfc", 1, 4, ATTENTION), calls).wait()
    assert not meeting.broken


@pytest.mark.parametrize(
    ("stage", "part"), list(itertools.product(("select", "judge", "fetch"), (0, 1, 3)))
)
def test_an_error_of_a_stage_comes_to_the_caller(pipeline: Pipeline, stage: str, part: int) -> None:
    log, running = Log(), Log()

    def fail(task: Task) -> None:
        if task.micro_batch == part:
            raise OSError(5, f"{stage} of {part}")
        log.do(task)

    tasks = schedule("sfc", 1, 4, ATTENTION)
    with pytest.raises(OSError, match=f"{stage} of {part}"):
        pipeline.start(tasks, log.calls(**{stage: fail})).wait()
    assert len(log.events) % 2 == 0, "a task was still running"
    assert all(task.stage != "compute" for _, task in log.events)
    count = len(log.events)
    pipeline.start(tasks, running.calls()).wait()
    assert len(log.events) == count, "a task of the failed run came later"
    assert len(running.events) == 2 * len(tasks)


def test_two_fetches_are_under_way_at_once(pipeline: Pipeline) -> None:
    """The barrier opens only when two have come to it."""
    barrier = threading.Barrier(2, timeout=60)

    def fetch(_: Task) -> None:
        barrier.wait()

    pipeline.start(schedule("sfc", 1, 4, ATTENTION), Log().calls(fetch=fetch)).wait()
    assert not barrier.broken


def test_what_waits_for_the_disk_leaves_its_processors_to_kernels(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Select and judge share four threads, whatever fetches; computing alone has all."""
    monkeypatch.setenv("TIERSTORE_THREADS", "4")
    parts: dict[str, list[int]] = {"select": [], "compute": []}

    def compute(task: Task) -> None:
        seen: list[int] = []
        over_rows(8, 1 << 30, lambda first, _: seen.append(first))
        parts[task.stage].append(len(seen))

    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(threads, "_pool", lambda: pool)
        tasks = schedule("sfc", 1, 2, ATTENTION)
        pipeline.start(tasks, Log().calls(select=compute, compute=compute)).wait()
    assert parts == {"select": [2, 2], "compute": [4]}


def test_an_error_of_the_computation_comes_to_the_caller(pipeline: Pipeline) -> None:
    def fail(task: Task) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.start(schedule("sfc", 2, 3), Log().calls(compute=fail)).wait()


def test_the_first_error_counts(pipeline: Pipeline) -> None:
    late = threading.Event()

    def fail(task: Task) -> None:
        late.wait(20)
        raise ValueError("second")

    def fail_first(task: Task) -> None:
        try:
            raise ValueError("first")
        finally:
            late.set()

    tasks = [Task("judge", "cpu", 0, 0, 0, ()), Task("fetch", "disk", 0, 0, 0, ())]
    with pytest.raises(ValueError, match="first"):
        pipeline.start(tasks, {"judge": fail, "fetch": fail_first}).wait()


def test_a_run_goes_on_without_its_caller(pipeline: Pipeline) -> None:
    done = threading.Event()
    run = pipeline.start([Task("update", "cpu", 0, 0, -1, ())], {"update": lambda _: done.set()})
    assert done.wait(20)
    run.wait_for("update")
    run.wait()


def test_an_idle_thread_keeps_nothing_alive(pipeline: Pipeline) -> None:
    class Work:
        def do(self, task: Task) -> None:
            pass

    work = Work()
    gone = weakref.ref(work)
    pipeline.start([Task("update", "cpu", 0, 0, -1, ())], {"update": work.do}).wait()
    pipeline.start([Task("update", "cpu", 0, 0, -1, ())], {"update": lambda _: None}).wait()
    del work
    gc.collect()
    assert gone() is None


def test_a_forgotten_pipeline_ends_its_threads() -> None:
    before = set(threading.enumerate())
    pipeline = Pipeline()
    pipeline.start(schedule("sfc", 1, 2), Log().calls()).wait()
    assert set(threading.enumerate()) - before
    del pipeline
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_closed_pipeline_says_so(pipeline: Pipeline) -> None:
    pipeline.close()
    pipeline.close()
    with pytest.raises(ConfigError, match="the pipeline is closed"):
        pipeline.start(schedule("sfc", 1, 2), Log().calls())


def test_performing_takes_no_thread_and_notes_the_same() -> None:
    before, timeline, log = set(threading.enumerate()), Timeline(), Log()
    tasks = schedule("sfc", 2, 3)
    perform(tasks, log.calls(), timeline)
    assert set(threading.enumerate()) <= before
    assert [task for event, task in log.events if event == "begin"] == tasks
    noted = [(span.name, span.track, dict(span.facts)) for span in timeline.spans]
    assert noted == [
        (t.stage, t.resource, {"step": t.step, "layer": t.layer, "micro_batch": t.micro_batch})
        for t in tasks
    ]
    assert all(one.end <= two.start for one, two in itertools.pairwise(timeline.spans))
