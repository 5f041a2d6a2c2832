"""The engine's own part of prefix reuse: what it refuses, and where blocks stand after a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.attention.prefixes import Prefixes
from tierstore.adapters.presets import Preset
from tierstore.errors import CapacityError, ConfigError
from tierstore.indexers import ExactIndex

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, SINKS, PIECE = 2, 4, 64
GEOMETRY = Geometry(LAYERS, 4, 2, 16, torch.float32, torch.device("cpu"))
TEXT = list(range(300))
KEPT = SINKS + 4 * PIECE


def engine(tokens: int, **options: object) -> SparseAttention:
    """One that has computed a random text of so many tokens; none for 0."""
    own = SparseAttention(GEOMETRY, budget="24", **{"dram": "4MiB", **options})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS if tokens else 0):
        shapes = ((1, heads, tokens, 16) for heads in (4, 2, 2))
        query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
        own.attend(layer, query, key, value, scale=0.25)
    return own


@pytest.fixture
def prefixes(tmp_path: Path) -> Prefixes:
    return Prefixes(tmp_path / "prefixes", disk="4MiB")


@pytest.mark.parametrize("tiers", [{}, {"fast": "96KiB"}, {"fast": "96KiB", "disk": True}])
def test_keys_values_and_places_come_back(
    prefixes: Prefixes, tmp_path: Path, tiers: dict[str, object]
) -> None:
    if "disk" in tiers:
        tiers = {**tiers, "dram": "112KiB", "disk": tmp_path / "disk"}
    first = engine(300, **tiers)
    segments = np.arange(2 * LAYERS, dtype=np.int32)
    blocks = (KEPT - SINKS - 64) // 4
    size = first.layout.block_bytes
    expected = np.empty((len(segments), blocks, size), np.uint8)
    first.store.read(segments, 0, blocks, expected)
    levels = first.store.levels(segments, blocks)
    assert len(np.unique(levels)) == (1 if not tiers else 2 + ("disk" in tiers))
    assert first.save_prefix(prefixes, [TEXT]) == [KEPT] == [first.kept_tokens(300)]

    again = engine(0, **tiers)
    assert again.load_prefix(prefixes, [TEXT]) == KEPT
    found = np.empty_like(expected)
    again.store.read(segments, 0, blocks, found)
    assert np.array_equal(found, expected)
    found_levels = again.store.levels(segments, blocks)
    assert np.array_equal(found_levels == 0, levels == 0)
    # Shares of the middle tier are rounded down for each segment.
    assert (found_levels != levels).sum() <= len(segments)
    again.store.validate()
    for own in (first, again):
        own.close()


def test_a_load_needs_an_empty_engine_and_a_number_for_each_text(prefixes: Prefixes) -> None:
    full, empty = engine(300), engine(0)
    with pytest.raises(ConfigError, match=r"reset\(\) first"):
        full.load_prefix(prefixes, [TEXT])
    with pytest.raises(ConfigError, match="expected a number for each"):
        empty.load_prefix(prefixes, [TEXT], padding=[0, 1])
    with pytest.raises(ConfigError, match="expected a number for each"):
        empty.load_prefix(prefixes, [])
    assert empty.load_prefix(prefixes, [TEXT]) == 0


def test_only_tokens_that_are_stored_can_be_saved(prefixes: Prefixes) -> None:
    with pytest.raises(ConfigError, match="run the model on a prompt first"):
        engine(0).save_prefix(prefixes, [TEXT])
    full = engine(300)
    for texts in ([[*TEXT, 1]], [TEXT, TEXT], []):
        with pytest.raises(ConfigError, match="no longer than what is stored"):
            full.save_prefix(prefixes, texts)
    assert full.save_prefix(prefixes, [TEXT[:60]]) == [0]


@pytest.mark.parametrize("padding", [[0, 262], [0, 260], [0, 258], [261, 0]])
def test_rows_may_get_no_more_than_some_of_their_sinks(
    prefixes: Prefixes, padding: list[int]
) -> None:
    """Rows of 262 columns or so: the one that begins late gets few tokens or none."""
    engine(300).save_prefix(prefixes, [TEXT])
    both = engine(0)
    texts = [TEXT[: 330 - pad] if pad else TEXT for pad in padding]
    columns = both.load_prefix(prefixes, texts, padding=padding)
    assert columns == KEPT
    query, key, value = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    for layer in range(LAYERS):
        out = both.attend(layer, query, key, value, scale=0.25)
        assert torch.isfinite(out).all()
    both.store.validate()
    assert both.report().context_tokens == KEPT + 40


def test_a_preset_without_sinks_is_served(prefixes: Prefixes) -> None:
    preset = Preset("own", ExactIndex, sinks=0)
    engine(300, preset=preset).save_prefix(prefixes, [TEXT])
    assert engine(0, preset=preset).load_prefix(prefixes, [TEXT]) == 4 * PIECE


def test_another_scale_than_the_kept_one_is_refused(prefixes: Prefixes) -> None:
    engine(300).save_prefix(prefixes, [TEXT])
    again = engine(0)
    again.load_prefix(prefixes, [TEXT])
    query, key, value = (torch.randn(1, heads, 4, 16) for heads in (4, 2, 2))
    with pytest.raises(ConfigError, match=r"scale=0.5: expected 0.25"):
        again.attend(0, query, key, value, scale=0.5)


def test_tiers_too_small_for_the_prompt_say_so_and_stay_empty(prefixes: Prefixes) -> None:
    engine(300).save_prefix(prefixes, [TEXT])
    small = engine(0, dram="96KiB")
    with pytest.raises(CapacityError, match="raise dram="):
        small.load_prefix(prefixes, [TEXT])
    with pytest.raises(ConfigError, match="nothing is stored yet"):
        _ = small.store
    query, key, value = (torch.randn(1, heads, 4, 16) for heads in (4, 2, 2))
    small.attend(0, query, key, value, scale=0.5)


@pytest.mark.parametrize(("wrong", "says"), [({"wait": -1}, "wait=-1"), ({"disk": "x"}, "disk")])
def test_wrong_settings_of_a_place_are_refused(
    tmp_path: Path, wrong: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Prefixes(tmp_path, **wrong)  # type: ignore[arg-type]
