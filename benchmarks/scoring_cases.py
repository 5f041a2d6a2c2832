"""Cases of the kernels that score units and choose the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.benchmarks import kernel_bounds as bounds
from tierstore.benchmarks.kernel_cases import STRIP, Case, Sizes, elements, full, singles
from tierstore.kernels import estimate_reference, reference
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PARTS, BITS, WIDTH = 9, 6, 4
TABLES, HASH_BITS = 150, 10
_DEGREE, _BEAM = 32, 256


def dot_logits(sizes: Sizes) -> Case:
    """One mean key for each block."""
    query = elements(sizes.rows, sizes.group, sizes.dim)
    units = elements(sizes.rows, sizes.blocks, sizes.dim)
    counts = full(sizes, sizes.blocks)
    out = np.empty((sizes.rows, sizes.group, sizes.blocks), np.float32)
    q, u = to_tensor(query), to_tensor(units).transpose(1, 2)
    return Case(
        lambda: kernels.dot_logits(query, units, counts, sizes.scale, out),
        lambda: torch.bmm(q, u),
        (bounds.stream(units.nbytes + out.nbytes),),
        (bounds.multiply_adds(units.size * sizes.group, sizes.group),),
    )


def box_logits(sizes: Sizes) -> Case:
    """One box for each block."""
    query = elements(sizes.rows, sizes.group, sizes.dim)
    low = elements(sizes.rows, sizes.blocks, sizes.dim)
    high = elements(sizes.rows, sizes.blocks, sizes.dim)
    counts = full(sizes, sizes.blocks)
    out = np.empty((sizes.rows, sizes.group, sizes.blocks), np.float32)
    return Case(
        lambda: kernels.box_logits(query, high, low, counts, sizes.scale, out),
        lambda: reference.box_logits(query, high, low, counts, sizes.scale, out),
        (bounds.stream(2 * low.nbytes + out.nbytes),),
        (bounds.multiply_adds(2 * low.size * sizes.group, sizes.group),),
    )


def weigh_strips(sizes: Sizes) -> Case:
    """Sinks and local window."""
    query = elements(sizes.rows, sizes.group, sizes.dim)
    strip = elements(sizes.rows, STRIP, sizes.dim)
    counts = full(sizes, STRIP)
    out = np.empty((sizes.rows, sizes.group), np.float32)
    return Case(
        lambda: kernels.weigh_strips(query, strip, counts, sizes.scale, out),
        lambda: reference.weigh_strips(query, strip, counts, sizes.scale, out),
        (bounds.stream(strip.nbytes),),
        (
            bounds.multiply_adds(strip.size * sizes.group, sizes.group),
            bounds.exponentials(out.size * STRIP),
        ),
    )


def combine_heads(sizes: Sizes) -> Case:
    """Masses of all tokens, summed over the heads."""
    logits = singles(sizes.rows, sizes.group, sizes.tokens)
    counts = full(sizes, sizes.tokens)
    beside = np.zeros((sizes.rows, sizes.group), np.float32)
    out = np.empty((sizes.rows, sizes.tokens), np.float32)

    def run(operations: object) -> None:
        operations.combine_heads(  # type: ignore[attr-defined]
            logits, counts, None, 1.0, beside, "sum", True, sizes.rows, out
        )

    return Case(
        lambda: run(kernels),
        lambda: run(reference),
        (bounds.stream(2 * logits.nbytes + out.nbytes),),
        (bounds.exponentials(2 * logits.size),),
    )


def pool_pages(sizes: Sizes) -> Case:
    """Blocks from the masses of their tokens."""
    scores = singles(sizes.rows, sizes.tokens)
    blocks = full(sizes, sizes.blocks)
    out = np.empty((sizes.rows, sizes.blocks), np.float32)
    arguments = (scores, None, None, blocks, sizes.block_tokens, True, out)
    return Case(
        lambda: kernels.pool_pages(*arguments),
        lambda: reference.pool_pages(*arguments),
        (bounds.stream(scores.nbytes + out.nbytes),),
        (bounds.exponentials(scores.size),),
    )


def select_blocks(sizes: Sizes) -> Case:
    """The best blocks of each row."""
    scores = singles(sizes.rows, sizes.blocks)
    counts, budget = full(sizes, sizes.blocks), sizes.picked // sizes.block_tokens
    one_each = np.ones((1, sizes.blocks), np.int32)
    identity = np.arange(sizes.blocks, dtype=np.int32)[None]
    budgets, order = full(sizes, budget), np.empty(sizes.blocks, np.int32)
    row_ptr = np.empty(sizes.rows + 1, np.int64)
    ids = np.empty(sizes.rows * budget, np.int32)
    best = np.empty(len(ids), np.float32)
    tensor = torch.from_numpy(scores)
    return Case(
        lambda: kernels.select_blocks(
            scores, counts, one_each, identity, identity, budgets, order, row_ptr, ids, best
        ),
        lambda: tensor.topk(budget, dim=1, sorted=False),
        (bounds.stream(scores.nbytes),),
        (bounds.picks(scores.size),),
    )


def pq_logits(sizes: Sizes) -> Case:
    """Nine codes of six bits for each token, as preset best has them."""
    query = elements(sizes.rows, sizes.group, PARTS * WIDTH)
    words = elements(sizes.rows, PARTS, 1 << BITS, WIDTH)
    random = np.random.default_rng(0)
    shape = (sizes.rows, sizes.tokens // 64, PARTS, BITS)
    codes = random.integers(-(1 << 63), (1 << 63) - 1, shape, np.int64)
    counts = full(sizes, sizes.tokens)
    out = np.empty((sizes.rows, sizes.group, sizes.tokens), np.float32)
    few = min(sizes.tokens, 8192)
    some, small = codes[:, : few // 64].copy(), np.empty((*out.shape[:2], few), np.float32)
    asked = full(sizes, few)
    return Case(
        lambda: kernels.pq_logits(query, words, codes, counts, 1.0, out),
        lambda: reference.pq_logits(query, words, codes, counts, 1.0, out),
        (bounds.stream(codes.nbytes + out.nbytes),),
        (
            bounds.in_cache(
                lambda: kernels.pq_logits(query[:1], words[:1], some[:1], asked[:1], 1.0, small),
                sizes.rows * sizes.tokens / few,
            ),
        ),
    )


def pack_codes(sizes: Sizes) -> Case:
    """Codes of all tokens, as when a prompt is indexed."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 1 << BITS, (sizes.rows, sizes.tokens, PARTS), np.uint8)
    packed = np.zeros((sizes.rows, sizes.tokens // 64, PARTS, BITS), np.int64)
    few = min(sizes.tokens, 8192)
    some, small = codes[:1, :few].copy(), packed[:1, : few // 64].copy()
    return Case(
        lambda: kernels.pack_codes(codes, 0, packed),
        lambda: reference.pack_codes(codes, 0, packed),
        (bounds.stream(codes.nbytes + packed.nbytes),),
        (
            bounds.in_cache(
                lambda: kernels.pack_codes(some, 0, small), sizes.rows * sizes.tokens / few
            ),
        ),
    )


def pack_signs(sizes: Sizes) -> Case:
    """Hashes of a 128th of the tokens."""
    projections = singles(sizes.rows, sizes.tokens // 128, TABLES * HASH_BITS)
    out = np.empty((*projections.shape[:2], TABLES), np.int16)
    return Case(
        lambda: kernels.pack_signs(projections, HASH_BITS, out),
        lambda: estimate_reference.pack_signs(projections, HASH_BITS, out),
        (bounds.stream(projections.nbytes + out.nbytes),),
        (bounds.compares(projections.size * 2),),
    )


def count_collisions(sizes: Sizes) -> Case:
    """Tables in which tokens meet queries, as MagicPIG has them."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 1 << HASH_BITS, (sizes.rows, sizes.tokens, TABLES), np.int16)
    asked = random.integers(0, 1 << HASH_BITS, (sizes.rows, sizes.group, TABLES), np.int16)
    counts = full(sizes, sizes.tokens)
    out = np.empty((sizes.rows, sizes.group, sizes.tokens), np.float32)
    return Case(
        lambda: kernels.count_collisions(asked, codes, counts, out),
        lambda: estimate_reference.count_collisions(asked, codes, counts, out),
        (bounds.stream(codes.nbytes + out.nbytes),),
        (bounds.compares(codes.size * sizes.group),),
    )


def search_graph(sizes: Sizes) -> Case:
    """Walks over a graph of neighbours and of keys anywhere; torch looks at all keys."""
    query = elements(sizes.rows, sizes.group, sizes.dim)
    vectors = elements(sizes.rows, sizes.tokens, sizes.dim)
    random = np.random.default_rng(0)
    shape = (sizes.rows, sizes.tokens, _DEGREE)
    edges = random.integers(0, sizes.tokens, shape, np.int32)
    counts, beams = full(sizes, sizes.tokens), full(sizes, _BEAM)
    out = np.empty((sizes.rows, sizes.group, sizes.tokens), np.float32)

    def run() -> None:
        kernels.search_graph(query, vectors, edges, counts, beams, sizes.scale, out)

    run()
    seen = int(np.isfinite(out).sum())
    q, v = to_tensor(query), to_tensor(vectors).transpose(1, 2)
    return Case(
        run,
        lambda: torch.bmm(q, v),
        (bounds.stream(out.nbytes),),
        (bounds.scattered(vectors, seen // sizes.rows),),
    )


SCORING: Mapping[str, Callable[[Sizes], Case]] = {
    "dot_logits": dot_logits,
    "box_logits": box_logits,
    "weigh_strips": weigh_strips,
    "combine_heads": combine_heads,
    "pool_pages": pool_pages,
    "select_blocks": select_blocks,
    "pq_logits": pq_logits,
    "pack_codes": pack_codes,
    "pack_signs": pack_signs,
    "count_collisions": count_collisions,
    "search_graph": search_graph,
}
