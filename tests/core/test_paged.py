"""A mapped file that keeps count of its pages in memory."""

from __future__ import annotations

import errno
import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.layout import BlockLayout
from tierstore.testing import TierTests
from tierstore.tiers import PagedTier
from tierstore.tiers.paged import page_range, runs

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.interfaces import Bytes, Ids

PAGE = os.sysconf("SC_PAGESIZE")
LAYOUT = BlockLayout.kv(4, 64, torch.bfloat16)
EACH = PAGE // LAYOUT.block_bytes
TABLE_BYTES = 9


class TestPagedTier(TierTests):
    def make_tier(self, layout: BlockLayout, limit_bytes: int, folder: Path) -> PagedTier:
        return PagedTier(layout, folder / "blocks", "8KiB", limit_bytes)


def numbered(n: int, first: int = 0) -> Ids:
    return np.arange(first, first + n, dtype=np.int32)


def stored(folder: Path, pages: int, cache_pages: int) -> tuple[PagedTier, Bytes]:
    """A tier with so many pages of blocks; skips where the system keeps pages all the same."""
    tier = PagedTier(LAYOUT, folder / "blocks", cache_pages * PAGE + TABLE_BYTES * pages)
    slots = numbered(pages * EACH)
    tier.resize(len(slots))
    blocks = np.random.default_rng(0).integers(0, 256, (len(slots), LAYOUT.block_bytes), np.uint8)
    tier.write(slots, blocks, slots).wait()
    tier.drop_cache()
    if tier.cached_bytes():
        pytest.skip("the file system of temporary files keeps pages in memory")
    return tier, blocks


def read(tier: PagedTier, slots: Ids) -> Bytes:
    out = np.zeros((len(slots), LAYOUT.block_bytes), np.uint8)
    tier.read(slots, out, numbered(len(slots))).wait()
    return out


def test_what_was_dropped_comes_back_from_disk(tmp_path: Path) -> None:
    tier, blocks = stored(tmp_path, 32, 4)
    order = np.random.default_rng(1).permutation(len(blocks)).astype(np.int32)
    assert np.array_equal(read(tier, order), blocks[order])
    tier.close()


def test_no_more_than_the_cache_stays_in_memory(tmp_path: Path) -> None:
    tier, _ = stored(tmp_path, 64, 8)
    for start in range(0, 64, 3):
        read(tier, numbered(EACH, start * EACH))
        assert tier.cached_bytes() <= 8 * PAGE
    assert tier.cached_bytes() > 0
    tier.close()


def test_the_pages_used_longest_ago_leave(tmp_path: Path) -> None:
    tier, _ = stored(tmp_path, 64, 8)
    for page in [*range(7), 0, 1, 40, 41, 42]:
        read(tier, numbered(1, page * EACH))
    tier.asked[:] = 0
    for page in (0, 1, 42, 2):
        read(tier, numbered(1, page * EACH))
    assert tier.asked.nonzero()[0].tolist() == [2]
    tier.close()


def test_a_wait_is_counted_where_the_disk_was_asked(tmp_path: Path) -> None:
    tier, _ = stored(tmp_path, 16, 16)
    read(tier, numbered(2 * EACH, 4 * EACH))
    read(tier, numbered(3 * EACH, 4 * EACH))
    assert tier.asked.nonzero()[0].tolist() == [4, 5, 6]
    assert tier.asked.max() == 1
    tier.close()


def test_what_is_expected_comes_by_itself(tmp_path: Path) -> None:
    tier, blocks = stored(tmp_path, 16, 16)
    tier.expect(numbered(3 * EACH, 5 * EACH))
    until = time.monotonic() + 20
    while tier.cached_bytes() < 3 * PAGE and time.monotonic() < until:
        time.sleep(0.001)
    assert tier.cached_bytes() == 3 * PAGE
    assert np.array_equal(read(tier, numbered(EACH, 6 * EACH)), blocks[6 * EACH : 7 * EACH])
    assert tier.asked.nonzero()[0].tolist() == [5, 6, 7]
    assert tier.asked.max() == 1
    tier.close()


def test_what_is_expected_stays_within_the_cache(tmp_path: Path) -> None:
    tier, _ = stored(tmp_path, 256, 16)
    for page in range(16):
        read(tier, numbered(1, page * EACH))
    tier.expect(numbered(256 * EACH))
    until = time.monotonic() + 20
    while tier.cached_bytes() < 15 * PAGE and time.monotonic() < until:
        time.sleep(0.001)
    assert tier.cached_bytes() <= 16 * PAGE
    tier.close()


def test_no_page_comes_after_it_was_dropped(tmp_path: Path) -> None:
    """Not even one that the disk was still reading then."""
    tier, blocks = stored(tmp_path, 2048, 600)
    tier.expect(numbered(512, 0) * 4 * EACH)
    tier.cache_bytes = 8 * PAGE + TABLE_BYTES * 2048
    time.sleep(0.1)
    assert tier.cached_bytes() <= 8 * PAGE
    order = np.random.default_rng(2).permutation(len(blocks)).astype(np.int32)
    assert np.array_equal(read(tier, order), blocks[order])
    tier.close()


def test_a_hint_that_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, blocks = stored(tmp_path, 16, 16)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(tier, "_ask", fail)
        tier.expect(numbered(3 * EACH))
    assert np.array_equal(read(tier, numbered(4 * EACH)), blocks[: 4 * EACH])
    tier.close()


def test_a_smaller_cache_lets_pages_go_at_once(tmp_path: Path) -> None:
    tier, _ = stored(tmp_path, 16, 16)
    read(tier, numbered(10 * EACH))
    tier.cache_bytes = 3 * PAGE + TABLE_BYTES * 16
    assert tier.cached_bytes() == 3 * PAGE
    tier.close()


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 40))
def test_runs_are_the_pages_cut_at_gaps(numbers: list[int], most: int) -> None:
    pages = np.unique(np.array(numbers, np.int64))
    found = runs(pages, most)
    assert [start + i for start, count in found for i in range(count)] == pages.tolist()
    assert all(0 < count <= most for _, count in found)
    for (start, count), (after, _) in pairwise(found):
        assert count == most or start + count < after


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(1, 3 * PAGE))
def test_pages_of_a_block_hold_all_its_bytes(numbers: list[int], size: int) -> None:
    first, last = page_range(np.array(numbers, np.int32), size)
    for slot, start, stop in zip(numbers, first.tolist(), last.tolist(), strict=True):
        assert start == slot * size // PAGE
        assert stop == (slot * size + size - 1) // PAGE
