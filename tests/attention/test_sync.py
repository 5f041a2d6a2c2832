"""The four ways from disk give the same attention; what each of them does besides."""

from __future__ import annotations

import mmap
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stories import SCALE, Story, check_step, prefilled, small

from tierstore.adapters.attention import SparseAttention, chain
from tierstore.adapters.attention.sync import SYNC_LEVELS, mapped, share_out
from tierstore.adapters.attention.whole_layers import bring_layer
from tierstore.adapters.presets import PRESETS
from tierstore.errors import ConfigError
from tierstore.layout import BlockLayout
from tierstore.memory import Memory
from tierstore.scratch import Scratch
from tierstore.sizes import parse_size
from tierstore.staging import Staging
from tierstore.tiers import PagedTier, PinnedTier, WriteBehindTier
from tierstore.tiers.memory import MemoryTier
from tierstore.tiers.paged import page_range

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierstore.interfaces import Ids
    from tierstore.kernels.element import Array

LIMITS = {"fast": "700KiB", "dram": "300KiB"}


def engine_at(
    level: str, story: Story, folder: Path, tokens: int = 500, **options: object
) -> SparseAttention:
    limits = {**LIMITS, "budget": 0.1, **options}
    preset = limits.pop("preset", "kvdrive")
    return prefilled(preset, story, tokens, disk=folder / level, sync=level, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["a", "b", "c", "d"])
def test_a_step_attends_to_exactly_what_is_reported(level: str, tmp_path: Path) -> None:
    story = Story(small(), sequences=2)
    engine = engine_at(level, story, tmp_path)
    for _ in range(40):
        check_step(engine, story, 2e-5)
    engine.store.validate()
    report = engine.report()
    assert report.tiers[2].hits > 0, "nothing came from disk: the limits are too wide"
    engine.close()


@pytest.mark.parametrize("residents", [False, True], ids=["selected", "residents"])
def test_every_level_gives_the_same_attention(residents: bool, tmp_path: Path) -> None:
    rules = replace(PRESETS["kvdrive"], attends_residents=residents)
    outputs = []
    for level in "abcd":
        story = Story(small(), sequences=1)
        engine = engine_at(level, story, tmp_path, preset=rules)
        steps = []
        for _ in range(36):
            layers = range(story.geometry.layers)
            steps += [engine.attend(i, *story.tell(i, 1), scale=SCALE) for i in layers]
        outputs.append(torch.stack(steps))
        engine.close()
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


def test_layers_are_read_whole_at_level_a_only(tmp_path: Path) -> None:
    read = {}
    for level in "ac":
        story = Story(small(), sequences=1)
        engine = engine_at(level, story, tmp_path)
        before = engine.store.metrics.tiers[2].bytes_read
        check_step(engine, story, 2e-5)
        read[level] = engine.store.metrics.tiers[2].bytes_read - before
        stored = int(engine.store.space.blocks.sum()) * engine.store.layout.block_bytes
        engine.close()
    assert read["a"] > 0.6 * stored > 3 * read["c"]


@pytest.mark.parametrize("level", ["a", "b", "c", "d"])
def test_sequences_may_differ_in_length(level: str, tmp_path: Path) -> None:
    geometry = small(layers=1)
    story = Story(geometry, sequences=2)
    engine = SparseAttention(
        geometry, budget=1.0, fast="700KiB", dram="300KiB", disk=tmp_path / "kv", sync=level
    )
    query, key, value = story.tell(0, 300)
    valid = torch.ones(2, 300, dtype=torch.bool)
    valid[0, :130] = False
    engine.attend(0, query, key, value, valid=valid, scale=SCALE)
    query, key, value = story.tell(0, 1)
    out = engine.attend(0, query, key, value, scale=SCALE)
    for row, first in ((0, 130), (2, 0)):
        expected = story.attention(0, row, query, list(range(first, 301)))
        found = out[row // 2, 0, :3].double().numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)
    engine.close()


def test_what_is_kept_is_on_disk_when_the_engine_is_closed(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = prefilled(
        "kvdrive", story, 300, dram="2MiB", disk=tmp_path / "kv", keep=True, budget=0.1
    )
    segment = np.zeros(1, np.int32)
    count = int(engine.store.space.blocks[0])
    out = np.zeros((1, count, engine.store.layout.block_bytes), np.uint8)
    engine.store.read(segment, 0, count, out)
    engine.close()
    (file,) = (tmp_path / "kv").glob("*/blocks")
    stored = np.fromfile(file, np.uint8)
    size = engine.layout.block_bytes
    on_disk = {row.tobytes() for row in stored[: len(stored) // size * size].reshape(-1, size)}
    assert {block.tobytes() for block in out[0]} <= on_disk


def test_dram_is_one_limit_for_slots_tables_and_pages(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = engine_at("d", story, tmp_path)
    memory, disk = engine.store.tiers[1].memory, mapped(engine.store)
    assert memory is not None
    assert disk is not None
    assert engine.store.tiers[1].capacity > 0
    for _ in range(2):  # work space of the first counts from the second on
        check_step(engine, story, 2e-5)
    assert memory.used_bytes + disk.cache_bytes <= memory.limit_bytes
    assert disk.cache_bytes > 0
    engine.close()


def test_slots_and_pages_are_within_the_limit_at_every_moment(tmp_path: Path) -> None:
    """Seen from where DRAM is taken, and from the pages that the system has."""
    story = Story(small(), sequences=1)
    engine = engine_at("d", story, tmp_path, 1500, dram="600KiB", preset=no_warm_up())
    memory, disk = engine.store.tiers[1].memory, mapped(engine.store)
    assert memory is not None
    assert disk is not None
    watched = []

    def pages() -> int:
        return max(disk.cache_bytes, disk.cached_bytes())

    def watch(take: Callable[..., Array]) -> Callable[..., Array]:
        def taking(*arguments: object) -> Array:
            taken = take(*arguments)
            watched.append(memory.used_bytes + taken.nbytes + pages())
            return taken

        return taking

    def resize(nbytes: int) -> None:
        watched.append(memory.used_bytes - memory.slot_bytes + nbytes + pages())

    memory._allocate = watch(memory._allocate)
    slots = memory._slots
    memory._slots = SimpleNamespace(array=slots.array, resize=resize)
    slots.resize(memory.limit_bytes)
    for _ in range(40):
        check_step(engine, story, 2e-5)
        assert disk.cached_bytes() <= disk.cache_bytes
        assert memory.used_bytes + disk.cache_bytes == memory.limit_bytes
    assert len(watched) > 10
    assert max(watched) <= memory.limit_bytes
    engine.close()


def test_slots_come_as_they_fill_and_are_page_cache_until_then(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = engine_at("d", story, tmp_path, preset=no_warm_up())
    store, disk = engine.store, mapped(engine.store)
    assert disk is not None
    quota = int(store.quota(np.arange(4, dtype=np.int32), 1).sum())
    capacity, cache = [store.tiers[1].capacity], [disk.cache_bytes]
    for _ in range(40):
        check_step(engine, story, 2e-5)
        held = int((store.owners(1) >= 0).sum())
        capacity.append(store.tiers[1].capacity)
        cache.append(disk.cache_bytes)
        assert held <= capacity[-1] <= min(quota, held + quota // 8)
    assert capacity[0] == 0
    assert capacity[-1] > 0.9 * quota
    assert cache[0] - cache[-1] >= capacity[-1] * store.layout.block_bytes
    store.validate()
    engine.close()


def test_pages_and_slots_go_to_a_gpu_through_the_same_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the tiers are put together before a GPU, for which memory and a mock stand."""

    def device_tier(layout: BlockLayout, fast: str, device: torch.device) -> MemoryTier:
        assert device.type == "cuda"
        return MemoryTier(layout, Memory(parse_size(fast, "fast"), "fast"), "fast")

    copies = Mock()
    monkeypatch.setattr(chain, "CudaCopies", copies)
    monkeypatch.setattr(chain, "DeviceTier", device_tier)
    sizes = chain.TierSizes("1MiB", "8MiB", tmp_path, None, False, SYNC_LEVELS["c"])
    device = torch.device("cuda")
    stack = chain.TierStack.of_sizes(sizes, BlockLayout.kv(16, 8, torch.float32), device)
    copies.assert_called_once_with(device)
    _, host, behind = stack.tiers
    assert isinstance(host, MemoryTier)
    assert not isinstance(host, PinnedTier), "its pages are in the page cache's part, too"
    assert isinstance(behind, WriteBehindTier)
    assert isinstance(behind.tier, PagedTier)
    assert isinstance(host.staging, Staging)
    assert host.staging is behind.tier.staging
    lock, unlock = copies.return_value.lock, copies.return_value.unlock
    for end in (stack.clear, stack.close):
        behind.resize(4)
        assert host.memory.by_purpose()["staging"] >= 4 << 20
        assert lock.call_count == unlock.call_count + 1
        end()
        assert "staging" not in host.memory.by_purpose()
        assert lock.call_count == unlock.call_count


@pytest.mark.parametrize("level", ["a", "c", "d"])
def test_slots_beside_a_page_cache_are_never_page_locked(level: str, tmp_path: Path) -> None:
    sizes = chain.TierSizes("1MiB", "8MiB", tmp_path, None, False, SYNC_LEVELS[level])
    layout = BlockLayout.kv(16, 8, torch.float32)
    stack = chain.TierStack.of_sizes(sizes, layout, torch.device("cpu"))
    assert not isinstance(stack.tiers[1], PinnedTier)
    stack.close()


def test_heads_that_stall_more_get_more_slots(tmp_path: Path) -> None:
    stalls = np.array([[8.0, 1.0], [1.0, 2.0]])
    story = Story(small(), sequences=1)
    engine = engine_at("d", story, tmp_path, dram="200KiB", stalls=stalls)
    segments = np.arange(4, dtype=np.int32)
    quota = engine.store.quota(segments, 1)
    assert quota.sum() * engine.layout.block_bytes <= 0.75 * (200 << 10)
    assert engine.store.tiers[1].capacity <= quota.sum() <= engine.store.limit(1)
    assert quota[0] > quota[3] > quota[1]
    assert abs(int(quota[1]) - int(quota[2])) <= 1
    for _ in range(34):
        check_step(engine, story, 2e-5)
    engine.store.validate()
    engine.close()


def test_slots_are_shared_out_fairly_between_sequences(tmp_path: Path) -> None:
    """Heads of the short one that never stall get what it has left over, not the long one."""
    story = Story(small(), sequences=2)
    stalls = np.array([[50.0, 1.0], [1.0, 1.0]])
    engine = SparseAttention(
        story.geometry, budget=0.1, fast="2MiB", dram="300KiB", disk=tmp_path, sync="d",
        stalls=stalls,
    )  # fmt: skip
    lengths = {0: 1000, 1: 360}
    for sequence, length in lengths.items():
        assert engine.add_sequence(length + 20) == sequence
        for layer in range(2):
            query, key, value = (each[:1] for each in story.tell(layer, length))
            engine.attend(layer, query, key, value, sequences=[sequence], scale=SCALE)
    batch = engine._running.batch
    assert batch is not None
    quota = [int(engine.store.quota(batch.segments_of(sequence), 1).sum()) for sequence in (0, 1)]
    wanted = 4 * (360 // 4 + 1)
    assert quota[1] == min(wanted, sum(quota) // 2)
    assert quota[0] > 0
    engine.store.validate()
    engine.close()


@pytest.mark.parametrize("is_alone", [False, True])
def test_slots_that_a_long_sequence_leaves_become_page_cache(
    is_alone: bool, tmp_path: Path
) -> None:
    story = Story(small(), sequences=1)
    engine = SparseAttention(
        story.geometry, budget=0.1, fast="1MiB", dram="300KiB", disk=tmp_path, sync="d"
    )

    def live(prompt: int) -> int:
        number = engine.add_sequence(prompt + 40)
        for tokens in (prompt, *[1] * 40):
            for layer in range(2):
                told = story.tell(layer, tokens)
                engine.attend(layer, *told, sequences=[number], scale=SCALE)
        return number

    if not is_alone:
        long = live(1000)
        store = engine.store
        before = store.tiers[1].capacity
        engine.finish(long)
    live(200)
    store, disk = engine.store, mapped(engine.store)
    batch, memory = engine._running.batch, store.tiers[1].memory
    assert batch is not None
    assert disk is not None
    assert memory is not None
    quota = int(store.quota(batch.segments_of(0), 1).sum())
    assert is_alone or quota < before
    assert store.tiers[1].capacity <= quota
    others = memory.used_bytes - memory.slot_bytes
    room = memory.limit_bytes - others - quota * store.layout.block_bytes
    assert disk.cache_bytes >= room
    store.validate()
    engine.close()


def test_stalls_are_counted_for_the_head_whose_blocks_were_on_disk(tmp_path: Path) -> None:
    story = Story(small(), sequences=2)
    engine = engine_at("c", story, tmp_path, dram="250KiB", preset=no_warm_up())
    disk = mapped(engine.store)
    assert disk is not None
    disk.drop_cache()
    before = engine.stalls()
    for _ in range(3):
        check_step(engine, story, 2e-5)
    stalls = engine.stalls() - before
    assert stalls.shape == (2, 2)
    assert (stalls > 0).all()
    assert stalls.sum() <= 2 * disk.asked.sum() * disk.layout.block_bytes
    engine.close()


def test_the_disk_begins_before_room_is_made(tmp_path: Path) -> None:
    """At level (c) the pages that a step lacks are asked for while the fast tier still has what
    they will replace."""
    story = Story(small(), sequences=1)
    engine = engine_at("c", story, tmp_path, dram="250KiB", preset=no_warm_up(), window=1.0)
    check_step(engine, story, 2e-5)
    engine.store.tiers[2].sync()
    disk = mapped(engine.store)
    assert disk is not None
    evictions = engine.store.metrics.tiers[0]
    asked: list[tuple[int, int]] = []

    def expect(slots: Ids) -> None:
        asked.append((len(slots), evictions.evictions))
        PagedTier.expect(disk, slots)

    disk.expect = expect  # type: ignore[method-assign]
    for _ in range(5):
        before, read = evictions.evictions, engine.store.metrics.tiers[2].hits
        check_step(engine, story, 2e-5)
        assert sum(blocks for blocks, _ in asked) == engine.store.metrics.tiers[2].hits - read
        assert asked[0][1] == before < evictions.evictions
        asked.clear()
    engine.close()


def test_a_layer_larger_than_the_page_cache_is_read_once(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = engine_at("a", story, tmp_path, tokens=3000, dram="600KiB")
    engine.store.tiers[2].sync()
    disk = mapped(engine.store)
    assert disk is not None
    disk.drop_cache()
    batch = engine._running.batch
    assert batch is not None
    segments = batch.layers[0].segments
    owners = engine.store.owners(2)
    slots = np.flatnonzero(np.isin(owners, segments)).astype(np.int32)
    first, last = page_range(slots, disk.layout.block_bytes)
    pages = np.unique(np.concatenate([first, last]))
    assert len(pages) * mmap.PAGESIZE > disk.cache_bytes
    before = disk.asked.sum()
    bring_layer(engine.store, segments, Scratch(engine.store.memory))
    assert disk.asked.sum() - before == len(pages)
    engine.close()


def no_warm_up() -> object:
    return replace(PRESETS["kvdrive"], ranking="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "e"}, "sync='e': expected one of 'a'"),
        ({"sync": "b", "fast": None}, "expected fast=, dram= and disk="),
        ({"sync": "b", "dram": None}, "expected fast=, dram= and disk="),
        ({"sync": "c", "disk_codec": "int8"}, "no disk_codec="),
        ({"stalls": np.ones((2, 2))}, "stalls=: expected sync='d'"),
        ({"sync": "d", "stalls": np.ones((2, 3))}, r"stalls of shape \(2, 3\)"),
        ({"sync": "d", "stalls": -np.ones((2, 2))}, "expected numbers >= 0"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    arguments = {**LIMITS, "disk": tmp_path / "kv", **options}
    with pytest.raises(ConfigError, match=message):
        SparseAttention(small(), **arguments)  # type: ignore[arg-type]


def test_only_counted_pages_tell_of_stalls(tmp_path: Path) -> None:
    story = Story(small(), sequences=1)
    engine = engine_at("b", story, tmp_path)
    with pytest.raises(ConfigError, match="nothing counts pages here"):
        engine.stalls()
    engine.close()


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 60)), min_size=1, max_size=12),
)
def test_shares_add_up_and_follow_the_weights(total: int, rows: list[tuple[float, int]]) -> None:
    weights = np.array([weight for weight, _ in rows])
    most = np.array([each for _, each in rows], np.int64)
    shares = share_out(total, weights, most)
    assert shares.sum() == min(total, most.sum())
    assert (shares >= 0).all()
    assert (shares <= most).all()
    for i in range(len(rows)):
        for j in range(len(rows)):
            if weights[i] > weights[j] and shares[i] < most[i]:
                assert shares[i] >= shares[j] - 1
