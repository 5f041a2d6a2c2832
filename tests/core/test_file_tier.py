"""The tier of checksummed extents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.codecs import CODEC_NAMES, make_codec
from tierstore.errors import CapacityError, ConfigError, CorruptBlockError
from tierstore.interfaces import Selection
from tierstore.layout import BlockLayout
from tierstore.policies.lru import LRU
from tierstore.store import BlockStore
from tierstore.testing import TierTests
from tierstore.tiers import FileTier, PinnedTier, file

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Ids, Tier

LAYOUT = BlockLayout.kv(8, 64, torch.bfloat16)


class TestFileTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> Tier:
        return FileTier(layout, folder / "tier", limit_bytes, extent_bytes=4096)


def make(folder: Path, **options: object) -> FileTier:
    return FileTier(LAYOUT, folder / "tier", "8MiB", **options)  # type: ignore[arg-type]


def blocks(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    parts = {part.name: torch.randn(n, *part.shape, generator=generator) for part in LAYOUT.parts}
    return LAYOUT.pack({name: values.to(torch.bfloat16) for name, values in parts.items()})


def everything(n: int) -> Ids:
    return np.arange(n, dtype=np.int32)


def read(tier: Tier, n: int) -> torch.Tensor:
    out = np.zeros((n, LAYOUT.block_bytes), np.uint8)
    tier.read(everything(n), out, everything(n)).wait()
    return torch.from_numpy(out)


@pytest.mark.parametrize("n", [64, 77], ids=["whole extents", "a ragged tail"])
def test_what_was_synced_is_there_again(tmp_path: Path, n: int) -> None:
    stored, tier = blocks(n), make(tmp_path)
    tier.resize(n)
    tier.write(everything(n), stored.numpy(), everything(n)).wait()
    tier.sync()
    tier.close()
    again = make(tmp_path)
    again.resize(n)
    assert torch.equal(read(again, n), stored)
    again.close()


@pytest.mark.parametrize("codec", [None, "shuffle+zstd"])
def test_reads_of_many_rounds_bring_any_slots_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    monkeypatch.setattr(file, "_MOST_AT_ONCE", 3)
    n, stored, random = 90, blocks(90).numpy().copy(), np.random.default_rng(0)
    code = None if codec is None else make_codec(codec, LAYOUT)
    tier = make(tmp_path, extent_bytes=4096, codec=code)
    tier.resize(n)
    tier.write(everything(n), stored, everything(n)).wait()
    tier.sync()
    changed = np.array([4, 31, 32], np.int32)
    stored[changed] = blocks(n, seed=1).numpy()[changed]
    tier.write(changed, stored, changed).wait()

    slots = random.integers(0, n, 200).astype(np.int32)
    rows = random.permutation(200).astype(np.int32)
    out = np.zeros((200, LAYOUT.block_bytes), np.uint8)
    tier.read(slots, out, rows).wait()

    np.testing.assert_array_equal(out[rows], stored[slots])
    tier.close()


def test_damage_in_a_later_round_is_told_and_leaves_the_buffers_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_MOST_AT_ONCE", 3)
    n, stored = 40, blocks(40).numpy()
    tier = make(tmp_path, extent_bytes=4096)
    tier.resize(n)
    tier.write(everything(n), stored, everything(n)).wait()
    tier.sync()
    tier.close()
    content = stored[25, 100:140].tobytes()
    for path in tmp_path.rglob("*.seg"):
        path.write_bytes(path.read_bytes().replace(content, bytes(40)))
    again = make(tmp_path, extent_bytes=4096)
    again.resize(n)
    with pytest.raises(CorruptBlockError):
        read(again, n)
    assert again._staging.free == 3
    assert torch.equal(read(again, 24), torch.from_numpy(stored[:24]))
    again.close()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_blocks_come_back_coded(tmp_path: Path, codec: str) -> None:
    """An extent's keys share a scale: what was written in parts must be coded once, as a whole."""
    n, stored = 100, blocks(100)
    tier = make(tmp_path, codec=make_codec(codec, LAYOUT))
    tier.resize(n)
    for start in range(0, n, 10):
        rows = everything(n)[start : start + 10]
        tier.write(rows, stored.numpy(), rows).wait()
    tier.sync()
    found = LAYOUT.unpack(read(tier, n))
    error = {"raw": 0, "shuffle+zstd": 0, "int8": 0.05, "fp8": 0.3, "k8v4": 0.4, "int4": 0.6}[codec]
    for name, values in LAYOUT.unpack(stored).items():
        assert (found[name].float() - values.float()).abs().max() <= error
    assert codec in tier.medium
    tier.close()


def test_a_damaged_extent_is_an_error_and_not_a_block(tmp_path: Path) -> None:
    tier = make(tmp_path)
    tier.resize(64)
    tier.write(everything(64), blocks(64).numpy(), everything(64)).wait()
    tier.close()
    content = blocks(64).numpy()[40, 100:140].tobytes()
    for path in tmp_path.rglob("*.seg"):
        path.write_bytes(path.read_bytes().replace(content, bytes(40)))
    again = make(tmp_path)
    again.resize(64)
    assert torch.equal(read(again, 32), blocks(64)[:32])
    for _ in range(2):
        with pytest.raises(CorruptBlockError):
            read(again, 64)
    again.close()


def test_a_store_works_over_it(tmp_path: Path) -> None:
    """More blocks than the top tier holds: most come from disk."""
    top, tier = PinnedTier(LAYOUT, "128KiB"), make(tmp_path, extent_bytes=8192)
    store = BlockStore(LAYOUT, [top, tier], [LRU()])
    segments, stored = store.open(3), blocks(3 * 50)
    store.resize(0, 24)
    store.set_quota(segments, np.full(3, 8, np.int64))
    store.append(segments, stored.numpy().reshape(3, 50, LAYOUT.block_bytes))
    ids = np.array([[3, 9, 44], [0, 1, 2], [49, 20, 7]], np.int32)
    chosen = Selection(np.array([0, 3, 6, 9], np.int64), ids.reshape(-1), np.zeros(9, np.float32))
    (visit,) = store.visit(chosen, segments)
    expected = stored.reshape(3, 50, -1).numpy()[np.arange(3)[:, None], ids].reshape(9, -1)
    assert np.array_equal(top.view[visit.slots], expected)
    store.close()


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tier = make(tmp_path)
    with pytest.raises(CapacityError, match="raise the limit"):
        tier.resize(tier.limit + 1)
    assert tier.used_bytes == 0
    tier.close()


def test_fewer_slots_keep_their_blocks_wherever_these_are(tmp_path: Path) -> None:
    """Written in turns from both ends, what stays is in as many files as what goes."""
    n, tier = 120, make(tmp_path, extent_bytes=4096)
    stored, extents = blocks(n), everything(n).reshape(-1, 2)
    tier.resize(n)
    for low, high in zip(extents[:30], extents[:29:-1], strict=True):
        rows = np.concatenate([low, high])
        tier.write(rows, stored.numpy(), rows).wait()
    assert len(list(tmp_path.rglob("*.seg"))) == 2
    tier.resize(n // 2)
    assert tier.capacity == n // 2
    assert torch.equal(read(tier, n // 2), stored[: n // 2])
    tier.resize(n // 2 + 2)
    tier.resize(n)
    assert torch.equal(read(tier, n // 2), stored[: n // 2])
    tier.close()


def test_extents_are_whole_pages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        make(tmp_path, extent_bytes=1000)


def test_extents_that_cannot_be_coded_take_more_room(tmp_path: Path) -> None:
    """Infinities are stored as they are, which the room for quantised extents does not foresee."""
    n, stored = 32 * 60, blocks(32 * 60).numpy()
    stored[:, :2] = np.array([0x80, 0x7F], np.uint8)
    tier = make(tmp_path, codec=make_codec("int8", LAYOUT))
    tier.resize(n)
    tier.write(everything(n), stored, everything(n)).wait()
    assert np.array_equal(read(tier, n).numpy(), stored)
    tier.close()


def test_coded_blocks_take_less_room(tmp_path: Path) -> None:
    raw, coded = make(tmp_path / "a"), make(tmp_path / "b", codec=make_codec("k8v4", LAYOUT))
    assert coded.limit > 1.8 * raw.limit


def test_files_of_others_survive_the_end_of_a_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E7."""
    tier = make(tmp_path)
    tier.resize(64)
    (directory,) = (path for path in (tmp_path / "tier").iterdir())
    foreign = [directory / "notes.txt", directory / "segments" / "mine", directory / "a" / "b"]
    foreign[2].parent.mkdir()
    for path in foreign:
        path.write_text("mine")
    tier.resize(0)
    assert list(directory.rglob("*.seg")) == list(directory.rglob("data.mdb")) == []
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert repr(str(foreign[1])) in caplog.records[-1].message
    tier.resize(64)
    tier.write(everything(64), blocks(64).numpy(), everything(64)).wait()
    assert torch.equal(read(tier, 64), blocks(64))
    foreign[1].unlink()
    tier.resize(0)
    assert repr(str(foreign[0])) in caplog.records[-1].message
    assert sorted(path.name for path in directory.iterdir()) == ["a", "notes.txt"]
    tier.close()
