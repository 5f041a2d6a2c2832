"""Schedules of an engine: the same outputs whatever overlaps, and nothing left after an error."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS
from tierstore.errors import ConfigError
from tierstore.tiers import DeviceTier, FileTier, PinnedTier
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tierstore.interfaces import Completion, Ids, Selection, Tier
    from tierstore.layout import BlockLayout

GEOMETRY = Geometry(2, 4, 2, 16, torch.float32, torch.device("cpu"))
SCALE, SEQUENCES, PROMPT, STEPS = 0.25, 5, 150, 34


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {
        name for name in left if not name.startswith(("tierstore-read", "tierstore-kernel"))
    }


class Story:
    """The same random texts for every engine: prompts of two lengths, queries that drift."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn(SEQUENCES, heads, tokens, 16, generator=random)

        self.prompt = [tuple(draw(h, PROMPT) for h in (4, 2, 2)) for _ in range(2)]
        self.valid = torch.ones(SEQUENCES, PROMPT, dtype=torch.bool)
        self.valid[1::2, :30] = False
        self.steps, queries = [], [draw(4, 1) for _ in range(2)]
        for _ in range(STEPS):
            queries = [0.9 * query + 0.43 * draw(4, 1) for query in queries]
            self.steps.append([(query, draw(2, 1), draw(2, 1)) for query in queries])

    def prefill(self, engine: SparseAttention) -> None:
        for layer, (query, key, value) in enumerate(self.prompt):
            engine.attend(layer, query, key, value, valid=self.valid, scale=SCALE)

    def decode(
        self, engine: SparseAttention, steps: slice = slice(None), rows: slice = slice(None)
    ) -> torch.Tensor:
        outs = []
        for step in self.steps[steps]:
            for layer, (query, key, value) in enumerate(step):
                guess = step[layer + 1][0][rows] if layer == 0 else None
                outs.append(
                    engine.attend(
                        layer, query[rows], key[rows], value[rows], scale=SCALE, next_query=guess
                    )
                )
        return torch.stack(outs)


STORY = Story()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SparseAttention]]:
    """Makes engines whose last tier is files read past the page cache."""
    engines: list[SparseAttention] = []

    def make_one(
        schedule: str | None = None,
        micro_batch: int | None = None,
        *,
        dram: int = 0,
        fast: int = 9 << 20,
        **options: object,
    ) -> SparseAttention:
        folder = tmp_path / str(len(engines))

        def tiers(layout: BlockLayout) -> Sequence[Tier]:
            middle = [PinnedTier(layout, dram, name="dram")] if dram else []
            disk = FileTier(layout, folder, extent_bytes=4096)
            return [DeviceTier(layout, fast, name="fast"), *middle, disk]

        settings: dict[str, Any] = {"preset": "kvdrive", "budget": 0.1, "window": 2.0, **options}
        engine = SparseAttention(
            GEOMETRY, tiers=tiers, schedule=schedule, micro_batch=micro_batch, **settings
        )
        engines.append(engine)
        return engine

    yield make_one
    for engine in engines:
        engine.close()


def told(engine: SparseAttention) -> torch.Tensor:
    STORY.prefill(engine)
    outs = STORY.decode(engine)
    engine.store.validate()
    return outs


@pytest.mark.parametrize("preset", ["kvdrive", "best", "random"])
@pytest.mark.parametrize("dram", [0, 400_000])
def test_overlapped_stages_give_the_same_outputs(
    make: Callable[..., SparseAttention], preset: str, dram: int
) -> None:
    """Bit by bit; for the same micro-batches, even policies that throw dice decide alike."""
    expected = told(make("sequential", 2, preset=preset, dram=dram))
    for size in (2, 1) if preset != "random" else (2,):
        engine = make("sfc", size, preset=preset, dram=dram)
        assert torch.equal(told(engine), expected)


def test_the_whole_batch_at_once_gives_the_same_outputs(
    make: Callable[..., SparseAttention],
) -> None:
    engines = [make("sequential", SEQUENCES), make("sfc", 1), make()]
    expected, *others = map(told, engines)
    assert all(torch.equal(expected, other) for other in others)
    fetched = {engine.report().fetched_bytes for engine in engines}
    hits = {engine.report().hit_rate for engine in engines}
    assert len(fetched) == len(hits) == 1


def test_micro_batches_are_for_devices_of_their_own(make: Callable[..., SparseAttention]) -> None:
    engine = make("sfc")
    STORY.prefill(engine)
    STORY.decode(engine, slice(1))
    batch = engine._running.batch
    assert batch is not None
    stages = batch._stages
    assert not stages.is_overlapped
    on_gpu = replace(GEOMETRY, device=torch.device("cuda"))
    for schedule, size in (("sequential", 8), ("sfc", 2)):
        stages._rules = stages._rules._replace(geometry=on_gpu, schedule=schedule)
        assert stages._micro_batch(8) == size
    stages._rules = stages._rules._replace(micro_batch=3)
    assert stages._micro_batch(8) == 3


def test_sequences_come_and_go_between_overlapped_steps(
    make: Callable[..., SparseAttention],
) -> None:
    outs = []
    for schedule in ("sequential", "sfc"):
        engine = make(schedule, 2)
        STORY.prefill(engine)
        first = STORY.decode(engine, slice(9))
        engine.select_rows([3, 0, 1])
        engine.crop(2)
        outs.append((first, STORY.decode(engine, slice(9, 30), slice(3))))
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


def test_a_selection_larger_than_the_tier_is_attended_in_turns(
    make: Callable[..., SparseAttention],
) -> None:
    """Everything is selected, a window holds half of it: every step is full attention."""
    outs = []
    for schedule in ("sequential", "sfc", "previous-layer", "previous-step"):
        engine = make(schedule, 2, preset="full", budget=1.0, fast=350_000, record=True)
        outs.append(told(engine))
        for layer in range(2):
            lengths = [len(row) for row in engine.attended(layer)]
            expected = STORY.valid.sum(1).add(STEPS).repeat_interleave(2)
            assert lengths == expected.tolist()
    assert torch.equal(outs[0], outs[1])
    for out in outs[2:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["sfc", "previous-layer", "previous-step"])
def test_what_is_computed_is_attention_over_what_is_reported(
    make: Callable[..., SparseAttention], schedule: str
) -> None:
    """Also where the selection was guessed, attention uses the true query: in float64."""
    engine = make(schedule, 2, record=True)
    STORY.prefill(engine)
    past = [[part[i].clone() for i in (1, 2)] for part in STORY.prompt]
    keep = [STORY.valid[b].nonzero()[:, 0] for b in range(SEQUENCES)]
    seen = [[[part[b][:, keep[b]] for b in range(SEQUENCES)] for part in pair] for pair in past]
    for number, step in enumerate(STORY.steps):
        outs = STORY.decode(engine, slice(number, number + 1))
        is_checked = number % 4 == 3
        for layer, (query, key, value) in enumerate(step):
            for part, new in enumerate((key, value)):
                seen[layer][part] = [
                    torch.cat([old, new[b]], 1) for b, old in enumerate(seen[layer][part])
                ]
            for row, positions in enumerate(engine.attended(layer) if is_checked else []):
                sequence, head = divmod(row, 2)
                k, v = (part[sequence][head, positions].double() for part in seen[layer])
                q = query[sequence, 2 * head : 2 * head + 2, 0].double()
                expected = (q @ k.T * SCALE).softmax(-1) @ v
                found = outs[layer][sequence, 0, 2 * head : 2 * head + 2].double()
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["previous-layer", "previous-step"])
def test_a_schedule_that_guesses_has_fetched_before_it_is_asked(
    make: Callable[..., SparseAttention], schedule: str
) -> None:
    """What was guessed was judged and fetched elsewhere: the layer's own fetches find it there."""
    engine, timeline = make(schedule, 2), Timeline()
    STORY.prefill(engine)
    STORY.decode(engine, slice(20))
    engine.watch(timeline)
    STORY.decode(engine, slice(20, 30))
    engine.watch(None)
    reads = [span for span in timeline.spans if span.name == "read disk"]
    own = [s for s in timeline.spans if s.name == "compute"]
    assert reads
    assert len(own) == 20
    if schedule == "previous-step":
        # Rows that turned away are fetched before they compute, others after.
        assert any(a.end <= r.start for a in own for r in reads)


def test_similar_queries_keep_what_the_last_one_selected(
    make: Callable[..., SparseAttention],
) -> None:
    """FreeKV: a query that only grows selects nothing; one that turns does."""
    engine, asked = make("previous-step", SEQUENCES), []
    STORY.prefill(engine)
    STORY.decode(engine, slice(3))
    for layer in engine._running.batch.layers:  # type: ignore[union-attr]
        select = layer.index.select

        def counted(*args: object, select: Callable[..., Selection] = select) -> Selection:
            asked.append(1)
            return select(*args)

        layer.index.select = counted  # type: ignore[method-assign]
    step = [(-2.0 * query, key, value) for query, key, value in STORY.steps[2]]
    for turn, expected in ((step, 4), ([(2 * q, k, v) for q, k, v in step], 2)):
        asked.clear()
        for layer, (query, key, value) in enumerate(turn):
            engine.attend(layer, query, key, value, scale=SCALE)
        assert len(asked) == expected


def test_a_guess_knows_nothing_of_later_blocks_but_they_are_attended(
    make: Callable[..., SparseAttention],
) -> None:
    """Whatever leaves the local window is attended by the next step of a full selection."""
    expected = told(make("sequential", preset="full", budget=1.0, window=2.0))
    found = told(make("previous-step", preset="full", budget=1.0, window=2.0))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# Failures


def fail_in(engine: SparseAttention, stage: str) -> None:
    """The third call of a stage fails from now on."""
    batch = engine._running.batch
    assert batch is not None
    calls = 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(5, f"{stage} failed")
        return original(*args, **kwargs)

    places: dict[str, tuple[object, str]] = {
        "judge": (batch.store, "judge"),
        "fetch": (batch.store.tiers[-1], "read"),
        "compute": (batch._attending, "attend"),
        "update": (batch.store, "append"),
    }
    if stage == "select":
        for parts in batch._stages._parts:
            for part in parts[:1]:
                places["select"] = (part, "select")
    target, name = places[stage]
    original = getattr(target, name)
    setattr(target, name, failing)


@pytest.mark.parametrize("schedule", ["sequential", "sfc", "previous-layer", "previous-step"])
@pytest.mark.parametrize("stage", ["select", "judge", "fetch", "compute", "update"])
def test_an_error_in_a_stage_reaches_the_caller_and_leaves_nothing_behind(
    make: Callable[..., SparseAttention], stage: str, schedule: str
) -> None:
    engine = make(schedule, 2)
    STORY.prefill(engine)
    STORY.decode(engine, slice(3))
    fail_in(engine, stage)
    with pytest.raises(OSError, match=f"{stage} failed"):
        STORY.decode(engine, slice(3, None))
    batch = engine._running.batch
    assert batch is not None
    with suppress(OSError):
        batch.settle()
    assert not batch.store._visits
    batch.store.validate()
    with pytest.raises(ConfigError, match="an earlier call failed"):
        STORY.decode(engine, slice(1))
    engine.reset()
    STORY.prefill(engine)
    outs = STORY.decode(engine, slice(3))
    assert bool(torch.isfinite(outs).all())


@pytest.mark.parametrize(
    ("schedule", "change"),
    [("previous-layer", "seal"), ("previous-step", "seal"), ("previous-step", "recalibrate")],
)
def test_a_guess_that_failed_holds_up_no_change(
    make: Callable[..., SparseAttention], schedule: str, change: str
) -> None:
    """Its layer fetches again when tokens have become blocks, or windows are shared out anew."""
    engine = make(schedule, SEQUENCES, recalibrate=16 if change == "recalibrate" else None)
    STORY.prefill(engine)
    batch = engine._running.batch
    assert batch is not None
    is_late = schedule == "previous-step"  # it guesses in the step before
    step, coming = 0, np.full(SEQUENCES, 1 + is_late)
    while step < 8 if change == "recalibrate" else not batch.layers[0].full_sequences(coming):
        STORY.decode(engine, slice(step, step + 1))
        step += 1
    batch.settle()
    store, segments = batch.store, batch.layers[1].segments
    owners, read, failed = store.owners(store.backing), store.tiers[-1].read, []

    def failing(slots: Ids, *rest: Any) -> Completion:  # noqa: ANN401
        is_guess = threading.current_thread().name.startswith("tierstore-")
        if is_guess and np.isin(owners[slots], segments).any():
            failed.append(step)
            raise OSError(5, "layer 1 cannot be read")
        return read(slots, *rest)

    store.tiers[-1].read = failing  # type: ignore[assignment, method-assign]
    while is_late and not failed:
        STORY.decode(engine, slice(step, step + 1))
        batch._stages._guesses[1].run.wait_for("fetch")  # type: ignore[attr-defined]
        step += 1
    if change == "recalibrate":
        assert batch.sharing._profile is not None
        batch.sharing._profile.steps = 16
    outs: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: outs.append(STORY.decode(engine, slice(step, step + 1))), daemon=True
    )
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for a visit that nobody ends"
    assert failed
    assert outs
    assert (batch.sharing.plan is None) == (change == "seal")
    store.tiers[-1].read = read  # type: ignore[method-assign]
    batch._stages.drop_guesses()
    store.validate()


def test_an_update_that_turns_out_to_have_failed_at_the_store_needs_a_reset(
    make: Callable[..., SparseAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("sfc", 1)
    STORY.prefill(engine)
    STORY.decode(engine, slice(3))
    failing = Mock(side_effect=OSError("update failed"))
    monkeypatch.setattr(engine._running.batch, "settle", failing)

    with pytest.raises(OSError, match="update failed"):
        _ = engine.store

    with pytest.raises(ConfigError, match="an earlier call failed"):
        STORY.decode(engine, slice(3, 4))
    monkeypatch.undo()
    engine.reset()
    STORY.prefill(engine)


def test_closing_in_the_middle_of_an_update_waits_for_it(
    make: Callable[..., SparseAttention],
) -> None:
    engine = make("sfc", 1)
    STORY.prefill(engine)
    append, begun = engine.store.append, threading.Event()

    def slow(*args: object, **kwargs: object) -> object:
        begun.set()
        threading.Event().wait(0.05)
        return append(*args, **kwargs)  # type: ignore[arg-type]

    engine.store.append = slow  # type: ignore[assignment, method-assign]
    for number in range(STEPS):
        STORY.decode(engine, slice(number, number + 1))
        if begun.is_set():
            break
    engine.close()


# Settings


def test_a_timeline_has_every_stage_of_every_micro_batch(
    make: Callable[..., SparseAttention],
) -> None:
    engine, timeline = make("sfc", 2), Timeline()
    engine.watch(timeline)
    STORY.prefill(engine)
    STORY.decode(engine, slice(3))
    engine.watch(None)
    STORY.decode(engine, slice(3, 6))
    spans = [span for span in timeline.spans if "layer" in span.facts]
    steps = sorted({span.facts["step"] for span in spans})
    assert len(steps) == 3
    found = {(s.name, s.facts["step"], s.facts["layer"], s.facts["micro_batch"]) for s in spans}
    for step in steps:
        for layer in range(2):
            assert ("compute", step, layer, -1) in found
            for part in range(3):
                assert {
                    (stage, step, layer, part) for stage in ("select", "judge", "fetch")
                } <= found
    assert {"device", "cpu", "disk", "transfers: disk"} <= set(timeline.tracks)


def test_a_preset_has_a_schedule(make: Callable[..., SparseAttention]) -> None:
    assert {preset.schedule for preset in PRESETS.values()} == {"sfc"}
    assert make()._rules.schedule == "sfc"
    assert make("sequential")._rules.schedule == "sequential"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fastest"}, "schedule='fastest': expected one of sequential, "),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"micro_batch": 1.5}, r"micro_batch=1\.5"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparseAttention(GEOMETRY, dram="1MiB", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4, 1, 16), torch.zeros(5, 4, 1, 16).double()])
def test_a_guess_of_another_shape_or_type_is_refused(
    make: Callable[..., SparseAttention], wrong: torch.Tensor
) -> None:
    engine = make("previous-layer")
    STORY.prefill(engine)
    query, key, value = STORY.steps[0][0]
    with pytest.raises(ConfigError, match=r"next_query of shape .* expected \(5, 4, 1, 16\)"):
        engine.attend(0, query, key, value, scale=SCALE, next_query=wrong)
    STORY.decode(engine, slice(1))


def test_one_sequence_takes_no_thread(make: Callable[..., SparseAttention]) -> None:
    engine, before = make("sfc", 1), set(threading.enumerate())
    draw = torch.Generator().manual_seed(1)
    for tokens in (PROMPT, *[1] * 20):
        for layer in range(2):
            parts = [torch.randn(1, h, tokens, 16, generator=draw) for h in (4, 2, 2)]
            engine.attend(layer, *parts, scale=SCALE)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {
        name for name in names if not name.startswith(("tierstore-read", "tierstore-kernel"))
    }


def test_an_index_without_parts_selects_for_all_rows(make: Callable[..., SparseAttention]) -> None:
    """Micro-batches need an index that can tell its rows apart."""
    engine = make("sfc", 1)
    STORY.prefill(engine)
    batch = engine._running.batch
    assert batch is not None
    for layer in batch.layers:
        layer.index.part = lambda *_: None  # type: ignore[method-assign]
    outs = STORY.decode(engine)
    assert not batch._stages.is_overlapped
    assert torch.equal(outs, told(make("sequential"))[: len(outs)])
    assert isinstance(outs, torch.Tensor)
    assert np.isfinite(outs.numpy()).all()
