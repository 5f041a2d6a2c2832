"""The benchmarks of placement, of the layout on disk, and of the ladder, on a tiny model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from attention_traces import drifting
from bench_schema import as_json

from tierstore.adapters.capture import capture
from tierstore.benchmarks import ladder, layout, placement
from tierstore.benchmarks.language import real_text
from tierstore.benchmarks.resampled import (
    FIRST_STEP,
    ResampledText,
    reloads,
    resampled_blocks,
    true_scores,
)
from tierstore.errors import ConfigError
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel
    from tierstore.traces.capture import Capture

PROMPT, STEPS = 400, 22


def quiet(progress: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def seen(tiny_model: LoadedModel) -> Capture:
    text = real_text(tiny_model.tokenizer, PROMPT + STEPS)
    return capture(tiny_model.model, text, STEPS, document="topics")


def masses(seen: Capture, layer: int, step: int, source: np.ndarray) -> np.ndarray:
    """Attention [H, n] to each block of a drawn-out text, in float64, over all its tokens."""
    keys = to_tensor(seen.keys[layer]).double().numpy()
    queries = to_tensor(seen.queries[layer]).double().numpy()
    heads, group = queries.shape[:2]
    positions = [*range(4)]
    for block in source.tolist():
        positions += range(4 + 4 * block, 8 + 4 * block)
    positions += range(PROMPT - 64, PROMPT + step + 1)
    n = len(source)
    found = np.zeros((heads, n))
    for head in range(heads):
        for query in queries[head, :, step]:
            logits = keys[head, positions] @ query * seen.scale
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            found[head] += weights[4 : 4 + 4 * n].reshape(n, 4).sum(1) / group
    return found


# A long context


def test_every_block_comes_equally_often_in_stretches(seen: Capture) -> None:
    source = resampled_blocks(seen, 1_000, 0)
    have = (PROMPT - 68) // 4
    assert len(source) == (1_000 - 68) // 4
    copies = np.bincount(source, minlength=have)
    assert copies.max() - copies.min() <= 1
    assert (np.diff(source) == 1).mean() > 0.8
    assert not np.array_equal(source[:have], np.arange(have))


def test_a_shorter_context_is_refused(seen: Capture) -> None:
    with pytest.raises(ConfigError, match="has 400 already"):
        resampled_blocks(seen, 300, 0)


def test_the_long_context_has_the_captured_tokens(seen: Capture) -> None:
    text = ResampledText(seen, 1_000, [2, 0])
    key, value = text.context(0)
    captured = to_tensor(seen.keys[2]).numpy(), to_tensor(seen.values[2]).numpy()
    assert key.shape[2] == text.tokens == 4 + 4 * len(text.source) + 64
    for block in (0, 17, len(text.source) - 1):
        at, origin = 4 + 4 * block, 4 + 4 * int(text.source[block])
        for long, short in zip((key, value), captured, strict=True):
            assert np.array_equal(long[0, :, at : at + 4].numpy(), short[:, origin : origin + 4])
    assert np.array_equal(key[0, :, -64:].numpy(), captured[0][:, PROMPT - 64 : PROMPT])
    token = text.step(5)[0]
    assert np.array_equal(token.key[0, :, 0].numpy(), captured[0][:, PROMPT + 5])


def test_scores_are_those_of_attention_over_the_long_context(seen: Capture) -> None:
    source = resampled_blocks(seen, 900, 0)
    found = true_scores(seen, 1, source)
    for step in (0, 11):
        np.testing.assert_allclose(
            found[:, step], masses(seen, 1, step, source), rtol=2e-4, atol=1e-7
        )


def test_reloads_are_those_of_a_window_kept_by_hand(seen: Capture) -> None:
    source = resampled_blocks(seen, 700, 0)
    found = reloads(seen, source, [0])[1 / 16]
    best = round(700 // 4 * 4 / 16 / 4)
    for window, reload in zip((1, 2, 3), found, strict=True):
        missed = selected = 0
        for head in range(2):
            kept: dict[int, float] = {}
            for step in range(STEPS):
                scores = true_scores(seen, 0, source)[head, step]
                top = np.argsort(-scores, kind="stable")[:best]
                if step >= FIRST_STEP:
                    missed += sum(int(block) not in kept for block in top)
                    selected += best
                kept |= {int(b): step + (best - 1 - rank) / best for rank, b in enumerate(top)}
                kept = dict(sorted(kept.items(), key=lambda item: -item[1])[: window * best])
        assert reload == pytest.approx(missed / selected, abs=0.03)


# Placement


def test_critical_blocks_are_the_best_by_true_attention(seen: Capture) -> None:
    used = placement.critical(seen)
    best, plain = round(PROMPT / 32 / 4), np.arange((PROMPT - 68) // 4)
    expected = np.zeros_like(used[1])
    for step in range(placement.STEPS):
        for head, scores in enumerate(masses(seen, 1, step, plain)):
            expected[head, np.argsort(-scores)[:best]] += 1
    assert used.sum() == used.shape[0] * used.shape[1] * best * placement.STEPS
    assert np.abs(used[1] - expected).sum() <= 4


def test_more_room_covers_more(seen: Capture) -> None:
    data = as_json(placement.measure(quiet, [seen, seen]))
    tops = [each["values"] for each in data["measures"].values()]
    for name in placement.PLACEMENTS:
        assert tops[0][name][0] <= tops[1][name][0] <= tops[2][name][0] <= 1
        assert len(tops[0][name]) == 2


# Layout


def test_amounts_are_those_counted_one_by_one(tmp_path: Path) -> None:
    trace = drifting(3, steps=24, blocks=90, per_unit=3).with_budget("40")
    found = layout.amounts(trace)
    orders = layout.slots_of(trace)
    for what, steps in (("selected", layout.selected(trace)), ("missed", layout.missed(trace))):
        pages = dict.fromkeys(orders, 0)
        wanted = 0
        for rows, ids in list(steps)[layout.FIRST :]:
            wanted += len(ids)
            for name, slots in orders.items():
                pages[name] += len({int(slots[r, b]) // 4 for r, b in zip(rows, ids, strict=True)})
        for name, count in pages.items():
            ratio = found[f"bytes read / wanted, {what}, 4 KiB"][name]
            assert ratio == pytest.approx(4 * count / wanted)
    for slots in orders.values():
        assert len(np.unique(slots)) == slots.size


def test_packed_clusters_stand_side_by_side() -> None:
    trace = drifting(1, steps=20, blocks=60, per_unit=4)
    slots, first = layout.slots_of(trace)["packed"], int(trace.blocks[0].min())
    for row in range(trace.segments):
        units = trace.unit_of[row, np.argsort(slots[row, :first])]
        assert (np.diff(units) != 0).sum() == len(np.unique(units)) - 1


def test_missed_is_what_a_window_lost() -> None:
    trace = drifting(2, steps=24, blocks=60, budget=5)
    windows: list[list[tuple[int, int]]] = [[] for _ in range(trace.segments)]
    for step, ((rows, ids), (lost, blocks)) in enumerate(
        zip(layout.selected(trace), layout.missed(trace), strict=True)
    ):
        pairs = list(zip(rows.tolist(), ids.tolist(), strict=True))
        kept = [{block for _, block in window} for window in windows]
        expected = {(row, block) for row, block in pairs if block not in kept[row]}
        assert set(zip(lost.tolist(), blocks.tolist(), strict=True)) == expected
        for row, window in enumerate(windows):
            mine = {block for at, block in pairs if at == row}
            window[:] = [each for each in window if each[1] not in mine]
            window += [(step, block) for block in mine]
            window[:] = sorted(window)[-10:]


def test_traces_run_through_the_command(tmp_path: Path) -> None:
    drifting(0, steps=20, per_unit=2).save(tmp_path / "kvdrive-a.trace")
    data = as_json(layout.run(quiet, traces=str(tmp_path)))
    assert set(data["configurations"]) == {"time", "packed"}
    with pytest.raises(ConfigError, match="pass --traces"):
        layout.run(quiet)


# The ladder


def test_the_ladder_is_climbed(
    seen: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "BUDGET", 100)
    monkeypatch.setattr(ladder, "PROBE", 3)
    monkeypatch.setattr(ladder, "DRAM_SHARE", 0.5)
    found = ladder.measure(quiet, [seen], tokens=2_000, layers=2, repeat=4, disk=str(tmp_path))
    data = as_json(found)
    fetch = data["measures"]["fetch"]["values"]
    assert set(fetch) == {*ladder.RUNGS, "memory"}
    assert all(len(values) == 4 and min(values) >= 0 for values in fetch.values())
    levels = data["details"]["levels"]
    assert all(level["page cache before"] == 0 for level in levels.values())
    kv = 2 * 2_000 * 2 * 2 * 16 * 2
    whole = levels["a"]["tiers"][2]["bytes_read"]
    assert whole > 3 * levels["b"]["tiers"][2]["bytes_read"]
    assert whole > kv
    assert not list(tmp_path.iterdir())
    assert "Largest difference to the captured text" in found.notes[1]
