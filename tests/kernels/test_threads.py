"""Rows of a kernel call spread over threads."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, get_ident
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import attention, exactly, stored

from tierstore import kernels
from tierstore.kernels import BlockShape, threads
from tierstore.kernels.threads import over_rows, shared_by, thread_count

if TYPE_CHECKING:
    from collections.abc import Iterator

PLENTY = 1 << 40
"""Multiply-adds that are worth any number of threads."""


@pytest.fixture(autouse=True, scope="module")
def four_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setenv("TIERSTORE_THREADS", "4")
        patch.setattr(threads, "_pool", lambda: pool)
        yield


@given(st.integers(0, 50), st.sampled_from([0, PLENTY]))
def test_each_row_is_covered_once(rows: int, work: int) -> None:
    covered = Counter[int]()

    over_rows(rows, work, lambda first, last: covered.update(range(first, last)))

    assert covered == Counter(range(rows))


def test_much_work_runs_at_once_on_several_threads() -> None:
    """The barrier opens only when four threads have come to it."""
    barrier, seen = Barrier(4, timeout=60), set[int]()

    def meet(first: int, last: int) -> None:
        barrier.wait()
        seen.add(get_ident())

    over_rows(8, PLENTY, meet)

    assert len(seen) == 4


@pytest.mark.parametrize(("callers", "parts"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_a_caller_has_its_share_of_the_threads(callers: int, parts: int) -> None:
    seen: list[tuple[int, int]] = []

    with shared_by(callers):
        over_rows(8, PLENTY, lambda first, last: seen.append((first, last)))
    assert len(seen) == parts

    seen.clear()
    over_rows(8, PLENTY, lambda first, last: seen.append((first, last)))
    assert len(seen) == 4


def test_little_work_stays_on_the_calling_thread() -> None:
    seen: list[tuple[int, int, int]] = []

    over_rows(8, 1_000, lambda first, last: seen.append((get_ident(), first, last)))

    assert seen == [(get_ident(), 0, 8)]


@pytest.mark.parametrize("bad_row", [0, 3])
def test_an_error_in_any_part_reaches_the_caller(bad_row: int) -> None:
    def fail(first: int, last: int) -> None:
        if first <= bad_row < last:
            raise ZeroDivisionError(bad_row)

    with pytest.raises(ZeroDivisionError, match=str(bad_row)):
        over_rows(4, PLENTY, fail)


def test_the_error_comes_after_all_parts_have_ended() -> None:
    """A part that still wrote would write to arrays that serve someone else by then."""
    has_failed, has_returned = Event(), Event()
    wrote_late: list[bool] = []

    def run(first: int, last: int) -> None:
        if first == 0:
            has_failed.set()
            raise ZeroDivisionError
        has_failed.wait(60)
        wrote_late.append(has_returned.wait(0.2))

    with pytest.raises(ZeroDivisionError):
        over_rows(2, PLENTY, run)
    has_returned.set()

    assert wrote_late == [False]


def test_kernels_may_be_called_from_several_threads_at_once() -> None:
    """Each caller has more rows than threads and enough work to spread them."""
    group, tokens, dim, rows, blocks = 4, 4, 128, 16, 128
    random = np.random.default_rng(0)
    pool = stored(random.standard_normal((blocks, 2 * tokens * dim)), torch.bfloat16)
    shape = BlockShape(tokens, dim, dim, tokens * dim)
    row_ptr = np.arange(rows + 1, dtype=np.int64) * blocks
    valid = np.full(rows * blocks, tokens, np.uint8)
    no_strip = stored(np.zeros((rows, 1, dim)), torch.bfloat16)
    start = Barrier(4, timeout=60)

    def attend(seed: int) -> tuple[float, float]:
        own = np.random.default_rng(seed)
        query = stored(own.standard_normal((rows, group, dim)), torch.bfloat16)
        slots = np.concatenate([own.permutation(blocks) for _ in range(rows)]).astype(np.int32)
        out, lse = np.zeros((rows, group, dim), np.float32), np.zeros((rows, group), np.float32)
        weights = np.zeros((rows, group, blocks * tokens), np.float32)
        start.wait()
        for _ in range(5):
            kernels.attend_blocks(query, pool, shape, row_ptr, slots, valid, no_strip, no_strip,
                                  np.zeros(rows, np.int32), 0.1, out, lse, weights)  # fmt: skip
        whole = exactly(pool, torch.bfloat16)
        keys, values = whole[:, : tokens * dim], whole[:, tokens * dim :]
        expected, expected_lse = attention(
            exactly(query, torch.bfloat16).reshape(-1, dim), keys.reshape(-1, dim),
            values.reshape(-1, dim), 0.1,
        )  # fmt: skip
        worst = np.abs(out.reshape(-1, dim) - expected).max()
        return float(worst), float(np.abs(lse.reshape(-1) - expected_lse).max())

    with ThreadPoolExecutor(4) as callers:
        errors = list(callers.map(attend, range(4)))

    assert max(max(pair) for pair in errors) < 1e-5


def test_thread_count_is_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_THREADS", "0")

    assert thread_count() == 1


def test_thread_count_is_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERSTORE_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 4, 6}, raising=False)

    assert thread_count() == 3
