"""Makes a plan from recorded attention: windows by reuse, budgets by attention mass."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.errors import ConfigError
from tierstore.policies.lru import LRU
from tierstore.policies.plan import Plan
from tierstore.policies.profile import ReuseProfile
from tierstore.policies.run_facts import MODEL, check_facts, check_scores
from tierstore.policies.windows import BUDGETS, WINDOWS, allocate_budgets, allocate_windows
from tierstore.sizes import check_window
from tierstore.traces.attention_replay import replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.policies.profile import Amounts
    from tierstore.traces.attention import AttentionTrace


def plan_of(
    traces: Sequence[AttentionTrace],
    *,
    window: float,
    budget: float | str,
    per_head_budgets: bool = False,
) -> Plan:
    """The plan that would have fetched least on `traces`, all of one model.

    Parameters
    ----------
    window: mean capacity of the fast tier, in budgets; at least 1.
    budget: share of the context (float), or tokens.
    per_head_budgets: share the budget out, too, by the attention mass that heads miss.

    ConfigError for a window of less and for traces of different models; TraceError where a trace
    has no steps or does not say what is needed.
    """
    check_window(window)
    for trace in traces:
        source = f"trace of {reprlib.repr(trace.facts.get('document'))}"
        check_facts(trace, source, (*MODEL, "selectable") if per_head_budgets else MODEL)
        check_scores(trace, source)
    shape, others = model_shape(traces)
    shares: Amounts = np.ones(shape[0] * shape[1])
    if per_head_budgets:
        shares = allocate_budgets(np.sum([missed_mass(trace, budget) for trace in traces], axis=0))
    misses = np.sum([reuse_misses(trace, budget, shares) for trace in traces], axis=0)
    windows = allocate_windows(misses, window, shares)
    facts: dict[str, Any] = {
        "model": traces[0].facts.get("model"),
        "documents": [trace.facts.get("document") for trace in traces],
        "steps": [trace.steps for trace in traces],
        "budget": budget,
        "preset": traces[0].facts.get("preset"),
    }
    own = shares.reshape(shape) if per_head_budgets else None
    mean = (misses / len(traces)).reshape(*shape, -1)
    return Plan(windows.reshape(shape), *others, own, mean, facts)


def reuse_misses(
    trace: AttentionTrace, budget: float | str, shares: Amounts, steps: int | None = None
) -> Amounts:
    """What each segment misses in a step with the windows `WINDOWS`, in mean budgets.

    Parameters
    ----------
    shares: float64 [segments], the budget of each in mean ones.
    steps: only the first so many. A quarter of them, 16 at most, is a warm-up.

    Returns
    -------
    float64 [segments, len(WINDOWS)].
    """
    chosen = trace.with_budget(budget, shares)
    mean = trace.budget_blocks(budget)
    steps = trace.steps if steps is None else min(steps, trace.steps)
    profile = ReuseProfile(LRU(), min(16, steps // 4))
    smallest = np.maximum(chosen.counts.max(0), 1).astype(np.int64)
    replay(chosen, profile, smallest, islice(chosen.selections(), steps))
    segments = np.arange(trace.segments, dtype=np.int32)
    sizes = np.maximum(np.rint(mean * shares), 1)[:, None] * WINDOWS
    return profile.misses(segments, sizes) / mean


def missed_mass(trace: AttentionTrace, budget: float | str) -> Amounts:
    """Attention mass that each segment misses with the budgets `BUDGETS`, [segments, .].

    Requires the fact ``selectable``, how much attention its heads give to blocks.
    """
    share = trace.facts["selectable"]
    sizes = np.maximum(np.rint(BUDGETS * trace.budget_blocks(budget)), 1).astype(np.int64)
    table = np.broadcast_to(trace.unit_of, (trace.segments, trace.unit_of.shape[1]))
    missed = np.zeros((trace.segments, len(sizes)))
    for scores, blocks in zip(trace.unit_scores, trace.blocks, strict=True):
        is_block = (np.arange(table.shape[1]) < blocks[:, None]) & (table >= 0)
        unit_mass = np.exp(scores.astype(np.float32))
        mass = np.where(is_block, np.take_along_axis(unit_mass, np.maximum(table, 0), 1), 0.0)
        best = np.sort(mass, axis=1)[:, ::-1].cumsum(1)
        held = best[:, np.minimum(sizes, best.shape[1]) - 1]
        missed += 1 - held / np.maximum(best[:, -1:], 1e-30)
    return missed / trace.steps * np.asarray(share, np.float64)[:, None]


def model_shape(traces: Sequence[AttentionTrace]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers and KV heads, query heads and head dimension, of traces with these facts.

    ConfigError for traces of different models, or of several sequences at once.
    """
    shapes: set[tuple[int, ...]] = {tuple(trace.facts[name] for name in MODEL) for trace in traces}
    if len(shapes) != 1:
        raise ConfigError(f"traces of {len(shapes)} kinds of models: expected traces of one")
    layers, kv_heads, query_heads, head_dim = shapes.pop()
    for trace in traces:
        if trace.segments != layers * kv_heads:
            raise ConfigError(
                f"trace of {trace.segments} segments of a model with {layers} layers and "
                f"{kv_heads} KV heads: expected one of a single sequence"
            )
    return (layers, kv_heads), (query_heads, head_dim)
