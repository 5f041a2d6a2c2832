"""The rates of the machine at hand, each the median of runs that are long enough to time."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore import kernels
from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.planner.stages import LayerStages, Times
from tierstore.adapters.presets import PRESETS
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import CapacityError, ConfigError
from tierstore.hardware import Hardware, Processor
from tierstore.kernels.element import to_array
from tierstore.layout import BlockLayout
from tierstore.tiers import DeviceTier, FileTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Say = Callable[[str], None]

READ_SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
FILE_BYTES = 128 << 20
"""For each size of reads."""
_READ_BYTES = 64 << 20
_WRITTEN_BYTES = 4 << 20
_MOST_READS = 1024
_DISK_RUNS = 3
_MEMORY_BYTES = 512 << 20
_MATRIX = 1536
_RUNS = 5
_LEAST_SECONDS = 0.05

GEOMETRY = Geometry(1, 32, 8, 128, torch.bfloat16, torch.device("cpu"))
"""A layer of Llama-3-8B."""

_BLOCK_TOKENS = 4
_CACHED_BLOCKS = 2048
_LINK_BLOCKS = 1 << 16
_MOVED_BLOCKS = 1 << 14
_CONTEXTS = (512, 16_384)
_STEPS = 48
_STAGES = 3
"""Of a step that fetches nothing: select, judge and attend."""


def measure(disk: str | Path, say: Say) -> Hardware:
    """This machine; `disk` is a directory of the disk to measure. Some ten seconds.

    ConfigError where no file can be written there.
    """
    say("matrix products")
    matmul = matmul_rate(torch.bfloat16)
    say("memory")
    memory = memory_rate()
    say("attention")
    vector = attention_rate()
    say("stages")
    costs = stage_costs()
    say("blocks into the fast tier")
    link = link_rate()
    say("disk")
    reads = tuple(disk_rates(disk).items())
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = Processor(matmul, vector, memory, size, costs.launch)
    return Hardware(
        "here", cores, cores, link, reads, costs.judge, costs.admit, True,
        f"measured with {torch.get_num_threads()} threads",
    )  # fmt: skip


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices."""
    left, right = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2.0 * _MATRIX**3 / seconds_of(lambda: left @ right)


def memory_rate() -> float:
    """Bytes/s of reading far more than any cache holds."""
    numbers = torch.ones(_MEMORY_BYTES // 4)
    return _MEMORY_BYTES / seconds_of(numbers.sum)


def attention_rate() -> float:
    """FLOP/s of attention over blocks that are in a cache, with 4 queries for each key."""
    rows, group, dim = GEOMETRY.kv_heads, GEOMETRY.group, GEOMETRY.head_dim
    shape = kernels.BlockShape(_BLOCK_TOKENS, dim, dim, _BLOCK_TOKENS * dim)
    pool = _elements(_CACHED_BLOCKS, 2 * _BLOCK_TOKENS * dim)
    each = _CACHED_BLOCKS // rows
    row_ptr = np.arange(rows + 1, dtype=np.int64) * each
    slots = np.random.default_rng(0).permutation(_CACHED_BLOCKS).astype(np.int32)
    valid = np.full(_CACHED_BLOCKS, _BLOCK_TOKENS, np.uint8)
    strips = to_array(torch.zeros(rows, 0, dim, dtype=GEOMETRY.dtype))
    query = to_array(torch.randn(rows, group, dim).to(GEOMETRY.dtype))
    out, lse = np.empty((rows, group, dim), np.float32), np.empty((rows, group), np.float32)
    weights = np.empty((rows, group, each * _BLOCK_TOKENS), np.float32)

    def attend() -> None:
        kernels.attend_blocks(
            query, pool, shape, row_ptr, slots, valid, strips, strips, np.zeros(rows, np.int32),
            dim**-0.5, out, lse, weights,
        )  # fmt: skip

    seconds = seconds_of(attend)
    return 4.0 * _CACHED_BLOCKS * _BLOCK_TOKENS * group * dim / seconds


def link_rate() -> float:
    """Bytes/s of scattered blocks from the DRAM tier into slots of the fast tier."""
    layout = BlockLayout.kv(_BLOCK_TOKENS, GEOMETRY.head_dim, GEOMETRY.dtype)
    limit = (_LINK_BLOCKS + 1) * layout.block_bytes
    host = PinnedTier(layout, limit)
    fast = DeviceTier(layout, limit, device=GEOMETRY.device)
    try:
        for tier in (host, fast):
            tier.resize(_LINK_BLOCKS)
            tier.view.fill(1)
        random = np.random.default_rng(0)
        source, target = (
            random.permutation(_LINK_BLOCKS)[:_MOVED_BLOCKS].astype(np.int32) for _ in range(2)
        )
        seconds = seconds_of(lambda: host.read(source, fast.view, target).wait())
        return _MOVED_BLOCKS * layout.block_bytes / seconds
    finally:
        host.close()
        fast.close()


class StageCosts(NamedTuple):
    """Seconds that a stage takes beside its work; for each block judged, and for each fetched."""

    launch: float
    judge: float
    admit: float


def stage_costs() -> StageCosts:
    """Costs that depend on the number of blocks, not on their bytes."""
    few, many = (_resident_step(tokens) for tokens in _CONTEXTS)
    blocks = [GEOMETRY.kv_heads * tokens / 4 / _BLOCK_TOKENS for tokens in _CONTEXTS]
    judge = max(1e-10, (many.judge - few.judge) / (blocks[1] - blocks[0]))
    missing = _missing_step(_CONTEXTS[1])
    admit = (missing.judge - many.judge) / (missing.missed * blocks[1])
    return StageCosts(_smallest_step() / _STAGES, judge, max(1e-10, admit))


def _smallest_step() -> float:
    """Seconds of a whole call of an engine that has next to nothing to do, and all of it there."""
    shape = (1, GEOMETRY.kv_heads, _CONTEXTS[0], GEOMETRY.head_dim)
    generator, scale = torch.Generator().manual_seed(0), GEOMETRY.head_dim**-0.5
    key, value = (torch.randn(shape, generator=generator).to(GEOMETRY.dtype) for _ in range(2))
    query = torch.randn(1, GEOMETRY.query_heads, 1, GEOMETRY.head_dim, generator=generator)
    engine = SparseAttention(GEOMETRY, preset="kvdrive", fast="64MiB", dram="64MiB")
    try:
        engine.absorb(0, key, value, scale=scale)
        token = query.to(GEOMETRY.dtype), key[:, :, :1], value[:, :, :1]
        return seconds_of(lambda: engine.attend(0, *token, scale=scale))
    finally:
        engine.close()


def _resident_step(tokens: int) -> Times:
    """A step that selects a quarter of the context, with all of it in the fast tier."""
    return _step(tokens, window=4.0)


def _missing_step(tokens: int) -> Times:
    """The same with a quarter of it in the fast tier."""
    return _step(tokens, window=1.0)


def _step(tokens: int, window: float) -> Times:
    generator = torch.Generator().manual_seed(0)
    shape = (GEOMETRY.kv_heads, tokens, GEOMETRY.head_dim)
    key, value = (torch.randn(shape, generator=generator).to(GEOMETRY.dtype) for _ in range(2))
    stages = LayerStages(
        GEOMETRY, PRESETS["kvdrive"], key, value, None, budget=tokens // 4, window=window,
        scale=GEOMETRY.head_dim**-0.5,
    )  # fmt: skip
    try:
        each = (GEOMETRY.kv_heads, GEOMETRY.group, GEOMETRY.head_dim)
        queries = torch.randn(_STEPS, *each, generator=generator).to(GEOMETRY.dtype)
        return Times.median([stages.step(query) for query in queries][_STEPS // 3 :])
    finally:
        stages.close()


def disk_rates(disk: str | Path) -> dict[int, float]:
    """Bytes/s at which a tier reads random extents, by their `READ_SIZES`.

    Past the page cache, where the file system has direct reads.

    What the tier itself does counts: small extents are bound by that as much as by the disk.
    """
    directory = PrivateDirectory(disk)
    try:
        return {size: _disk_rate(directory.path / str(size), size) for size in READ_SIZES}
    except (OSError, CapacityError) as error:
        raise ConfigError(
            f"disk={str(disk)!r}: {FILE_BYTES >> 20} MiB cannot be written and read there "
            f"({error}); choose another directory"
        ) from error
    finally:
        directory.close()


def _disk_rate(path: Path, size: int) -> float:
    tier = FileTier(BlockLayout.kv(_BLOCK_TOKENS, GEOMETRY.head_dim, GEOMETRY.dtype), path,
                    extent_bytes=size)  # fmt: skip
    each, extents = size // tier.layout.block_bytes, FILE_BYTES // size
    random, rates = np.random.default_rng(size), []
    shape = _WRITTEN_BYTES // size * each, tier.layout.block_bytes
    blocks = random.integers(0, 256, shape, np.uint8)
    rows = np.arange(len(blocks), dtype=np.int32)
    try:
        tier.resize(extents * each)
        for first in range(0, extents * each, len(blocks)):
            tier.write(first + rows, blocks, rows).wait()
        tier.sync()
        count = min(_READ_BYTES // size, _MOST_READS)
        for _ in range(_DISK_RUNS):
            slots = (random.permutation(extents)[:count] * each).astype(np.int32)
            start = time.perf_counter()
            tier.read(slots, blocks, rows[:count]).wait()
            rates.append(count * size / (time.perf_counter() - start))
        tier.resize(0)
    finally:
        tier.close()
    return statistics.median(rates)


def seconds_of(run: Callable[[], object]) -> float:
    """Median seconds of a call, over runs of at least some tens of milliseconds."""
    run()
    start = time.perf_counter()
    run()
    calls = max(1, round(_LEAST_SECONDS / max(time.perf_counter() - start, 1e-9)))
    found = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def _elements(count: int, width: int) -> np.ndarray:
    return to_array(torch.randn(count, width).to(GEOMETRY.dtype))
