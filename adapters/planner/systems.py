"""What the compared systems keep where, read, and move; from their papers and code.

All count per layer. Indexes are of one sequence, in bytes; m is the model, n the context's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.adapters.planner.models import ModelSize

    Amount = Callable[[ModelSize, int], float]
    """Of a model and the tokens of its context."""


def _none(model: ModelSize, tokens: int) -> float:
    return 0.0


@dataclass(frozen=True)
class System:
    """One way to decode over a long context.

    Attributes
    ----------
    selects: whether a step attends to a budget; otherwise to everything.
    kv_on: where all keys and values live: "device" or "host".
    spills: whether what the host has no room for goes to disk.
    window: budgets that stay on the device from step to step; None where the plan chooses.
    attends_residents: whether a step attends to everything that stays on the device.
    entry_tokens: tokens of what is kept or not as a whole. judges_on: "device" or "host", which
        tells what is there and chooses what leaves.
    schedule: "sequential", "previous-layer" or "sfc"; see `tierstore.pipeline`.
    attends_on: "device" or "host".
    device_index, host_index: bytes that stay there.
    scanned: bytes that selecting reads, on the device, or where it attends.
    operations: multiply-adds that selecting does.
    sent: bytes that selecting brings over the link at each step.
    fetched_part: of keys and values, the part that a miss moves.
    rebuild: multiply-adds for each missed token, to make its keys again.
    apart: extents of 32 blocks that hold what a step misses, relative to blocks taken at random.
    """

    name: str
    selects: bool = True
    kv_on: str = "host"
    spills: bool = False
    window: float | None = 0.0
    attends_residents: bool = False
    entry_tokens: int = 4
    judges_on: str = "host"
    schedule: str = "sequential"
    attends_on: str = "device"
    device_index: Amount = _none
    host_index: Amount = _none
    scanned: Amount = _none
    operations: Amount = _none
    sent: Amount = _none
    fetched_part: float = 1.0
    rebuild: float = 0.0
    apart: float = 1.0


def _vectors(per_token: float) -> Amount:
    """Bytes of so many 16-bit vectors of the head dimension for each token and KV head."""
    return lambda m, n: m.kv_heads * m.head_dim * m.ELEMENT * n * per_token


def _products(per_token: float) -> Amount:
    """Multiply-adds of each query head with so many vectors for each token."""
    return lambda m, n: m.query_heads * m.head_dim * n * per_token


_SHADOW_RANK = 160
_PQ_CENTROIDS = 64
_LSH_BITS, _LSH_TABLES = 10, 150
_COLUMNS = 0.2


def _shadow_index(m: ModelSize, n: int) -> float:
    low_rank = _SHADOW_RANK * m.ELEMENT * n + m.kv_heads * m.head_dim * _SHADOW_RANK * m.ELEMENT
    return low_rank + _vectors(1 / 8)(m, n) + m.kv_heads * n


def _pq_books(m: ModelSize) -> float:
    return m.kv_heads * _PQ_CENTROIDS * m.head_dim * m.ELEMENT


def _pq_codes(m: ModelSize, n: int) -> float:
    # Two codes of eight bytes, as its code holds them.
    return 16.0 * m.kv_heads * n


def _lsh_tables(m: ModelSize, n: int) -> float:
    starts = 8.0 * _LSH_TABLES * (1 << _LSH_BITS)
    return m.kv_heads * (4.0 * _LSH_TABLES * n + starts)


def _lsh_buckets(m: ModelSize, n: int) -> float:
    return m.query_heads * 4.0 * _LSH_TABLES * n / (1 << _LSH_BITS)


def _columns(m: ModelSize, n: int) -> float:
    kept = int(_COLUMNS * m.head_dim)
    return m.ELEMENT * kept * (m.kv_heads * n + m.query_heads * m.hidden)


def _weighted_pq(m: ModelSize, n: int) -> float:
    books = 9 * _PQ_CENTROIDS * 4 * m.ELEMENT + 2 * min(32, m.head_dim) * m.head_dim * m.ELEMENT
    return m.kv_heads * (6.75 * n + books)


def _clusters(m: ModelSize, n: int) -> float:
    return _vectors(2 / 16)(m, n) + 3 / 16 * m.kv_heads * n


SYSTEMS = {
    system.name: system
    for system in (
        System("full", selects=False, kv_on="device"),
        System("flexgen", selects=False, spills=True, schedule="previous-layer"),
        System(
            "infinigen", schedule="previous-layer", device_index=_columns, scanned=_columns,
            operations=_products(_COLUMNS),
        ),
        System(
            "quest", device_index=_vectors(2 / 16), scanned=_vectors(2 / 16),
            operations=_products(2 / 16),
        ),
        System(
            "shadowkv", window=1.0, entry_tokens=8, judges_on="device",
            device_index=_shadow_index, scanned=_vectors(1 / 8), operations=_products(1 / 8),
            fetched_part=0.5, rebuild=float(_SHADOW_RANK),
        ),
        System(
            "pqcache", window=1.0, entry_tokens=128,
            device_index=lambda m, n: 2 * _pq_codes(m, n) / m.layers + _pq_books(m),
            host_index=_pq_codes, scanned=_pq_codes,
            operations=lambda m, n: 2.0 * m.query_heads * n, sent=_pq_codes,
        ),
        System(
            "magicpig", attends_on="host", host_index=_lsh_tables, scanned=_lsh_buckets,
            operations=lambda m, n: m.query_heads * _LSH_TABLES * n / (1 << _LSH_BITS),
        ),
        System(
            "retroinfer", window=3.0, entry_tokens=16, device_index=_vectors(1 / 16),
            scanned=_vectors(1 / 16), operations=_products(1 / 16),
        ),
        System(
            "retroinfer-e", window=3.0, entry_tokens=16, device_index=_clusters,
            scanned=lambda m, n: _vectors(1.25 / 16)(m, n), operations=_products(1.25 / 16),
        ),
        System(
            "kvdrive", spills=True, window=None, attends_residents=True, schedule="sfc",
            device_index=_vectors(1 / 15), scanned=_vectors(1 / 15), operations=_products(1 / 15),
            apart=0.36,
        ),
        System(
            "best", spills=True, window=None, attends_residents=True, schedule="sfc",
            device_index=_weighted_pq, scanned=_weighted_pq,
            operations=lambda m, n: 9.0 * m.query_heads * n, apart=0.6,
        ),
    )
}  # fmt: skip


def system_named(name: str) -> System:
    """The system called so; ConfigError lists the names."""
    if name not in SYSTEMS:
        raise ConfigError(f"system={name!r}: expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
