"""The part of ``tierstore profile`` that needs a model, and so takes seconds to import."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention import Geometry
from tierstore.adapters.capture import capture
from tierstore.adapters.cli.recording import record_trace
from tierstore.adapters.documents import beginning
from tierstore.adapters.generate import check_length
from tierstore.adapters.models import load_model, named_dtype
from tierstore.adapters.planner.tuning import Sample, Tuner
from tierstore.adapters.presets import preset_named
from tierstore.kernels.element import to_tensor
from tierstore.policies.plan import Tuning
from tierstore.policies.planning import plan_of
from tierstore.policies.windows import pinned_below
from tierstore.sizes import parse_budget, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tierstore.adapters.documents import Document
    from tierstore.adapters.planner.tuning import Tuned
    from tierstore.policies.plan import Plan
    from tierstore.traces.capture import Capture

    Say = Callable[[str], None]

_LAYERS = 3
"""Layers that are tuned on, spread over the model."""


def profile(options: argparse.Namespace, document: Document, say: Say) -> tuple[Plan, Tuned]:
    """Profile as `options` say: the plan, and all that was tried."""
    preset = preset_named(options.preset)
    budget = parse_budget(preset.budget if options.budget is None else options.budget)
    say(f"loading {options.model}")
    loaded = load_model(options.model, named_dtype(options.dtype))
    check_length(loaded.model, options.tokens, options.steps)
    text = beginning(loaded.tokenizer, document.text, options.tokens + options.steps)
    name = Path(options.document).name
    say(f"reading {options.tokens:,} tokens, and {options.steps} steps of full attention")
    seen = capture(loaded.model, text, options.steps, window=preset.observation, name=loaded.name)
    tuned = _tune(options, _selected(options, budget), seen, say)
    say("recording which blocks heads select, for windows of their own")
    exact = replace(
        preset_named("exact"), budget=budget, block_tokens=preset.block_tokens,
        sinks=preset.sinks, local=preset.local,
    )  # fmt: skip
    context, forced = text[: options.tokens], text[options.tokens :]
    trace = record_trace(loaded, context, forced, options.steps, exact, document=name)
    plan = plan_of([trace], window=tuned.window, budget=budget)
    return _finished(plan, tuned, options, budget, seen.dtype), tuned


def _selected(options: argparse.Namespace, budget: float) -> int:
    """Tokens that a step selects for each KV head."""
    tokens: int = options.tokens
    return math.ceil(tokens * budget) if isinstance(budget, float) else budget


def _tune(options: argparse.Namespace, selected: int, seen: Capture, say: Say) -> Tuned:
    facts = seen.facts
    geometry = Geometry(
        1, facts["query_heads"], facts["kv_heads"], facts["head_dim"], seen.dtype,
        torch.device("cpu"), facts["value_size"],
    )  # fmt: skip
    tuner = Tuner(
        geometry, preset_named(options.preset), samples_of(seen), budget=selected,
        scale=seen.scale, files=options.disk, say=say,
    )  # fmt: skip
    return tuner.tune(options.batch, options.window)


def samples_of(seen: Capture, layers: int = _LAYERS) -> list[Sample]:
    """Some layers of a capture, from the first to the last."""
    keys, values, queries, last = (
        to_tensor(array) for array in (seen.keys, seen.values, seen.queries, seen.last_queries)
    )
    total, tokens = len(keys), seen.prompt_tokens
    chosen = sorted({round((i + 0.5) * total / layers - 0.5) for i in range(layers)})
    return [
        Sample(
            keys[layer, :, :tokens],
            values[layer, :, :tokens],
            queries[layer].permute(2, 0, 1, 3).contiguous(),
            last[layer],
        )
        for layer in chosen
    ]


def _finished(
    plan: Plan, tuned: Tuned, options: argparse.Namespace, budget: float, dtype: torch.dtype
) -> Plan:
    """The plan with what tuning chose and, if there is memory to share out, the pinned split."""
    facts = dict(plan.facts) | {"tuned_for": options.preset, "batch": options.batch}
    pinned = None
    if options.dram is not None and plan.misses is not None:
        size = parse_size(options.dram, "dram")
        budgets = (
            _selected(options, budget) * 2 * plan.head_dim * dtype.itemsize * plan.windows.size
        )
        pinned = pinned_below(plan.misses, plan.windows, size / budgets, plan.shares)
        facts["pinned_bytes"] = size
    settings = Tuning(tuned.tokens_per_centroid, tuned.micro_batch)
    return replace(plan, pinned=pinned, tuning=settings, facts=facts)
