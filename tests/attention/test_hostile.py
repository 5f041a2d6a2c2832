"""Inputs and plug-ins that once corrupted memory, hid an error or wasted a limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.attention.capacity import fit_top_tier
from tierstore.adapters.presets import Preset
from tierstore.errors import ConfigError, PolicyError
from tierstore.indexers import ExactIndex
from tierstore.layout import BlockLayout
from tierstore.policies import LRU
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, PinnedTier

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Ids, Selection
    from tierstore.kernels.element import Array

GEOMETRY = Geometry(1, 4, 2, 16, torch.float32, torch.device("cpu"))


def tensors(tokens: int, sequences: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(sequences, heads, tokens, 16) for heads in (4, 2, 2))


def prefilled(tokens: int = 300, /, **options: object) -> SparseAttention:
    engine = SparseAttention(GEOMETRY, **options)  # type: ignore[arg-type]
    engine.attend(0, *tensors(tokens), scale=0.25)
    return engine


@pytest.mark.parametrize(("queries", "keys"), [(1, 400), (1, 3), (5, 1)])
def test_queries_and_keys_of_different_lengths_are_refused(queries: int, keys: int) -> None:
    engine = prefilled(dram="8MiB")
    query, (_, key, value) = tensors(queries)[0], tensors(keys)
    with pytest.raises(ConfigError, match="expected the same sequences and tokens in both"):
        engine.attend(0, query, key, value, scale=0.25)
    engine.attend(0, *tensors(1), scale=0.25)


@pytest.mark.parametrize(
    "valid", [torch.tensor([[1, 2, 1, 1]]), torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 4)]
)
def test_valid_must_be_one_flag_for_each_token(valid: torch.Tensor) -> None:
    engine = prefilled(dram="8MiB")
    with pytest.raises(ConfigError, match="expected bool"):
        engine.attend(0, *tensors(4), valid=valid, scale=0.25)


def test_the_scale_stays_the_same() -> None:
    engine = prefilled(dram="8MiB")
    with pytest.raises(ConfigError, match=r"scale=2\.0: expected 0\.25"):
        engine.attend(0, *tensors(1), scale=2.0)


class Wrong(ExactIndex):
    """Answers as `ExactIndex` does, and then spoils the answer."""

    spoil = ""

    def select(self, query: Array, budgets: Ids, beside: Array | None = None) -> Selection:
        selection = super().select(query, budgets, beside)
        ids, row_ptr = selection.ids, selection.row_ptr
        match self.spoil:
            case "far":
                ids[0] = 2_000_000_000
            case "negative":
                ids[-1] = -1
            case "one beyond":
                ids[0] = int(self.blocks[0])
            case "twice":
                ids[1] = ids[0]
            case "falling":
                row_ptr[1] = row_ptr[2] + 1
            case "too long":
                row_ptr[-1] += 100
            case "too short":
                selection.row_ptr = row_ptr[:-1]
        return selection


@pytest.mark.parametrize("stack", [{"dram": "8MiB"}, {"fast": "1MiB", "dram": "8MiB"}])
@pytest.mark.parametrize(
    "spoil", ["far", "negative", "one beyond", "twice", "falling", "too long", "too short"]
)
def test_an_index_that_answers_nonsense_is_caught(spoil: str, stack: dict[str, str]) -> None:
    kind = type("Spoilt", (Wrong,), {"spoil": spoil})
    engine = prefilled(preset=Preset("wrong", kind, LRU, budget=0.3), **stack)
    with pytest.raises(PolicyError, match="of a selection: expected"):
        engine.attend(0, *tensors(1), scale=0.25)
    engine.store.validate()
    engine.reset()
    engine.close()


@pytest.mark.parametrize(
    "wanted", [[1000, 1000, 3, 3, 3, 3, 3, 3], [5] * 8, [1] * 8, [0] * 7 + [9]]
)
@pytest.mark.parametrize("slots", [8, 9, 10, 27, 100])
def test_every_segment_gets_a_share(wanted: list[int], slots: int) -> None:
    layout = BlockLayout.kv(4, 16, torch.float32)
    fast = DeviceTier(layout, slots * layout.block_bytes)
    store = BlockStore(layout, [fast, PinnedTier(layout, "4MiB")], [LRU()])
    segments = store.open(len(wanted))
    fit_top_tier(store, segments, np.array(wanted, np.int64), 0)
    quota = store._moves.residency[0].quota[segments]
    assert (quota >= 1).all()
    assert (quota <= np.maximum(wanted, 1)).all()
    assert quota.sum() <= fast.capacity <= slots


@pytest.mark.parametrize("budget", [16_384, 2**31 - 1])
def test_a_budget_beyond_the_context_takes_no_more_room_than_the_context(budget: int) -> None:
    engine = prefilled(600, budget=budget, fast="200KiB", dram="8MiB")
    engine.attend(0, *tensors(1), scale=0.25)
    used = engine.report().tiers[0].used_for["work space"]
    assert used < 4 * 4 * 1_000 * 4
    engine.close()


@pytest.mark.parametrize("where", ["query", "new key", "old key", "value"])
def test_a_nan_is_seen_in_the_output(where: str) -> None:
    query, key, value = tensors(300)
    if where == "old key":
        key[0, 1, 150, 3] = torch.nan
    engine = SparseAttention(GEOMETRY, budget=1.0, dram="8MiB", preset="full")
    engine.attend(0, query, key, value, scale=0.25)
    query, key, value = tensors(1)
    if where == "query":
        query[0, 3, 0, 0] = torch.nan
    if where == "new key":
        key[0, 1, 0, 5] = torch.nan
    if where == "value":
        value[0, 1, 0, :] = torch.nan
    out = engine.attend(0, query, key, value, scale=0.25)
    assert out[0, 0, 3].isnan().any()
    assert not out[0, 0, :2].isnan().any(), "only the KV head with the NaN is touched"


def test_cropping_what_was_appended_leaves_the_index_as_large_as_before() -> None:
    engine = prefilled(300, budget=0.2, dram="8MiB")
    engine.attend(0, *tensors(36), scale=0.25)
    engine.crop(36)
    before = engine.report().index_bytes
    for _ in range(50):
        engine.attend(0, *tensors(36), scale=0.25)
        engine.crop(36)
    assert engine.report().index_bytes == before


def test_an_engine_that_is_dropped_gives_its_files_back(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(5):
        prefilled(dram="1MiB", disk=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_relative_disk_is_found_again_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = prefilled(dram="1MiB", disk="kv")
    monkeypatch.chdir(tmp_path / "there")
    (tmp_path / "there" / "kv").mkdir()
    engine.close()
    assert not (tmp_path / "kv").exists()
    assert (tmp_path / "there" / "kv").exists()


def test_no_new_tokens_change_nothing() -> None:
    engine = prefilled(dram="8MiB")
    out = engine.attend(0, *tensors(0), scale=0.25)
    assert out.shape == (1, 0, 4, 16)
    assert engine.report().context_tokens == 300
