"""Schedules against what they promise, and simulated times against longest paths found by hand."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.pipeline import SCHEDULES, STAGES, Schedule, Stage, Task, schedule, simulate

ATTENTION = STAGES[:4]
FRONT = ("select", "judge", "fetch")

names = st.sampled_from(list(SCHEDULES))
sizes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
seconds = st.dictionaries(
    st.sampled_from([stage.name for stage in STAGES]), st.integers(0, 9).map(float)
)


def longest_path(tasks: Schedule, durations: dict[str, float]) -> float:
    """When the last task ends, by following every chain of waiting backwards."""

    @cache
    def end(position: int) -> float:
        task = tasks[position]
        same = [i for i in range(position) if tasks[i].resource == task.resource]
        waits_for = {*task.after, *same[-1:]}
        return max(map(end, waits_for), default=0.0) + durations.get(task.stage, 0.0)

    return max(map(end, range(len(tasks))))


@given(names, sizes, seconds)
def test_simulated_time_is_the_longest_path(
    name: str, size: tuple[int, int, int], durations: dict[str, float]
) -> None:
    layers, parts, steps = size
    tasks = schedule(name, layers, parts, steps=steps)
    assert simulate(tasks, durations).seconds == longest_path(tasks, durations)


@given(names, sizes, seconds, st.integers(1, 3))
def test_every_task_waits_for_what_it_needs(
    name: str, size: tuple[int, int, int], durations: dict[str, float], ahead: int
) -> None:
    layers, parts, steps = size
    tasks = schedule(name, layers, parts, steps=steps, ahead=ahead)
    spans = simulate(tasks, durations).spans
    for position, (task, span) in enumerate(zip(tasks, spans, strict=True)):
        assert all(before < position for before in task.after)
        assert all(spans[before].end <= span.start for before in task.after)
    for resource in {task.resource for task in tasks}:
        mine = [span for span in spans if span.track == resource]
        assert all(one.end <= two.start for one, two in itertools.pairwise(mine))


@given(names, sizes)
def test_every_stage_of_every_micro_batch_is_done_once(
    name: str, size: tuple[int, int, int]
) -> None:
    layers, parts, steps = size
    tasks = schedule(name, layers, parts, steps=steps)
    done = [(task.stage, task.step, task.layer, task.micro_batch) for task in tasks]
    turns = list(itertools.product(range(steps), range(layers)))
    front = [(stage, *turn, part) for stage in FRONT for turn in turns for part in range(parts)]
    whole = [(stage.name, *turn, -1) for stage in STAGES[3:] for turn in turns]
    assert sorted(done) == sorted(front + whole)


@given(st.integers(1, 7), st.integers(1, 3), seconds)
def test_no_stage_runs_further_ahead_than_it_may(
    parts: int, ahead: int, durations: dict[str, float]
) -> None:
    """Micro-batches that one stage has begun and the next one has not ended."""
    durations = {name: value + 1 for name, value in durations.items()}
    spans = simulate(schedule("sfc", 2, parts, ahead=ahead), durations).spans
    for layer, (stage, later) in itertools.product(range(2), itertools.pairwise(FRONT)):
        begun = [s.start for s in spans if s.name == stage and s.facts["layer"] == layer]
        ended = [s.end for s in spans if s.name == later and s.facts["layer"] == layer]
        for moment in begun:
            under_way = sum(b <= moment for b in begun) - sum(e <= moment for e in ended)
            assert under_way <= ahead


@given(sizes, seconds)
def test_overlapping_never_takes_longer_than_one_after_the_other(
    size: tuple[int, int, int], durations: dict[str, float]
) -> None:
    layers, parts, steps = size
    times = {
        name: simulate(schedule(name, layers, parts, steps=steps), durations).seconds
        for name in ("sequential", "sfc")
    }
    assert times["sfc"] <= times["sequential"]
    whole = sum(durations.get(stage.name, 0) * (1 if stage.is_whole else parts) for stage in STAGES)
    assert times["sequential"] == layers * steps * whole


def test_sfc_judges_one_micro_batch_behind_and_fetches_two_behind() -> None:
    """All stages of the same length: the diagonal of the paper."""
    each = {"select": 1.0, "judge": 1.0, "fetch": 1.0, "compute": 1.0}
    spans = simulate(schedule("sfc", 1, 3, ATTENTION), each).spans
    starts = {(span.name, span.facts["micro_batch"]): span.start for span in spans}
    assert starts == {
        ("select", 0): 0, ("select", 1): 1, ("select", 2): 2,
        ("judge", 0): 1, ("judge", 1): 2, ("judge", 2): 3,
        ("fetch", 0): 2, ("fetch", 1): 3, ("fetch", 2): 4,
        ("compute", -1): 5,
    }  # fmt: skip


def test_previous_layer_fetches_while_the_layer_before_computes() -> None:
    each = {"fetch": 2.0, "compute": 1.0, "rest": 1.0}
    tasks = schedule("previous-layer", 3, 1)
    assert simulate(tasks, each).seconds == 2 + 3 * 2
    assert simulate(schedule("sequential", 3, 1), each).seconds == 3 * 4


def test_previous_step_fetches_for_the_next_step() -> None:
    each = {"fetch": 3.0, "compute": 1.0, "rest": 1.0}
    tasks = schedule("previous-step", 4, 1, steps=5)
    spans = simulate(tasks, each).spans
    ends = [span.end for span in spans if span.name == "rest"]
    first, last = ends[3], ends[-1]
    # From the second step on, a layer waits for the disk alone.
    assert last - first < 4 * 4 * (3 + 1 + 1)
    starts = {(s.name, s.facts["step"], s.facts["layer"]): s.start for s in spans}
    for step, layer in itertools.product(range(1, 5), range(4)):
        fetching = starts["fetch", step, layer]
        assert starts["compute", step - 1, layer] < fetching < starts["compute", step, layer]


def test_a_duration_may_depend_on_the_task() -> None:
    def slow_first(task: Task) -> float:
        return 5.0 if task.micro_batch == 0 else 1.0

    assert simulate(schedule("sequential", 1, 2, ATTENTION), slow_first).seconds == 3 * 6 + 1


def test_stages_of_ones_own() -> None:
    """A link between disk and device is one more stage."""
    stages = [*STAGES[:3], Stage("upload", "link"), *STAGES[3:]]
    each = {"fetch": 1.0, "upload": 1.0, "compute": 1.0}
    assert simulate(schedule("sfc", 1, 4, stages), each).seconds == 4 + 1 + 1
    assert simulate(schedule("sequential", 1, 4, stages), each).seconds == 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("fastest", 1, 1), "schedule='fastest': expected one of sequential"),
        (lambda: schedule("sfc", 0, 1), "layers=0"),
        (lambda: schedule("sfc", 1, 0), "micro_batches=0"),
        (lambda: schedule("sfc", 1, 1, ahead=0), "ahead=0"),
        (lambda: schedule("sfc", 1, 1, STAGES[3:]), "expected stages of micro-batches, then"),
        (lambda: schedule("sfc", 1, 1, STAGES[::-1]), "expected stages of micro-batches, then"),
        (lambda: simulate(schedule("sfc", 1, 1), {"fetch": -1.0}), "fetch of -1.0 s"),
        (lambda: simulate(schedule("sfc", 1, 1), {"fetch": float("nan")}), "fetch of nan s"),
    ],
)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=message):
        call()
