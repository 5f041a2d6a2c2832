"""Where a prompt's blocks should start: how much of the first steps' critical blocks is there.

The critical blocks of a step are the best of each layer and KV head by true attention. A ranking
places a share of each head's blocks, by what the prompt's last tokens attend to, and covers so many
of the critical ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.adapters.attention.exact import importance
from tierstore.adapters.capture import capture
from tierstore.adapters.models import DEMO_MODEL, load_model
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.rounds import Measure, Ratio, Say, listed
from tierstore.kernels.element import to_tensor
from tierstore.placement import assign_homes, pooled
from tierstore.traces.capture import Capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.interfaces import Scores

BLOCK, SINKS, LOCAL = 4, 4, 64
CRITICAL = 1 / 32
SHARES = (1 / 32, 1 / 16, 1 / 8)
STEPS = 16
STARTS = (0, 120_000, 240_000)


class Placement(NamedTuple):
    """A ranking, and how many of the prompt's last tokens it looks at."""

    ranking: str
    observation: int = 16


PLACEMENTS = {
    "head, 16": Placement("head", 16),
    "head, 32": Placement("head", 32),
    "head, 64": Placement("head", 64),
    "layer, 16": Placement("layer", 16),
    "global, 16": Placement("global", 16),
    "recency": Placement("recency"),
}
_ABOUT = {
    "head": "ranked by attention to each head's own blocks: preset best",
    "layer": "ranked by the sum over a layer's heads",
    "global": "ranked by the sum over layers and heads, as in the paper: preset kvdrive",
    "recency": "the last ones: the floor",
}


def run(say: Say, *, tokens: int = 4_096, captures: str | None = None) -> Findings:
    """Measure captures, or SmolLM2-135M-Instruct on three stretches of text."""
    if captures is not None:
        return measure(say, [Capture.load(Path(name)) for name in captures.split(",")])
    say(f"loading {DEMO_MODEL}")
    loaded = load_model(DEMO_MODEL)
    seen = []
    for start in STARTS:
        text = real_text(loaded.tokenizer, tokens + STEPS, start)
        seen.append(capture(loaded.model, text, STEPS, name=loaded.name, document=f"from {start}"))
        say(f"read {tokens:,} tokens from character {start:,}")
    return measure(say, seen)


def measure(say: Say, captures: Sequence[Capture]) -> Findings:
    """Coverage by every placement in every capture."""
    covered: dict[float, dict[str, list[float]]] = {
        share: {name: [] for name in PLACEMENTS} for share in SHARES
    }
    for seen in captures:
        for share, by_name in coverage(seen).items():
            for name, value in by_name.items():
                covered[share][name].append(value)
        say(f"{seen.facts['document']}: {listed({n: v[-1] for n, v in covered[1 / 8].items()})}")
    measures = {
        _label(share): Measure("share of critical blocks, by document", values)
        for share, values in covered.items()
    }
    return Findings(
        benchmark="placement",
        machine=Machine.here(),
        baseline="recency",
        settings={
            "model": captures[0].facts["model"],
            "dtype": str(captures[0].dtype),
            "context tokens": [seen.prompt_tokens for seen in captures],
            "steps": STEPS,
            "critical": f"the best {CRITICAL:.1%} of each layer and head in each step",
        },
        configurations={
            name: f"{_ABOUT[each.ranking]}; last {each.observation} tokens"
            for name, each in PLACEMENTS.items()
        },
        measures=measures,
        ratios=_ratios(),
    )


def _label(share: float) -> str:
    return f"covered by the top {share:.1%}"


def _ratios() -> list[Ratio]:
    top = _label(1 / 8)
    return [
        Ratio("head / layer", top, "head, 16", "layer, 16", at_least=1.0),
        Ratio("layer / global", top, "layer, 16", "global, 16", at_least=1.0),
        Ratio("global / recency", top, "global, 16", "recency", at_least=1.0),
        Ratio("head / recency", top, "head, 16", "recency", at_least=1.3),
        Ratio("window of 32 / of 16, head", top, "head, 32", "head, 16"),
        Ratio("window of 64 / of 16, head", top, "head, 64", "head, 16"),
    ]


def coverage(seen: Capture) -> dict[float, dict[str, float]]:
    """By share of the blocks placed, and by placement: the share of critical blocks among them."""
    used = critical(seen)
    blocks = used.shape[2]
    found: dict[float, dict[str, float]] = {share: {} for share in SHARES}
    for name, placement in PLACEMENTS.items():
        ranked = pooled(prompt_importance(seen, placement.observation), placement.ranking)
        for share in SHARES:
            room = round(share * seen.prompt_tokens / BLOCK)
            is_placed = assign_homes(ranked.reshape(-1, blocks), [room]).reshape(ranked.shape) == 0
            found[share][name] = float((used * is_placed).sum() / used.sum())
    return found


def critical(seen: Capture) -> npt.NDArray[np.int64]:
    """In how many of the first steps each block is critical, [layers, H, n]."""
    first, stop = SINKS, seen.prompt_tokens - LOCAL
    blocks = (stop - first) // BLOCK
    best = round(CRITICAL * seen.prompt_tokens / BLOCK)
    layers, heads = seen.keys.shape[:2]
    used = np.zeros((layers, heads, blocks), np.int64)
    for layer in range(layers):
        keys, queries = to_tensor(seen.keys[layer]).float(), to_tensor(seen.queries[layer]).float()
        for step in range(min(STEPS, seen.steps)):
            visible = keys[:, : seen.prompt_tokens + step + 1]
            logits = queries[:, :, step] @ visible.transpose(1, 2) * seen.scale
            mass = logits.softmax(-1).mean(1)[:, first : first + blocks * BLOCK]
            of_blocks = mass.unflatten(1, (blocks, BLOCK)).sum(-1)
            top = of_blocks.topk(best, dim=1).indices.numpy()
            np.put_along_axis(used[layer], top, np.take_along_axis(used[layer], top, 1) + 1, 1)
    return used


def prompt_importance(seen: Capture, observation: int) -> Scores:
    """What the last tokens of a prompt attend to: float32 [layers, H, n], as the engine has it."""
    stop = SINKS + (seen.prompt_tokens - LOCAL - SINKS) // BLOCK * BLOCK
    weights = []
    for keys, last in zip(seen.keys, seen.last_queries, strict=True):
        of_prompt = to_tensor(keys)[:, : seen.prompt_tokens]
        strip = torch.cat([of_prompt[:, :SINKS], of_prompt[:, stop:]], 1)
        queries = to_tensor(last)[:, :, -observation:]
        weights.append(importance(queries, of_prompt[:, SINKS:stop], strip, BLOCK, seen.scale))
    stacked: Scores = torch.stack(weights).numpy()
    return stacked
