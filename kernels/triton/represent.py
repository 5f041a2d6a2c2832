"""What stands for a page: the mean of its keys, or the least box around them.

Arguments are described once, in `tierstore.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tierstore.kernels.triton.launch import launch, narrow, padded, target, tensors

if TYPE_CHECKING:
    from tierstore.kernels.element import Array


@triton.jit
def page_kernel(keys, first, second, row_stride, token_stride, TOKENS: tl.constexpr,
                DIM: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr,
                MEAN: tl.constexpr):  # fmt: skip
    # A grid may have more than 65,535 programs along its first axis only.
    page, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.arange(0, ROOM)
    axis = tl.arange(0, WIDTH)
    inside = (token[:, None] < TOKENS) & (axis[None, :] < DIM)
    at = (page * TOKENS + token[:, None]).to(tl.int64) * token_stride + axis[None, :]
    k = tl.load(keys + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    place = (row * tl.num_programs(0) + page) * DIM + axis
    if MEAN:
        mean = tl.sum(k, 0) / TOKENS
        tl.store(first + place, narrow(mean, first.dtype.element_ty), mask=axis < DIM)
    else:
        high = tl.max(tl.where(inside, k, float("-inf")), 0)
        low = tl.min(tl.where(inside, k, float("inf")), 0)
        tl.store(first + place, high.to(first.dtype.element_ty), mask=axis < DIM)
        tl.store(second + place, low.to(second.dtype.element_ty), mask=axis < DIM)


def _run(keys: Array, page_tokens: int, first: Array, second: Array, *, mean: bool) -> None:
    [k] = tensors(keys)
    k = k if k.stride(2) == 1 else k.contiguous()
    a, b = target(first, k.device), target(second, k.device)
    rows, tokens, dim = k.shape
    launch(
        page_kernel, (tokens // page_tokens, rows), k, a, b, k.stride(0), k.stride(1),
        TOKENS=page_tokens, DIM=dim, ROOM=int(triton.next_power_of_2(page_tokens)),
        WIDTH=padded(dim), MEAN=mean,
    )  # fmt: skip


def page_means(keys: Array, page_tokens: int, out: Array) -> None:
    _run(keys, page_tokens, out, out, mean=True)


def page_bounds(keys: Array, page_tokens: int, high: Array, low: Array) -> None:
    _run(keys, page_tokens, high, low, mean=False)
