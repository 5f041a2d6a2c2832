"""Plans from traces: what they are made of agrees with plain Python."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tierstore.errors import ConfigError, TraceError
from tierstore.policies.planning import missed_mass, plan_of, reuse_misses
from tierstore.policies.windows import BUDGETS, WINDOWS
from tierstore.traces.attention import AttentionTrace

LAYERS, HEADS, BLOCKS, STEPS, COUNT = 3, 2, 80, 60, 8
FACTS = {
    "layers": LAYERS, "kv_heads": HEADS, "query_heads": 4, "head_dim": 16, "block_tokens": 4,
    "context_tokens": 320, "model": "made up", "document": "noise", "budget": 0.1,
}  # fmt: skip


def made_up(seed: int = 0, /, **facts: object) -> AttentionTrace:
    """Segments whose scores change at different paces and are spread differently."""
    random = np.random.default_rng(seed)
    segments = LAYERS * HEADS
    pace = np.linspace(0.02, 0.8, segments)[:, None]
    spread = np.linspace(0.5, 3.0, segments)[:, None]
    scores = random.standard_normal((segments, BLOCKS))
    story = []
    for _ in range(STEPS):
        scores = np.sqrt(1 - pace) * scores + np.sqrt(pace) * random.standard_normal(scores.shape)
        story.append((spread * scores).astype(np.float16))
    trace = AttentionTrace(
        facts={**FACTS, "selectable": [0.5] * segments, **facts},
        blocks=np.full((STEPS, segments), BLOCKS, np.int32),
        unit_scores=np.stack(story),
        unit_of=np.arange(BLOCKS, dtype=np.int32)[None],
        counts=np.zeros((STEPS, segments), np.int32),
        ids=np.empty(0, np.int32),
    )
    return trace.with_budget(0.1)


def test_missed_mass_is_that_of_the_blocks_that_are_not_the_best() -> None:
    trace = made_up(selectable=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    found = missed_mass(trace, 0.1)
    for segment, share in enumerate(trace.facts["selectable"]):
        for choice in (0, 7, len(BUDGETS) - 1):
            size = max(1, round(BUDGETS[choice] * COUNT))
            missed = 0.0
            for scores in trace.unit_scores[:, segment].astype(float):
                masses = sorted(np.exp(scores).tolist(), reverse=True)
                missed += share * sum(masses[size:]) / sum(masses) / STEPS
            assert found[segment, choice] == pytest.approx(missed, rel=1e-4)


def test_misses_are_those_of_an_lru_window() -> None:
    trace = made_up()
    found = reuse_misses(trace, 0.1, np.ones(trace.segments))
    for segment in range(trace.segments):
        story = [
            np.argsort(-scores.astype(np.float32), kind="stable")[:COUNT].tolist()
            for scores in trace.unit_scores[:, segment]
        ]
        order: list[int] = []
        missed = 0
        for number, chosen in enumerate(story):
            missed += len(set(chosen) - set(order[: 2 * COUNT])) if number >= 16 - 1 else 0
            order = chosen + [block for block in order if block not in chosen]
        true = missed / (STEPS - 15) / COUNT
        assert found[segment, WINDOWS == 2][0] == pytest.approx(true, rel=0.25, abs=0.05)
    assert (np.diff(found, axis=1) <= 1e-12).all()


def test_the_first_steps_alone_can_make_a_profile() -> None:
    trace = made_up()
    early = reuse_misses(trace, 0.1, np.ones(trace.segments), 32)
    alone = replace(trace, unit_scores=trace.unit_scores.copy())
    alone.unit_scores[40:] = 0
    alone = alone.with_budget(0.1)
    np.testing.assert_allclose(early, reuse_misses(alone, 0.1, np.ones(trace.segments), 32))


def test_restless_heads_get_larger_windows_and_budgets_miss_less() -> None:
    plan = plan_of([made_up(0), made_up(1)], window=2.0, budget=0.1)
    assert plan.budgets is None
    assert plan.windows.shape == (LAYERS, HEADS)
    assert plan.window <= 2.0
    assert plan.windows.ravel()[0] == plan.windows.min()
    assert plan.facts["documents"] == ["noise", "noise"]
    uneven = made_up(0, selectable=[0.9, 0.1, 0.9, 0.1, 0.5, 0.5])
    both = plan_of([uneven], window=2.0, budget=0.1, per_head_budgets=True)
    assert both.budgets is not None
    choices = np.rint(both.budgets.ravel() / BUDGETS[0]).astype(int) - 1
    missed = missed_mass(uneven, 0.1)
    spent = missed[np.arange(len(choices)), choices].mean()
    assert spent < 0.97 * missed[:, BUDGETS == 1].mean()
    assert both.budgets.mean() <= 1
    assert (both.windows >= both.budgets).all()
    both.check_model(LAYERS, HEADS, 4, 16)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layers": None}, "fact layers: expected a whole number .*, found none; record it again"),
        (
            {"layers": [1]},
            r"fact layers: expected .* from 1 to 2147483647, found \[1\]",
        ),
        ({"head_dim": "16"}, "fact head_dim: expected a whole number .*, found '16'"),
        ({"query_heads": True}, "fact query_heads: expected .*, found True"),
        ({"context_tokens": 10**400}, "fact context_tokens: expected .*, found 10000"),
        ({"context_tokens": None}, "fact context_tokens: expected .*, found None"),
        ({"model": float("nan")}, "fact model: expected text, found nan"),
        ({"budget": 0}, "fact budget: expected a share of the context, or a number"),
        ({"selectable": ["a"] * 6}, "fact selectable: expected a share .* for each of 6 segments"),
        ({"selectable": [0.5] * 5}, "fact selectable: expected a share"),
        ({"selectable": [[1], [1, 2]]}, "fact selectable: expected a share"),
        ({"selectable": [float("nan")] * 6}, "fact selectable: expected a share"),
        ({"selectable": None}, "fact selectable: expected a share .* found none; record it again"),
        ({"own": float("inf")}, "facts: expected what JSON can hold"),
        ({"own": object()}, "facts: expected what JSON can hold"),
    ],
)
def test_traces_that_say_what_cannot_be_are_refused(facts: dict[str, object], reason: str) -> None:
    trace = made_up()
    told = replace(trace, facts={**trace.facts, **facts})
    with pytest.raises(TraceError, match=f"^trace of 'noise': {reason}"):
        plan_of([told], window=2.0, budget=0.1, per_head_budgets=True)


@pytest.mark.parametrize("per_head_budgets", [False, True])
def test_traces_without_steps_or_scores_are_refused(per_head_budgets: bool) -> None:
    trace = made_up()
    nothing = np.zeros((0, trace.segments), np.int32)
    still = replace(
        trace, blocks=nothing, counts=nothing, unit_scores=trace.unit_scores[:0], ids=trace.ids[:0]
    )
    blank = replace(trace, unit_of=np.full_like(trace.unit_of, -1))
    for each, reason in ((still, "at least 1 steps, found 0"), (blank, "blocks with scores")):
        with pytest.raises(TraceError, match=reason):
            plan_of([each], window=2.0, budget=0.1, per_head_budgets=per_head_budgets)


def test_traces_of_two_models_or_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 kinds of models"):
        plan_of([made_up(), made_up(head_dim=32)], window=2.0, budget=0.1)
    with pytest.raises(ConfigError, match="0 kinds of models"):
        plan_of([], window=2.0, budget=0.1)
    with pytest.raises(ConfigError, match="5 KV heads: expected one of a single sequence"):
        plan_of([made_up(kv_heads=5)], window=2.0, budget=0.1)
    assert plan_of([made_up(selectable=None)], window=2.0, budget=0.1).window <= 2


@pytest.mark.parametrize("window", [0.5, 0.0, np.nan, np.inf])
def test_less_than_a_budget_is_no_window(window: float) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 budget"):
        plan_of([made_up()], window=window, budget=0.1)
