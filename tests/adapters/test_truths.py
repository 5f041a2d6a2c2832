"""On the real demo model, a whole budget changes nothing, however many tiers there are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.transformers import attach, attach_engine, geometry_of
from tierstore.tiers import DeviceTier, MmapTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tierstore.adapters.attention.chain import TierFactory
    from tierstore.adapters.models import LoadedModel
    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout

STEPS = 64
PROMPTS = (
    "The history of lighthouses begins with fires on hills. " * 12 + "In short,",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 9,
    "Dear Sir or Madam, I am writing to you because the kettle that I bought last week " * 8,
)


@dataclass
class Run:
    """Greedy tokens, the logits that chose them, and every layer's output for the last token."""

    tokens: list[int]
    logits: torch.Tensor
    layers: torch.Tensor


@torch.inference_mode()
def run(
    loaded: LoadedModel, ids: torch.Tensor, cache: Mapping[str, object], forced: Sequence[int] = ()
) -> Run:
    """`STEPS` steps of greedy generation; `forced` tokens are fed instead of the best ones."""
    tokens, logits, layers = [], [], []
    for step in range(STEPS):
        output = loaded.model(ids, use_cache=True, output_hidden_states=True, **cache)
        logits.append(output.logits[0, -1].float())
        layers.append(torch.stack([states[0, -1].float() for states in output.hidden_states]))
        tokens.append(int(logits[-1].argmax()))
        ids = torch.tensor([[forced[step] if forced else tokens[-1]]])
    return Run(tokens, torch.stack(logits), torch.stack(layers))


def full_attention(loaded: LoadedModel, prompt: str) -> tuple[torch.Tensor, Run]:
    ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
    has_new_name = "cache" in inspect.signature(loaded.model.forward).parameters
    keyword = "cache" if has_new_name else "past_key_values"
    return ids, run(loaded, ids, {keyword: DynamicCache(config=loaded.model.config)})


def one(_: Path) -> TierFactory:
    return lambda layout: [PinnedTier(layout, "64MiB")]


def two(folder: Path) -> TierFactory:
    return lambda layout: [DeviceTier(layout, "6MiB"), MmapTier(layout, folder / "blocks")]


def five(folder: Path) -> TierFactory:
    def tiers(layout: BlockLayout) -> Sequence[Tier]:
        return [
            DeviceTier(layout, "6MiB"),
            PinnedTier(layout, "1MiB", name="small"),
            MmapTier(layout, folder / "cache", "1MiB", name="cache"),
            PinnedTier(layout, "4MiB"),
            MmapTier(layout, folder / "blocks"),
        ]

    return tiers


@pytest.fixture(scope="module")
def stories(demo_fp32: LoadedModel) -> list[tuple[torch.Tensor, Run]]:
    return [full_attention(demo_fp32, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("stack", [one, two, five])
def test_a_whole_budget_gives_the_tokens_of_full_attention(
    stack: Callable[[Path], TierFactory],
    stories: list[tuple[torch.Tensor, Run]],
    demo_fp32: LoadedModel,
    tmp_path: Path,
) -> None:
    for number, (ids, truth) in enumerate(stories):
        folder = tmp_path / str(number)
        folder.mkdir()
        geometry = geometry_of(demo_fp32.model)
        engine = SparseAttention(geometry, budget=1.0, tiers=stack(folder), window=1.0)
        with attach_engine(demo_fp32.model, engine) as cache:
            found = run(demo_fp32, ids, cache.kwargs)
            report = engine.report()
        assert found.tokens == truth.tokens
        torch.testing.assert_close(found.logits, truth.logits, atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(found.layers, truth.layers, atol=2e-2, rtol=1e-3)
        if len(report.tiers) > 1:
            assert report.window is not None
            assert report.window < 1, "here the selection must be larger than the fast tier"


def test_bfloat16_differs_only_where_two_tokens_are_nearly_equal(demo_model: LoadedModel) -> None:
    # bfloat16 has 8 bits: logits near 16 come in steps of 0.125, and layers add up such roundings.
    nearly_equal = 0.75
    for prompt in PROMPTS:
        ids, truth = full_attention(demo_model, prompt)
        with attach(demo_model.model, budget=1.0, dram="64MiB") as cache:
            found = run(demo_model, ids, cache.kwargs, forced=truth.tokens)
        best = truth.logits.topk(2).values
        decided = (best[:, 0] - best[:, 1]) > nearly_equal
        assert decided.sum() > STEPS // 2
        assert torch.tensor(found.tokens)[decided].equal(torch.tensor(truth.tokens)[decided])
