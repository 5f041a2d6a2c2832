"""What a step computes is attention over exactly the set of tokens that the engine reports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from stories import SCALE, Story, check_step, prefilled, small

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.presets import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Selection

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
