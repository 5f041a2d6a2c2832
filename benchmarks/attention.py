"""One decoding step of attention alone, at the sizes of Llama-3-8B and over synthetic keys.

Both engines have the same store and kernels and everything in DRAM; one attends to every block, the
other selects, and selecting is part of its step.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.machine import Machine, available_memory
from tierstore.benchmarks.rounds import Ratio, Say, alternate, listed
from tierstore.benchmarks.steps import STEPS, Steps, step_measures, time_steps
from tierstore.benchmarks.synthetic import SyntheticText, Token
from tierstore.errors import CapacityError
from tierstore.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LLAMA_3_8B = Geometry(32, 32, 8, 128, torch.bfloat16, torch.device("cpu"))
BUDGETS = {"full": 1.0, "kvdrive": 1 / 64}
_SEED = 0

CONFIGURATIONS = {
    "full": "preset full: every block",
    "kvdrive": f"preset kvdrive: {BUDGETS['kvdrive']:.2%} of the context, selected in the step",
}
_RATIOS = (
    Ratio("speed of a step, kvdrive / full", "attention", "full", "kvdrive", at_least=4.0),
    Ratio("mean speed, kvdrive / full", "attention mean", "full", "kvdrive"),
)


def run(say: Say, *, repeat: int = 5, tokens: int = 32_768, layers: int = 32) -> Findings:
    """Measure so many layers of Llama-3-8B."""
    return measure(say, replace(LLAMA_3_8B, layers=layers), repeat=repeat, tokens=tokens)


def measure(say: Say, geometry: Geometry, *, repeat: int, tokens: int) -> Findings:
    """Measure at `tokens` of context; CapacityError where the machine has too little memory."""
    machine = Machine.here()
    kv = geometry.kv_bytes(tokens)
    _check_memory(kv)
    text = SyntheticText(geometry, seed=_SEED)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(_engine(geometry, name, kv))) for name in BUDGETS
        }
        _fill(say, engines, text, tokens)
        steps = _decode(say, engines, text, repeat)
        reports = {name: engine.report().to_dict() for name, engine in engines.items()}
    return Findings(
        benchmark="attention",
        machine=machine,
        baseline="full",
        settings={
            "layers": geometry.layers,
            "query heads": geometry.query_heads,
            "KV heads": geometry.kv_heads,
            "head dimension": geometry.head_dim,
            "dtype": str(geometry.dtype),
            "context tokens": tokens,
            "keys and values": format_size(kv),
            "steps in a round": STEPS,
            "seed": _SEED,
        },
        configurations=CONFIGURATIONS,
        measures=step_measures(steps, "attention", "ms/token over all layers"),
        ratios=_RATIOS,
        details={"tiers": reports},
    )


def _engine(geometry: Geometry, preset: str, kv: int) -> SparseAttention:
    """An engine with room for `kv` bytes of keys and values, its index and its tables."""
    ample = 3 * kv // 2 + (64 << 20)
    return SparseAttention(geometry, preset=preset, budget=BUDGETS[preset], dram=ample)


def _check_memory(kv: int) -> None:
    needed, available = len(BUDGETS) * 5 * kv // 4, available_memory()
    if available is not None and needed > available:
        raise CapacityError(
            f"attention: {len(BUDGETS)} engines take about {format_size(needed)} of memory, and "
            f"{format_size(available)} are free; pass fewer --layers or --tokens"
        )


def _fill(
    say: Say, engines: Mapping[str, SparseAttention], text: SyntheticText, tokens: int
) -> None:
    """The same keys and values for all engines, without computing attention over them."""
    layers = next(iter(engines.values())).geometry.layers
    for layer in range(layers):
        key, value = text.context(tokens)
        for engine in engines.values():
            engine.absorb(layer, key, value, scale=_scale(engine))
        say(f"stored and indexed layer {layer + 1} of {layers}")


def _decode(
    say: Say, engines: Mapping[str, SparseAttention], text: SyntheticText, rounds: int
) -> dict[str, list[Steps]]:
    story = [[text.step() for _ in range(STEPS)] for _ in range(1 + rounds)]

    def decode(engine: SparseAttention, number: int) -> Steps:
        return time_steps(partial(_attend, engine), story[number])

    def after_round(number: int, latest: Mapping[str, Steps]) -> None:
        medians = {name: steps.median_ms for name, steps in latest.items()}
        say(f"round {number} of {rounds}: {listed(medians)} ms")

    runs = {name: partial(decode, engine) for name, engine in engines.items()}
    return alternate(runs, rounds, after_round)


def _attend(engine: SparseAttention, token: Sequence[Token]) -> None:
    for layer, (query, key, value) in enumerate(token):
        engine.attend(layer, query, key, value, scale=_scale(engine))


def _scale(engine: SparseAttention) -> float:
    return float(engine.geometry.head_dim**-0.5)
