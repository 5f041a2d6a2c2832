"""What a step computes is attention over exactly the set of tokens that the engine reports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS, Preset

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Selection

SCALE = 0.21


class Story:
    """Random queries, keys and values of a model, and a float64 account of what attention gives."""

    def __init__(self, geometry: Geometry, sequences: int, seed: int = 0) -> None:
        self.geometry, self.sequences = geometry, sequences
        self.generator = torch.Generator().manual_seed(seed)
        empty = torch.zeros(
            sequences, geometry.kv_heads, 0, geometry.head_dim, dtype=geometry.dtype
        )
        self.keys = [empty.clone() for _ in range(geometry.layers)]
        self.values = [empty.clone() for _ in range(geometry.layers)]

    def _random(self, heads: int, tokens: int) -> torch.Tensor:
        shape = (self.sequences, heads, tokens, self.geometry.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.geometry.dtype)

    def tell(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of `tokens` new tokens, which are now part of the past."""
        query = self._random(self.geometry.query_heads, tokens)
        key, value = (self._random(self.geometry.kv_heads, tokens) for _ in range(2))
        self.keys[layer] = torch.cat([self.keys[layer], key], 2)
        self.values[layer] = torch.cat([self.values[layer], value], 2)
        return query, key, value

    def attention(
        self, layer: int, row: int, query: torch.Tensor, positions: list[int]
    ) -> np.ndarray:
        """Attention of the last query over those positions, [G, d] in float64."""
        sequence, head = divmod(row, self.geometry.kv_heads)
        group = self.geometry.query_heads // self.geometry.kv_heads
        q = query[sequence, head * group : (head + 1) * group, -1].double().numpy()
        k = self.keys[layer][sequence, head, positions].double().numpy()
        v = self.values[layer][sequence, head, positions].double().numpy()
        logits = q @ k.T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out: np.ndarray = (weights / weights.sum(1, keepdims=True)) @ v
        return out

    def masses(self, layer: int, row: int, query: torch.Tensor) -> np.ndarray:
        """Attention of the last queries to each token, summed over them."""
        sequence, head = divmod(row, self.geometry.kv_heads)
        group = self.geometry.query_heads // self.geometry.kv_heads
        q = query[sequence, head * group : (head + 1) * group, -1].double().numpy()
        logits = q @ self.keys[layer][sequence, head].double().numpy().T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        masses: np.ndarray = (weights / weights.sum(1, keepdims=True)).sum(0)
        return masses


def small(dtype: torch.dtype = torch.float32, layers: int = 2) -> Geometry:
    return Geometry(layers, 6, 2, 16, dtype, torch.device("cpu"))


def check_step(engine: SparseAttention, story: Story, tolerance: float) -> list[list[list[int]]]:
    """Run one token through every layer; returns the attended positions per layer and row."""
    group = story.geometry.query_heads // story.geometry.kv_heads
    reported = []
    for layer in range(story.geometry.layers):
        query, key, value = story.tell(layer, 1)
        out = engine.attend(layer, query, key, value, scale=SCALE)
        rows = engine.attended(layer)
        total = story.keys[layer].shape[2]
        for row, positions in enumerate(rows):
            assert len(set(positions)) == len(positions), "a token was attended twice"
            assert set(range(min(4, total))) <= set(positions), "a sink is missing"
            assert set(range(max(0, total - 64), total)) <= set(positions), (
                "local window incomplete"
            )
            expected = story.attention(layer, row, query, positions)
            sequence, head = divmod(row, story.geometry.kv_heads)
            found = out[sequence, 0, head * group : (head + 1) * group].double().numpy()
            np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)
        reported.append(rows)
    return reported


def prefilled(
    preset: str | Preset, story: Story, tokens: int, **options: object
) -> SparseAttention:
    engine = SparseAttention(story.geometry, preset=preset, record=True, **options)  # type: ignore[arg-type]
    for layer in range(story.geometry.layers):
        engine.attend(layer, *story.tell(layer, tokens), scale=SCALE)
    return engine


STACKS = {
    "one tier": {"dram": "8MiB"},
    "two tiers": {"dram": "900KiB", "disk": "kv"},
    "three tiers": {"fast": "800KiB", "dram": "500KiB", "disk": "kv"},
}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
@pytest.mark.parametrize("preset", ["best", "kvdrive", "exact", "chunk-mean", "random", "full"])
@pytest.mark.parametrize("residents", [False, True], ids=["selected", "residents"])
def test_a_step_attends_to_exactly_what_is_reported(
    preset: str, residents: bool, stack: dict[str, str], tmp_path: Path
) -> None:
    rules = replace(PRESETS[preset], attends_residents=residents)
    story = Story(small(), sequences=2)
    options = {k: tmp_path / v if k == "disk" else v for k, v in stack.items()}
    engine = prefilled(rules, story, 420, budget=0.2, **options)
    for _ in range(40):
        check_step(engine, story, 2e-5)
    engine.store.validate()
    engine.close()


def test_exact_scores_count_sinks_and_local_window() -> None:
    """So a step in which a head looks at its sinks alone says little of its blocks."""
    story, heard = Story(small(layers=1), sequences=2), []

    def listen(layer: int, blocks: np.ndarray, selection: Selection) -> None:
        assert selection.everything is not None
        heard.append((int(blocks[0]), selection.everything.unit_scores.copy()))

    engine = prefilled("exact", story, 420, dram="8MiB", on_selection=listen)
    for _ in range(40):
        query, key, value = story.tell(0, 1)
        engine.attend(0, query, key, value, scale=SCALE)
        blocks, scores = heard.pop()
        for row in range(4):
            masses = story.masses(0, row, query)
            expected = np.log(masses[4 : 4 + 4 * blocks].reshape(blocks, 4).sum(1))
            np.testing.assert_allclose(scores[row, :blocks], expected, atol=1e-4)
    engine.close()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 2e-5)]
)
def test_element_types_round_and_nothing_else(dtype: torch.dtype, tolerance: float) -> None:
    story = Story(small(dtype), sequences=1)
    engine = prefilled("kvdrive", story, 300, budget=0.1, fast="200KiB", dram="2MiB")
    for _ in range(40):
        check_step(engine, story, tolerance)
    engine.close()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 68, 69, 71, 72, 73])
def test_short_contexts_grow_into_blocks_one_token_at_a_time(tokens: int) -> None:
    story = Story(small(), sequences=1)
    engine = prefilled("kvdrive", story, tokens, budget=1.0, dram="2MiB")
    for _ in range(120):
        for rows in check_step(engine, story, 2e-5):
            assert [len(positions) for positions in rows] == [story.keys[0].shape[2]] * 2
    assert engine.report().selected_blocks > 0
    engine.close()


def test_a_whole_budget_attends_to_every_token_even_through_a_tiny_fast_tier(
    tmp_path: Path,
) -> None:
    story = Story(small(), sequences=1)
    engine = prefilled(
        "kvdrive", story, 700, budget=1.0, fast="150KiB", dram="90KiB", disk=tmp_path / "kv"
    )
    for _ in range(36):
        for layer, rows in enumerate(check_step(engine, story, 2e-5)):
            total = story.keys[layer].shape[2]
            assert all(sorted(positions) == list(range(total)) for positions in rows)
    report = engine.report()
    assert report.window is not None
    assert report.window < 0.7, "the selection must be larger than the fast tier for this test"
    engine.close()


def test_a_budget_in_tokens_is_kept() -> None:
    story = Story(small(), sequences=1)
    engine = prefilled("exact", story, 400, budget=40, dram="8MiB")
    for rows in check_step(engine, story, 2e-5):
        strip = 4 + 64 + (400 - 68) % 4 + 1
        assert [len(positions) for positions in rows] == [40 + strip, 40 + strip]
    engine.close()


def test_a_second_turn_is_exact_over_the_tiered_past(tmp_path: Path) -> None:
    story = Story(small(), sequences=2)
    engine = prefilled(
        "kvdrive", story, 330, budget=0.1, fast="250KiB", dram="200KiB", disk=tmp_path / "kv"
    )
    for _ in range(40):
        check_step(engine, story, 2e-5)
    for layer in range(story.geometry.layers):
        query, key, value = story.tell(layer, 50)
        out = engine.attend(layer, query, key, value, scale=SCALE)
        everything = list(range(story.keys[layer].shape[2]))
        for row in range(4):
            sequence, head = divmod(row, 2)
            expected = story.attention(layer, row, query, everything)
            found = out[sequence, -1, head * 3 : head * 3 + 3].double().numpy()
            np.testing.assert_allclose(found, expected, atol=2e-5)
    for _ in range(40):
        check_step(engine, story, 2e-5)
    engine.close()


@pytest.mark.parametrize("tokens", [1, 5, 40, 64, 65, 100, 180, 300])
def test_crop_forgets_the_last_tokens_and_goes_on(tokens: int) -> None:
    story = Story(small(), sequences=2)
    engine = prefilled("kvdrive", story, 310, budget=0.15, fast="250KiB", dram="2MiB")
    for _ in range(10):
        check_step(engine, story, 2e-5)
    engine.crop(tokens)
    for layer in range(story.geometry.layers):
        story.keys[layer] = story.keys[layer][:, :, :-tokens]
        story.values[layer] = story.values[layer][:, :, :-tokens]
    for _ in range(50):
        check_step(engine, story, 2e-5)
    engine.store.validate()
    engine.close()


@pytest.mark.parametrize("sources", [[1, 0], [0, 0], [1], [1, 1, 0, 2], [2, 0, 1], [0, 0, 0, 0, 1]])
def test_sequences_can_be_reordered_dropped_and_duplicated(sources: list[int]) -> None:
    story = Story(small(), sequences=3)
    engine = prefilled("kvdrive", story, 200, budget=0.25, fast="500KiB", dram="4MiB")
    for _ in range(5):
        check_step(engine, story, 2e-5)
    sources = [source for source in sources if source < 3]
    engine.select_rows(sources)
    story.sequences = len(sources)
    story.keys = [keys[sources] for keys in story.keys]
    story.values = [values[sources] for values in story.values]
    for _ in range(45):
        check_step(engine, story, 2e-5)
    engine.store.validate()
    engine.close()


def test_padding_is_not_stored() -> None:
    geometry = small(layers=1)
    story = Story(geometry, sequences=2)
    engine = SparseAttention(geometry, budget=1.0, dram="4MiB", record=True)
    query, key, value = story.tell(0, 200)
    valid = torch.ones(2, 200, dtype=torch.bool)
    valid[0, :90] = False
    valid[1, 150:] = False
    out = engine.attend(0, query, key, value, valid=valid, scale=SCALE)
    expected = story.attention(0, 0, query, list(range(90, 200)))
    np.testing.assert_allclose(out[0, -1, :3].double().numpy(), expected, atol=2e-5)
    assert engine.report().context_tokens == 150
    query, key, value = story.tell(0, 1)
    out = engine.attend(0, query, key, value, scale=SCALE)
    for row, positions in [(0, [*range(90, 201)]), (2, [*range(150), 200])]:
        found = out[row // 2, 0, :3].double().numpy()
        np.testing.assert_allclose(found, story.attention(0, row, query, positions), atol=2e-5)
    engine.close()
