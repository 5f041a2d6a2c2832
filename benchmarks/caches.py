"""The caches that decoding is measured with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.generate import TierOptions

if TYPE_CHECKING:
    from pathlib import Path

FLOOR_TOKENS = 64

CACHES = {
    "floor": f"DynamicCache at {FLOOR_TOKENS} tokens of context: hardly any attention",
    "dynamic": "transformers' DynamicCache and its scaled_dot_product_attention",
    "full": "preset full, all in DRAM: full attention by our kernels",
    "kvdrive": "preset kvdrive, all in DRAM",
    "half": "preset kvdrive, DRAM limited to half the size of keys and values, all of them on disk",
    "window": "preset kvdrive, a fast tier of an eighth, all in DRAM under it",
    "quarter": "preset kvdrive, a quarter for fast tier, DRAM and page cache, and tables; all on "
    "disk, sync level (d)",
    "demo": "preset kvdrive, an eighth for the fast tier, half for DRAM, all on disk",
}


def tier_options(kv: int, element_bytes: int, disk: str | Path) -> dict[str, TierOptions | None]:
    """The tiers of each cache for `kv` bytes of keys and values; None for transformers' own."""
    ample = 3 * kv + (64 << 20)
    tables = kv // (4 * element_bytes)  # 128 bytes for a block of 512 elements
    eighth = max(kv // 8, 1 << 20)
    return {
        "floor": None,
        "dynamic": None,
        "full": TierOptions("full", dram=ample),
        "kvdrive": TierOptions("kvdrive", dram=ample),
        "half": TierOptions("kvdrive", dram=kv // 2, disk=disk),
        "window": TierOptions("kvdrive", fast=eighth, dram=ample),
        "quarter": TierOptions("kvdrive", fast=eighth, dram=eighth + tables, disk=disk, sync="d"),
        "demo": TierOptions("kvdrive", fast=eighth, dram=kv // 2, disk=disk),
    }
