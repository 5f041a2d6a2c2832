"""Continuous batching on the demo model: the same tokens as alone, and more of them a second.

Requests of different lengths join and leave at different times. Then requests that are alike run
at several batch sizes, and one step is timed at several lengths of context with the same budget.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.adapters.presets import PRESETS
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import check_window, kv_bytes, real_text, sharing_weights
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Ratio, Say, alternate, listed
from tierstore.indexers import HierarchicalIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tierstore.adapters.presets import Preset
    from tierstore.adapters.transformers import ContinuousBatch
    from tierstore.interfaces import Ids, Selection
    from tierstore.kernels.element import Array

REQUESTS = ((700, 24), (90, 40), (1_200, 16), (300, 30), (40, 36), (900, 20), (500, 12), (200, 28))
"""Tokens of the prompts, and new tokens, of requests that come three steps after one another."""

BUDGETS = {"exact": 1 / 16, "kvdrive": 1 / 16}
BATCHES = (1, 2, 4, 8)
CONTEXTS = {"short": 1_024, "middle": 2_048, "long": 4_096}
BUDGET_TOKENS = 128
STEPS = 16
_APART = 3

_CONFIGURATIONS = {
    **{f"batch {size}": f"{size} requests of the same length at once" for size in BATCHES},
    **{
        name: f"one request of a {name} context, {BUDGET_TOKENS} tokens of it selected"
        for name in CONTEXTS
    },
}
_GROWING = tuple(pairwise(BATCHES))
_RATIOS = (
    *(
        Ratio(
            f"tokens a second, batch {more} / batch {less}", "throughput", f"batch {more}",
            f"batch {less}", at_least=1.0,
        )
        for less, more in _GROWING
    ),
    Ratio("tokens a second, batch 8 / batch 1", "throughput", "batch 8", "batch 1"),
    Ratio(
        "a step without selecting, long / short context", "step", "long", "short",
        at_most=1.15,
    ),
)  # fmt: skip


def run(say: Say, *, repeat: int = 5, tokens: int = 512) -> Findings:
    """Measure SmolLM2-135M-Instruct; `tokens` of context in the batches that are timed."""
    say(f"loading {DEMO_MODEL}")
    # In 16 bits the model's own matrix products round differently at each batch size.
    exact = load_model(DEMO_MODEL, torch.float32)
    same = {name: compare(say, exact, name) for name in BUDGETS}
    del exact
    return measure(say, load_model(DEMO_MODEL), repeat, tokens, same)


def measure(
    say: Say,
    loaded: LoadedModel,
    repeat: int,
    tokens: int,
    same: Mapping[str, Sequence[bool]],
    contexts: Mapping[str, int] = CONTEXTS,
) -> Findings:
    """Time a model; `same` says of each preset's requests whether they got what they get alone."""
    machine = Machine.here()
    check_window(loaded.model, max(*contexts.values(), tokens) + STEPS * (repeat + 2))
    throughput = _throughput(say, loaded, repeat, tokens)
    steps, selecting = _by_context(say, loaded, repeat, contexts)
    return Findings(
        benchmark="batching",
        machine=machine,
        baseline="batch 1",
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "context tokens of a batch": tokens,
            "contexts": ", ".join(f"{name} {tokens:,}" for name, tokens in contexts.items()),
            "steps in a round": STEPS,
        },
        configurations=_CONFIGURATIONS,
        measures={
            "throughput": Measure("tokens/s, by the median step of a round", throughput),
            "step": Measure("ms, the median of a round, without selecting", steps),
            "selecting": Measure("ms a step", selecting),
        },
        ratios=_RATIOS,
        notes=[
            f"preset {name}, float32: {sum(each)} of {len(each)} requests that joined and left got "
            "the tokens that they get alone."
            for name, each in same.items()
        ],
        details={"same as alone": {name: list(each) for name, each in same.items()}},
    )


def compare(say: Say, loaded: LoadedModel, preset: str) -> list[bool]:
    """Of each request, whether it gets among others what it gets alone."""
    text = real_text(loaded.tokenizer, sum(tokens for tokens, _ in REQUESTS))
    starts = [sum(tokens for tokens, _ in REQUESTS[:i]) for i in range(len(REQUESTS))]
    prompts = [text[at : at + n] for at, (n, _) in zip(starts, REQUESTS, strict=True)]
    together = _serve(loaded, preset, prompts)
    alone = []
    for number, (prompt, (_, new)) in enumerate(zip(prompts, REQUESTS, strict=True)):
        with _batch(loaded, preset, BUDGETS[preset]) as batch:
            only = batch.add(prompt, max_new_tokens=new)
            list(batch)
            alone.append(batch.finish(only).tokens)
        say(f"{preset}: request {number + 1}, {'as' if alone[-1] == together[number] else 'not as'}"
            " alone")  # fmt: skip
    return [own == other for own, other in zip(together, alone, strict=True)]


def _serve(
    loaded: LoadedModel, preset: str, prompts: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The tokens of requests that come some steps after one another."""
    with _batch(loaded, preset, BUDGETS[preset]) as batch:
        for prompt, (_, new) in zip(prompts, REQUESTS, strict=True):
            batch.add(prompt, max_new_tokens=new)
            for _ in range(_APART):
                batch.step()
        list(batch)
        return [batch.finish(number).tokens for number in range(len(prompts))]


def _throughput(say: Say, loaded: LoadedModel, rounds: int, tokens: int) -> dict[str, list[float]]:
    """New tokens a second of each batch size, by the median step of each round."""
    new = STEPS * (rounds + 2)
    text = real_text(loaded.tokenizer, tokens + max(BATCHES))
    with ExitStack() as stack:
        runs = {}
        for size in BATCHES:
            batch = stack.enter_context(_batch(loaded, "kvdrive", BUDGETS["kvdrive"]))
            for start in range(size):
                batch.add(text[start : start + tokens], max_new_tokens=new)
            runs[f"batch {size}"] = partial(_rate, batch, size)

        def after_round(number: int, latest: Mapping[str, float]) -> None:
            say(f"round {number} of {rounds}: {listed(latest)} tokens/s")

        return alternate(runs, rounds, after_round)


def _rate(batch: ContinuousBatch, size: int, number: int) -> float:
    return size / statistics.median(_seconds(batch))


def _seconds(batch: ContinuousBatch) -> list[float]:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        batch.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _by_context(
    say: Say, loaded: LoadedModel, rounds: int, contexts: Mapping[str, int]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of a step without selecting, and of selecting, at each length of context."""
    text = real_text(loaded.tokenizer, max(contexts.values()))
    with ExitStack() as stack:
        runs = {}
        for name, tokens in contexts.items():
            clock = _Clock()
            batch = stack.enter_context(_batch(loaded, clock.preset(), BUDGET_TOKENS))
            batch.add(text[:tokens], max_new_tokens=STEPS * (rounds + 2))
            runs[name] = partial(_timed_round, batch, clock)

        def after_round(number: int, latest: Mapping[str, tuple[float, float]]) -> None:
            say(f"round {number} of {rounds}: {listed({k: v[0] for k, v in latest.items()})} ms")

        found = alternate(runs, rounds, after_round)
    steps = {name: [rest for rest, _ in each] for name, each in found.items()}
    selecting = {name: [own for _, own in each] for name, each in found.items()}
    return steps, selecting


def _timed_round(batch: ContinuousBatch, clock: _Clock, number: int) -> tuple[float, float]:
    rest, selecting = [], []
    for _ in range(STEPS):
        clock.seconds = 0.0
        start = time.perf_counter()
        batch.step()
        rest.append(time.perf_counter() - start - clock.seconds)
        selecting.append(clock.seconds)
    return 1e3 * statistics.median(rest), 1e3 * statistics.median(selecting)


class _Clock:
    """Adds up the time that indexes take to select."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def preset(self) -> Preset:
        """Preset ``kvdrive``, its indexes timed."""
        clock = self

        class Timed(HierarchicalIndex):
            def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
                start = time.perf_counter()
                selection = super().select(query, budgets, beside)
                clock.seconds += time.perf_counter() - start
                return selection

        return replace(PRESETS["kvdrive"], index=Timed)


@contextmanager
def _batch(loaded: LoadedModel, preset: str | Preset, budget: float) -> Iterator[ContinuousBatch]:
    """An empty batch of a model that shares its weights with those of the other batches."""
    from tierstore.adapters.transformers import ContinuousBatch, geometry_of

    room = 2 * kv_bytes(loaded.model, max(sum(n + new for n, new in REQUESTS), 8 * 1_024))
    model = sharing_weights(loaded.model)
    engine = SparseAttention(
        geometry_of(model), preset=preset, budget=budget, dram=room + (256 << 20)
    )
    with ContinuousBatch(model, engine) as batch:
        yield batch
