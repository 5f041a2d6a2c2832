"""The kernels under measurement: how each is called, what does the same in torch, what it must do.

All cases of one `Sizes` are a step's work on one layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.benchmarks import kernel_bounds as bounds
from tierstore.kernels.element import to_array, to_tensor
from tierstore.kernels.shape import BlockShape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from tierstore.benchmarks.kernel_bounds import Move, Work
    from tierstore.kernels.element import Array

STRIP = 68
"""Tokens beside the blocks: 4 sinks and a local window of 64."""
_RANDOM = 1 << 20


class Sizes(NamedTuple):
    """R rows of G query heads each, over so many tokens in blocks.

    picked: tokens that a step attends to.
    """

    rows: int
    group: int
    dim: int
    tokens: int
    picked: int
    block_tokens: int = 4

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.tokens // self.block_tokens

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.dim**-0.5)


LARGE = Sizes(8, 4, 128, 131_072, 2048)
DEMO = Sizes(3, 3, 64, 8192, 512)


class Case(NamedTuple):
    """A kernel with its arguments.

    Attributes
    ----------
    run: calls it.
    plain: gets the same from plain torch.
    moves: bytes that it must read, write or copy.
    work: what else it must do.
    plain_share: how many times what `plain` does is what the kernel does.
    """

    run: Callable[[], object]
    plain: Callable[[], object]
    moves: tuple[Move, ...]
    work: tuple[Work, ...] = ()
    plain_share: float = 1.0


def elements(*shape: int) -> Array:
    """Random bfloat16 numbers as they are stored; they repeat after a million."""
    generator = torch.Generator().manual_seed(sum(shape))
    own = to_array(torch.randn(_RANDOM, generator=generator).bfloat16())
    return np.resize(own, shape)


def singles(*shape: int) -> npt.NDArray[np.float32]:
    """Random float32 numbers, which repeat after a million."""
    own = np.random.default_rng(sum(shape)).standard_normal(_RANDOM, np.float32)
    return np.resize(own, shape)


def full(sizes: Sizes, count: int) -> npt.NDArray[np.int32]:
    """The same count for each row."""
    return np.full(sizes.rows, count, np.int32)


class Picked:
    """Blocks that a step attends to, anywhere in the memory of a tier, and where results go."""

    def __init__(self, sizes: Sizes, block_tokens: int) -> None:
        self.sizes = sizes
        self.shape = BlockShape(block_tokens, sizes.dim, sizes.dim, block_tokens * sizes.dim)
        random = np.random.default_rng(0)
        per_row, blocks = sizes.picked // block_tokens, sizes.tokens // block_tokens
        self.pool = elements(sizes.rows * blocks, 2 * block_tokens * sizes.dim)
        self.row_ptr = np.arange(sizes.rows + 1, dtype=np.int64) * per_row
        self.blocks = np.concatenate(
            [random.permutation(blocks)[:per_row] for _ in range(sizes.rows)]
        ).astype(np.int32)
        self.slots = random.permutation(len(self.pool))[: len(self.blocks)].astype(np.int32)
        self.valid = np.full(len(self.blocks), block_tokens, np.uint8)
        self.query = elements(sizes.rows, sizes.group, sizes.dim)
        self.out = np.zeros((sizes.rows, sizes.group, sizes.dim), np.float32)
        self.lse = np.zeros((sizes.rows, sizes.group), np.float32)
        self.weights = np.empty((sizes.rows, sizes.group, sizes.picked + STRIP), np.float32)

    @property
    def moves(self) -> Move:
        """Keys and values of the blocks."""
        return bounds.blocks(self.pool, self.slots)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, n, d] of the blocks, copied together by torch."""
        blocks = to_tensor(self.pool)[torch.from_numpy(self.slots).long()]
        keys, values = self.shape.keys_and_values(blocks)
        rows = self.sizes.rows
        return keys.reshape(rows, -1, self.sizes.dim), values.reshape(rows, -1, self.sizes.dim)

    def softmax_work(self, tokens: int) -> tuple[Work, ...]:
        """Logits, weights and sums of so many tokens of each row."""
        pairs = self.sizes.rows * self.sizes.group * tokens
        return (
            bounds.multiply_adds(2 * pairs * self.sizes.dim, self.sizes.group),
            bounds.exponentials(pairs),
        )


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of torch itself: query [R, G, d], keys and values [R, n, d]."""
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, None], keys[:, None], values[:, None]
    )
