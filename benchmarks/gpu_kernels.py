"""How long the GPU kernels take, beside the bytes that they must move; needs a GPU.

``python -m tierstore.benchmarks.gpu_kernels [JSON]``: 128k tokens, 8 KV heads, 4 query heads each,
128 elements, bfloat16, as in Llama-3-8B.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.arrays import as_array
from tierstore.errors import ConfigError
from tierstore.kernels import operations
from tierstore.kernels.shape import BlockShape

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, GROUP, DIM, TOKENS, PER_BLOCK = 8, 4, 128, 131_072, 4
BUDGET = 1 / 64
_REPEATS = 50


class Case(NamedTuple):
    """A call of one operation, and the bytes that it must read and write at least."""

    run: Callable[[], object]
    nbytes: int


def cases(device: str, tokens: int = TOKENS) -> dict[str, Case]:
    """The operations of a decoding step over so many tokens."""

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    blocks = tokens // PER_BLOCK
    picked = max(1, int(blocks * BUDGET))
    query, units = values(ROWS, GROUP, DIM), values(ROWS, blocks, DIM)
    logits, scores = values(ROWS, GROUP, blocks).float(), values(ROWS, blocks).float()
    pool, out = values(ROWS * blocks, 2 * PER_BLOCK * DIM), values(ROWS, GROUP, DIM)
    lse, strip = values(ROWS, GROUP).float(), values(ROWS, 68, DIM)
    weights = values(ROWS, GROUP, picked * PER_BLOCK + 68).float()
    q, u, s, c, p, k = map(as_array, (query, units, logits, scores, pool, strip))
    o, e, w = map(as_array, (out, lse, weights))
    counts, length = np.full(ROWS, blocks, np.int32), np.full(ROWS, 68, np.int32)
    one_each, identity = np.ones((1, blocks), np.int32), np.arange(blocks, dtype=np.int32)[None]
    budgets, order = np.full(ROWS, picked, np.int32), np.empty(blocks, np.int32)
    pointers = np.arange(ROWS + 1, dtype=np.int64) * picked
    slots = np.random.default_rng(0).permutation(len(pool))[: ROWS * picked].astype(np.int32)
    valid = np.full(len(slots), PER_BLOCK, np.uint8)
    found = np.empty(ROWS + 1, np.int64), np.empty(len(slots), np.int32)
    best = np.empty(len(slots), np.float32)
    shape = BlockShape(PER_BLOCK, DIM, DIM, PER_BLOCK * DIM)
    attended = len(slots) * pool.shape[1] * pool.element_size() + 2 * strip.nbytes
    return {
        "dot_logits": Case(
            lambda: operations.dot_logits(q, u, counts, DIM**-0.5, s), units.nbytes + logits.nbytes
        ),
        "combine_heads": Case(
            lambda: operations.combine_heads(s, counts, None, 4.0, None, "sum", True, ROWS, c),
            2 * logits.nbytes + scores.nbytes,
        ),
        "select_blocks": Case(
            lambda: operations.select_blocks(
                c, counts, one_each, identity, identity, budgets, order, *found, best
            ),
            scores.nbytes,
        ),
        "attend_blocks": Case(
            lambda: operations.attend_blocks(
                q, p, shape, pointers, slots, valid, k, k, length, DIM**-0.5, o, e, w
            ),
            attended,
        ),
    }


def milliseconds(run: Callable[[], object]) -> float:
    """The median time of a call, launches and small copies included."""
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times[5:]))


def main(target: str | None = None) -> None:
    """Measure, print a Markdown table, and write JSON where a file is named."""
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device: expected one, this measures kernels on a GPU")
    rows = []
    print("| operation | ms | GB/s |\n|---|---|---|")
    for name, case in cases("cuda").items():
        took = milliseconds(case.run)
        rows.append({"operation": name, "ms": took, "GB/s": case.nbytes / took / 1e6})
        print(f"| {name} | {took:.3f} | {case.nbytes / took / 1e6:.0f} |")
    if target is not None:
        report = {"device": torch.cuda.get_device_name(), "tokens": TOKENS, "operations": rows}
        Path(target).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
