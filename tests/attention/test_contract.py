"""What an adapter is told when it does not keep the engine's contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import Preset
from tierstore.errors import ConfigError
from tierstore.indexers import ExactIndex
from tierstore.layout import BlockLayout
from tierstore.policies import LRU
from tierstore.tiers import PinnedTier

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierstore.interfaces import Bytes, Completion, Ids

GEOMETRY = Geometry(3, 4, 2, 16, torch.float32, torch.device("cpu"))


class Failing(PinnedTier):
    """Refuses to write while it is told to."""

    is_failing = False

    def write(
        self, slots: Ids, blocks: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        if self.is_failing:
            raise OSError("no more")
        return super().write(slots, blocks, rows, parts)


def attend(engine: SparseAttention, layer: int, tokens: int, dim: int = 16) -> torch.Tensor:
    query, key, value = (torch.randn(1, heads, tokens, dim) for heads in (4, 2, 2))
    return engine.attend(layer, query, key, value, scale=0.25)


def run(engine: SparseAttention, tokens: int) -> None:
    for layer in range(GEOMETRY.layers):
        attend(engine, layer, tokens)


@pytest.mark.parametrize("layer", [1, 2, 3, -1])
def test_layers_come_in_order(layer: int) -> None:
    engine = SparseAttention(GEOMETRY, dram="4MiB")
    with pytest.raises(ConfigError, match=f"layer {layer} comes, layer 0 is next"):
        attend(engine, layer, 100)
    run(engine, 100)
    attend(engine, 0, 1)
    with pytest.raises(ConfigError, match="layer 0 comes, layer 1 is next"):
        attend(engine, 0, 1)
    with pytest.raises(ConfigError, match="layer 1 is next: finish the pass first"):
        engine.crop(1)


def test_shapes_of_another_model_are_refused() -> None:
    engine = SparseAttention(GEOMETRY, dram="4MiB")
    with pytest.raises(ConfigError, match=r"query of shape \(1, 4, 9, 32\): expected"):
        attend(engine, 0, 9, dim=32)
    key = torch.randn(1, 2, 9, 16)
    with pytest.raises(ConfigError, match=r"of torch\.float64: expected"):
        engine.attend(0, torch.randn(1, 4, 9, 16), key.double(), key.double(), scale=1.0)
    run(engine, 9)


def test_half_a_pass_is_never_built_upon() -> None:
    """The third layer's write fails: two layers are then a pass ahead of it."""
    tier = Failing(BlockLayout.kv(4, 16, torch.float32), "4MiB")
    engine = SparseAttention(GEOMETRY, tiers=lambda _: [tier])
    run(engine, 300)
    attend(engine, 0, 100)
    attend(engine, 1, 100)
    tier.is_failing = True
    with pytest.raises(OSError, match="no more"):
        attend(engine, 2, 100)
    tier.is_failing = False
    for layer in (0, 2):
        with pytest.raises(ConfigError, match="an earlier call failed"):
            attend(engine, layer, 1)
    with pytest.raises(ConfigError, match="an earlier call failed"):
        engine.crop(1)
    engine.store.validate()
    engine.reset()
    run(engine, 300)
    run(engine, 1)
    engine.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 3.0}, "window=3.0: there is no fast tier"),
        ({"window": float("nan")}, "window=nan: expected at least 1 budget"),
        ({"keep": True}, "there is no disk tier"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SparseAttention(GEOMETRY, dram="1MiB", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"fast": "1MiB"}, {"keep": True}, {"disk_codec": "raw"}])
def test_tiers_of_ones_own_replace_every_other_word_on_them(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tiers= replaces fast="):
        SparseAttention(GEOMETRY, tiers=lambda _: [], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, 7.5, -1])
def test_a_preset_checks_its_budget(budget: float) -> None:
    with pytest.raises(ConfigError, match=f"budget={budget}"):
        Preset("mine", ExactIndex, LRU, budget=budget)


def test_no_step_no_attended_set() -> None:
    engine = SparseAttention(GEOMETRY, dram="4MiB", record=True)
    run(engine, 100)
    with pytest.raises(ConfigError, match="layer 0 has made no step yet"):
        engine.attended(0)
