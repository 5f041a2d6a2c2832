"""Where a prompt's blocks start, by each ranking, against attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from stories import SCALE, Story, check_step, prefilled, small

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.presets import PRESETS, Preset
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


TOKENS, SINKS, LOCAL, BLOCK = 400, 4, 64, 4
BLOCKS = (TOKENS - SINKS - LOCAL) // BLOCK


def importance(story: Story, queries: list[np.ndarray], observation: int) -> np.ndarray:
    """Attention of the last queries to each block, [layers, H, n] in float64."""
    heads = story.geometry.kv_heads
    found = np.zeros((story.geometry.layers, heads, BLOCKS))
    for layer, query in enumerate(queries):
        for head in range(heads):
            keys = story.keys[layer][0, head].double().numpy()
            for of_head in range(3 * head, 3 * head + 3):
                for position in range(TOKENS - observation, TOKENS):
                    logits = keys[: position + 1] @ query[0, of_head, position] * SCALE
                    weights = np.exp(logits - logits.max())
                    inside = weights[SINKS : SINKS + BLOCKS * BLOCK] / weights.sum()
                    found[layer, head] += inside.reshape(BLOCKS, BLOCK).sum(1)
    return found


def started(rules: Preset, folder: Path) -> tuple[SparseAttention, np.ndarray]:
    """An engine after its prompt, and the importance of its blocks."""
    story, queries = Story(small(), sequences=1), []
    engine = SparseAttention(
        small(), preset=rules, budget=0.1, fast="500KiB", dram="200KiB", disk=folder / "kv"
    )
    for layer in range(2):
        query, key, value = story.tell(layer, TOKENS)
        queries.append(query.double().numpy())
        engine.attend(layer, query, key, value, scale=SCALE)
    return engine, importance(story, queries, rules.observation)


def places(engine: SparseAttention, level: int) -> np.ndarray:
    """Which blocks of each row [layers, H, n] a tier has."""
    space, moves = engine.store.space, engine.store._moves
    handles = np.stack([space.all_handles(segment) for segment in range(4)])
    slots = moves.residency[level].slot_of.array[handles]
    return (slots >= 0).reshape(2, 2, -1)


def best(ranked: np.ndarray, count: np.ndarray) -> np.ndarray:
    rank = np.argsort(np.argsort(-ranked, axis=2), axis=2)
    return rank < count[..., None]


RANKED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "head": lambda mass: mass,
    "layer": lambda mass: np.broadcast_to(mass.sum(1, keepdims=True), mass.shape),
    "global": lambda mass: np.broadcast_to(mass.sum((0, 1), keepdims=True), mass.shape),
    "recency": lambda mass: np.broadcast_to(np.arange(float(mass.shape[2])), mass.shape),
}


@pytest.mark.parametrize("observation", [16, 32, 64])
@pytest.mark.parametrize("ranking", list(RANKED))
def test_the_best_blocks_of_a_ranking_start_on_top(
    ranking: str, observation: int, tmp_path: Path
) -> None:
    rules = replace(PRESETS["exact"], ranking=ranking, observation=observation)
    engine, mass = started(rules, tmp_path)
    quota = engine.store.quota(np.arange(4, dtype=np.int32)).reshape(2, 2)
    assert 0 < quota.min() <= quota.max() < BLOCKS
    ranked = RANKED[ranking](mass)
    assert np.array_equal(places(engine, 0), best(ranked, quota))
    below = engine.store.tiers[1].capacity // 4
    assert below > 0
    upper = best(ranked, np.minimum(quota + below, BLOCKS))
    assert np.array_equal(places(engine, 0) | places(engine, 1), upper)
    engine.store.validate()
    engine.close()


def test_nothing_starts_above_where_nothing_is_ranked(tmp_path: Path) -> None:
    rules = replace(PRESETS["exact"], ranking="none")
    engine, _ = started(rules, tmp_path)
    assert not places(engine, 0).any()
    assert not places(engine, 1).any()
    engine.close()


@pytest.mark.parametrize("ranking", [*RANKED, "none"])
def test_a_second_turn_is_placed_too(ranking: str, tmp_path: Path) -> None:
    rules = replace(PRESETS["kvdrive"], ranking=ranking)
    story = Story(small(), sequences=2)
    engine = prefilled(
        rules, story, 300, budget=0.1, fast="500KiB", dram="300KiB", disk=tmp_path / "kv"
    )
    for _ in range(3):
        check_step(engine, story, 2e-5)
    for layer in range(2):
        engine.attend(layer, *story.tell(layer, 150), scale=SCALE)
    engine.store.validate()
    for _ in range(3):
        check_step(engine, story, 2e-5)
    engine.close()


def test_the_paper_and_the_best_rank_in_their_own_ways() -> None:
    assert PRESETS["kvdrive"].ranking == "global"
    assert PRESETS["best"].ranking == "head"


def test_an_unknown_ranking_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranking='token': expected one of head, layer"):
        replace(PRESETS["best"], ranking="token")
