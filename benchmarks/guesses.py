"""How much of what a layer selects had been guessed before it had a query.

The demo model reads a text with full attention. As it goes on, the query of each layer is kept, and
the guess of it that is made one layer earlier (InfiniGen); an index selects for both. The other
guess there is, the layer's own query of the step before (FreeKV), is judged beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.adapters.attention.recorder import QueryRecorder
from tierstore.adapters.capture import WINDOW, captured, full_engine
from tierstore.adapters.generate import next_logits
from tierstore.adapters.models import DEMO_MODEL, LoadedModel, load_model
from tierstore.benchmarks.findings import Findings
from tierstore.benchmarks.indexes import INDEXES, Row
from tierstore.benchmarks.language import check_window, real_text
from tierstore.benchmarks.machine import Machine
from tierstore.benchmarks.recall import Truth, built_index, selected_blocks
from tierstore.benchmarks.rounds import Measure, Ratio, Say
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.traces.capture import Capture

    Chosen = npt.NDArray[np.bool_]
    """Whether each block is selected, [H, T, blocks]."""
    Masses = npt.NDArray[np.float32]

ROWS = (Row("exact", 4), Row("partial-columns", 1))
"""By all keys, and as InfiniGen selects."""

BUDGETS = (1 / 64, 1 / 16)
STEPS = 32
CONFIGURATIONS = {
    "previous-layer": "guessed from what enters the layer before",
    "previous-step": "guessed to be what the layer selected in the step before",
}


def run(say: Say, *, tokens: int = 6_000) -> Findings:
    """Measure on SmolLM2-135M-Instruct."""
    say(f"loading {DEMO_MODEL}")
    return measure(say, load_model(DEMO_MODEL), tokens=tokens)


def measure(say: Say, loaded: LoadedModel, *, tokens: int, steps: int = STEPS) -> Findings:
    """Measure in so many steps after a prompt of `tokens` tokens.

    There is no guess for layers 0 and 1, so the measures begin with layer 2.
    """
    check_window(loaded.model, tokens + steps)
    text = real_text(loaded.tokenizer, tokens + steps)
    seen, guesses = listen(loaded, text, steps)
    say("the text is read")
    truth, measures, baseline = Truth(seen), {}, "previous-step"
    for row in ROWS:
        for budget in BUDGETS:
            found = _found(truth, guesses, row, budget)
            for kind, unit in (("share", "of the blocks"), ("mass", "of the attention")):
                measures[f"{kind}, {row.at(budget)}"] = Measure(
                    f"{unit} that a layer selects, by layer",
                    {name: getattr(each, kind) for name, each in found.items()},
                )
            say(f"{row.at(budget)}: " + _means(found))
    return Findings(
        benchmark="guesses",
        machine=Machine.here(),
        baseline=baseline,
        settings={
            "model": loaded.name,
            "dtype": str(loaded.model.dtype),
            "context tokens": tokens,
            "steps": steps,
        },
        configurations=CONFIGURATIONS,
        measures=measures,
        ratios=[
            Ratio(f"{name}: previous-layer / previous-step", name, "previous-layer", baseline)
            for name in measures
            if name.startswith("share")
        ],
    )


class GuessRecorder(QueryRecorder):
    """Keeps also what each layer is told of the next one's query."""

    wants_next_query = True

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        scale: float,
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if next_query is not None:
            self.guesses[layer].append(next_query[0].clone())
        return super().attend(layer, query, key, value, valid=valid, scale=scale)

    def _forget(self) -> None:
        super()._forget()
        self.guesses: list[list[torch.Tensor]] = [[] for _ in range(self.geometry.layers - 1)]


def listen(loaded: LoadedModel, text: Sequence[int], steps: int) -> tuple[Capture, torch.Tensor]:
    """What full attention sees, and guesses [layers - 2, H, G, T, d] of layer 2 and later ones."""
    from tierstore.adapters.transformers import attach_engine, geometry_of

    geometry = geometry_of(loaded.model)
    recorder = GuessRecorder(full_engine(geometry, len(text)), WINDOW)
    with attach_engine(loaded.model, recorder) as cache:
        next_logits(loaded.model, text[:-steps], cache.kwargs)
        for token in text[-steps:]:
            next_logits(loaded.model, [token], cache.kwargs)
        guesses = torch.stack([torch.cat(each, 1) for each in recorder.guesses[1:]])
        grouped = guesses.unflatten(1, (geometry.kv_heads, geometry.group))
        return captured(recorder, loaded.name, ""), grouped


class Found(NamedTuple):
    """Of each layer from 2 on, mean over KV heads: what was guessed of what it selects.

    share: of the blocks. mass: attention to what was guessed, relative to that to the blocks.
    """

    share: list[float]
    mass: list[float]


def _found(truth: Truth, guesses: torch.Tensor, row: Row, budget: float) -> dict[str, Found]:
    found = {name: Found([], []) for name in CONFIGURATIONS}
    for layer in range(2, len(truth.masses)):
        index = built_index(INDEXES[row.name], truth.capture, layer, row.block_tokens, truth.tokens)
        true, guessed = (
            selected_blocks(truth, index, queries, row.block_tokens, budget)[0]
            for queries in (to_tensor(truth.capture.queries[layer]), guesses[layer - 2])
        )
        mass = truth.masses[layer]
        blocks = mass.reshape(*mass.shape[:2], -1, row.block_tokens).sum(-1)
        pairs = {
            "previous-layer": (true, guessed, blocks),
            "previous-step": (true[:, 1:], true[:, :-1], blocks[:, 1:]),
        }
        for name, (chosen, instead, of_step) in pairs.items():
            found[name].share.append(share(chosen, instead))
            found[name].mass.append(relative_mass(chosen, instead, of_step))
    return found


def share(chosen: Chosen, guessed: Chosen) -> float:
    """Share of what is chosen that had been guessed; mean over heads."""
    return float(((chosen & guessed).sum((1, 2)) / chosen.sum((1, 2))).mean())


def relative_mass(chosen: Chosen, guessed: Chosen, mass: Masses) -> float:
    """Attention to what was guessed, relative to that to what is chosen; mean over heads."""
    captured, due = (np.where(each, mass, 0).sum((1, 2)) for each in (guessed, chosen))
    return float((captured / due).mean())


def _means(found: dict[str, Found]) -> str:
    return ", ".join(f"{name} {np.mean(each.share):.1%}" for name, each in found.items())
