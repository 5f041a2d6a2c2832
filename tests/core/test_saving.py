"""Segments that are saved in one process's life and found in another's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import xxhash

from tierstore.errors import ConfigError
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.layout import BlockLayout
from tierstore.policies import LRU
from tierstore.prefix import PrefixCache
from tierstore.saving import load_segments, save_segments, segment_cache
from tierstore.store import BlockStore
from tierstore.tiers import DeviceTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierstore.interfaces import Bytes, Ids

LAYOUT = BlockLayout.kv(4, 16, torch.bfloat16)
GROUP = 6
PROMPT = list(range(500, 610))


def filled(blocks: int, seed: int = 0) -> tuple[BlockStore, Ids, Bytes]:
    """A store with a group of so many random blocks in each segment."""
    store = BlockStore(LAYOUT, [PinnedTier(LAYOUT, "4MiB")], [])
    segments = store.open(GROUP)
    shape = (GROUP, blocks, LAYOUT.block_bytes)
    content = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    if blocks:
        store.append(segments, content)
    return store, segments, content


def content_of(store: BlockStore, segments: Ids) -> Bytes:
    count = int(store.space.blocks[segments[0]])
    out = np.empty((GROUP, count, LAYOUT.block_bytes), np.uint8)
    store.read(segments, 0, count, out)
    return out


def opened(folder: Path) -> KeyedStore:
    return KeyedStore(folder / "kv", Identity(model="test"), disk="8MiB")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    with opened(tmp_path) as store:
        yield segment_cache(store, LAYOUT, GROUP, block_tokens=8)


def test_a_prompt_is_found_again_after_reopening(tmp_path: Path) -> None:
    """110 tokens are 27 blocks of 4; saved are the 13 whole pieces of 8 tokens."""
    store, segments, content = filled(27)
    with opened(tmp_path) as keyed:
        first = segment_cache(keyed, LAYOUT, GROUP, block_tokens=8)
        assert save_segments(first, PROMPT, store, segments) == 104
        keyed.sync()
    with opened(tmp_path) as keyed:
        other, empty, _ = filled(0)
        again = segment_cache(keyed, LAYOUT, GROUP, block_tokens=8)
        assert load_segments(again, PROMPT, other, empty) == 104
        assert np.array_equal(content_of(other, empty), content[:, :26])


def test_prompts_share_what_they_have_in_common(cache: PrefixCache) -> None:
    one, segments, content = filled(20)
    save_segments(cache, PROMPT[:80], one, segments)
    records = len(cache.store)
    other, others, theirs = filled(20, seed=1)
    theirs[:, :10] = content[:, :10]
    changed = [*PROMPT[:40], *range(40)]
    other.truncate(others, 0)
    other.append(others, theirs)
    assert save_segments(cache, changed, other, others) == 80
    assert len(cache.store) == records + 5, "the first five pieces are stored twice"
    found, empty, _ = filled(0)
    assert load_segments(cache, changed, found, empty) == 80
    assert np.array_equal(content_of(found, empty), theirs)


def test_what_is_saved_already_is_not_written_again(cache: PrefixCache) -> None:
    store, segments, _ = filled(20)
    save_segments(cache, PROMPT[:40], store, segments)
    written = cache.store.stats().records
    assert save_segments(cache, PROMPT[:80], store, segments) == 80
    assert cache.store.stats().records == written + 5
    assert cache.store.stats().dropped == {}


def test_a_prompt_nobody_saved_brings_nothing(cache: PrefixCache) -> None:
    store, segments, _ = filled(0)
    assert load_segments(cache, PROMPT, store, segments) == 0


def test_many_pieces_come_in_turns(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.saving._BYTES_AT_ONCE", 3 * cache.block_bytes)
    store, segments, content = filled(24)
    assert save_segments(cache, PROMPT[:96], store, segments) == 96
    other, empty, _ = filled(0)
    assert load_segments(cache, PROMPT, other, empty) == 96
    assert np.array_equal(content_of(other, empty), content)


def test_a_prompt_is_hashed_once_however_many_steps_it_takes(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.saving._BYTES_AT_ONCE", cache.block_bytes)
    hashed: list[bytes] = []

    def digest(data: bytes) -> bytes:
        hashed.append(data)
        return xxhash.xxh3_128_digest(data)

    monkeypatch.setattr("tierstore.chain.xxh3_128_digest", digest)
    store, segments, _ = filled(24)
    assert save_segments(cache, PROMPT[:96], store, segments) == 96
    assert len(hashed) == 12
    other, empty, _ = filled(0)
    assert load_segments(cache, PROMPT[:96], other, empty) == 96
    assert len(hashed) == 24


@pytest.mark.parametrize("stored", [0, 3, 7, 8, 21, 26])
def test_blocks_behind_those_of_the_store_are_saved_with_them(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    """Pieces of two blocks: the last blocks of a piece may stand in the tail, or all of it."""
    monkeypatch.setattr("tierstore.saving._BYTES_AT_ONCE", 3 * cache.block_bytes)
    _, _, content = filled(27)
    store, segments, _ = filled(0)
    store.append(segments, content[:, :stored])
    tail = content[:, stored:]
    assert save_segments(cache, PROMPT, store, segments, tail=tail) == 104
    other, empty, _ = filled(0)
    assert load_segments(cache, PROMPT, other, empty) == 104
    assert np.array_equal(content_of(other, empty), content[:, :26])


def test_blocks_get_the_homes_that_they_are_given(cache: PrefixCache) -> None:
    store, segments, _ = filled(20)
    save_segments(cache, PROMPT[:80], store, segments)
    tiers = [DeviceTier(LAYOUT, "64KiB"), PinnedTier(LAYOUT, "1MiB"), PinnedTier(LAYOUT, "1MiB")]
    other = BlockStore(LAYOUT, tiers, [LRU(), LRU()])
    empty = other.open(GROUP)
    other.resize(0, 60)
    other.resize(1, 60)
    other.set_quota(empty, np.full(GROUP, 10, np.int64))
    homes = np.random.default_rng(3).integers(0, 3, (GROUP, 11), np.uint8)
    assert load_segments(cache, PROMPT[:80], other, empty, homes=homes) == 80
    behind = np.full((GROUP, 9), 2, np.uint8)
    assert np.array_equal(other.levels(empty, 20), np.hstack([homes, behind]))
    other.validate()


def test_values_are_whole_pages_and_whole_blocks(cache: PrefixCache) -> None:
    for tokens in (4, 8, 64, 1000):
        wide = segment_cache(cache.store, LAYOUT, GROUP, block_tokens=tokens)
        assert wide.value_bytes % 4096 == 0
        assert wide.value_bytes % LAYOUT.block_bytes == 0
        assert wide.block_bytes >= GROUP * tokens // 4 * LAYOUT.block_bytes


@pytest.mark.parametrize(("segments", "block_tokens"), [(0, 8), (GROUP, 6), (GROUP, 0)])
def test_sizes_that_do_not_fit_are_refused(
    cache: PrefixCache, segments: int, block_tokens: int
) -> None:
    with pytest.raises(ConfigError, match="multiple of the layout's 4 tokens"):
        segment_cache(cache.store, LAYOUT, segments, block_tokens=block_tokens)


def test_a_cache_of_other_sizes_and_segments_in_use_are_refused(cache: PrefixCache) -> None:
    store, segments, _ = filled(2)
    with pytest.raises(ConfigError, match="expected empty ones"):
        load_segments(cache, PROMPT, store, segments)
    with pytest.raises(ConfigError, match="make it with segment_cache"):
        save_segments(
            PrefixCache(cache.store, block_tokens=8, block_bytes=64), PROMPT, store, segments
        )


def test_groups_of_other_numbers_of_segments_are_others(cache: PrefixCache) -> None:
    """Two and six segments of two blocks are padded to the same size."""
    two = segment_cache(cache.store, LAYOUT, 2, block_tokens=8)
    assert two.block_bytes == cache.block_bytes
    store, segments, _ = filled(20)
    assert save_segments(two, PROMPT[:80], store, segments[:2]) == 80
    other, empty, _ = filled(0)
    assert load_segments(cache, PROMPT[:80], other, empty) == 0
    assert load_segments(two, PROMPT[:80], other, empty[:2]) == 80
