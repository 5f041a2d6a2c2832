"""The benchmark of guesses on a tiny model, and what it says of guesses that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from bench_schema import as_json
from torch import nn

from tierstore.benchmarks import guesses
from tierstore.benchmarks.language import sharing_weights

if TYPE_CHECKING:
    from tierstore.adapters.models import LoadedModel


def silent(progress: str) -> None:
    """Say nothing."""


def test_each_guess_is_judged_by_what_each_layer_selects(tiny_model: LoadedModel) -> None:
    data = as_json(guesses.measure(silent, tiny_model, tokens=400, steps=6))
    assert len(data["measures"]) == 2 * len(guesses.ROWS) * len(guesses.BUDGETS)
    for name, measure in data["measures"].items():
        assert set(measure["values"]) == set(guesses.CONFIGURATIONS)
        for values in measure["values"].values():
            assert len(values) == 1, "of three layers, two are not guessed for"
            assert min(values) >= 0
            assert max(values) <= 1 or not name.startswith("share")
    assert [ratio["measure"] for ratio in data["ratios"]] == [
        name for name in data["measures"] if name.startswith("share")
    ]


def test_where_layers_add_nothing_all_is_guessed(tiny_model: LoadedModel) -> None:
    model: Any = sharing_weights(tiny_model.model)
    for layer in model.model.layers:
        for block, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            getattr(block, name).weight = nn.Parameter(0 * getattr(block, name).weight.data)
    still = replace(tiny_model, model=model)
    data = as_json(guesses.measure(silent, still, tokens=400, steps=6))
    for measure in data["measures"].values():
        assert measure["values"]["previous-layer"] == pytest.approx([1.0])


def test_shares_and_masses_of_known_selections() -> None:
    """Two heads, one step, four blocks."""
    chosen = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]]], bool)
    guessed = np.array([[[1, 0, 1, 0]], [[0, 1, 1, 0]]], bool)
    mass = np.array([[[0.4, 0.2, 0.2, 0.1]], [[0.1, 0.3, 0.3, 0.3]]], np.float32)
    assert guesses.share(chosen, guessed) == pytest.approx((0.5 + 1) / 2)
    assert guesses.relative_mass(chosen, guessed, mass) == pytest.approx((0.6 / 0.6 + 1) / 2)
    mass[0, 0, 2] = 0.05
    assert guesses.relative_mass(chosen, guessed, mass) == pytest.approx((0.45 / 0.6 + 1) / 2)
