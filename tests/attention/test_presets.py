"""What a preset is when it leaves something out, and that the shipped ones leave nothing."""

from __future__ import annotations

import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS, Preset
from tierstore.indexers import ExactIndex
from tierstore.policies import DEFAULT_FOR_ATTENTION, LRU, Blend, Lookahead, Random

GEOMETRY = Geometry(1, 2, 2, 16, torch.float32, torch.device("cpu"))


def test_a_preset_without_a_policy_runs_with_the_default_for_attention() -> None:
    preset = Preset("mine", ExactIndex)
    assert preset.policy is DEFAULT_FOR_ATTENTION is Blend
    engine = SparseAttention(GEOMETRY, preset=preset, budget=32, fast="1MiB", dram="1MiB")
    for tokens in (300, 1, 1):
        query, key, value = (torch.randn(1, 2, tokens, 16) for _ in range(3))
        engine.attend(0, query, key, value, scale=0.25)
    assert isinstance(engine.store._moves.policies[0], Blend)
    engine.close()


def test_published_systems_and_yardsticks_keep_the_policies_they_name() -> None:
    assert {name: preset.policy for name, preset in PRESETS.items()} == {
        "kvdrive": Lookahead,
        "best": Blend,
        "chunk-mean": LRU,
        "exact": Lookahead,
        "random": Random,
        "full": LRU,
    }
