"""The report of an engine, from what it holds and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore import kernels
from tierstore.adapters.attention.report import Report, TierReport
from tierstore.metrics import StoreMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.attention.batch import Batch
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout


def report_of(
    batch: Batch | None, rules: Rules, tiers: Sequence[Tier], layout: BlockLayout
) -> Report:
    """What was stored, moved and attended; `batch` is None where nothing was."""
    metrics = batch.store.metrics if batch else StoreMetrics([tier.name for tier in tiers])
    return Report(
        preset=rules.preset.name,
        budget=rules.budget,
        context_tokens=int(batch.tokens.max()) if batch else 0,
        block_tokens=rules.preset.block_tokens,
        window=_window(batch, rules, tiers[0]),
        selected_blocks=metrics.selected,
        hit_rate=metrics.hit_rate,
        fetched_bytes=metrics.fetched * layout.block_bytes,
        filtered_bytes=metrics.filtered * layout.block_bytes,
        hysteresis=rules.hysteresis.delta,
        index_bytes=batch.index_bytes if batch else 0,
        kernels=kernels.backend_of(tiers[0].view),
        tiers=tuple(map(TierReport.of, tiers, metrics.tiers)),
    )


def _window(batch: Batch | None, rules: Rules, fast: Tier) -> float | None:
    """The fast tier's capacity in budgets, as it came out."""
    if rules.window is None or batch is None or not batch.tokens.any():
        return rules.window
    blocks = int(batch.sharing.budgets()[batch.lanes.live].sum())
    selected = blocks * rules.geometry.kv_heads * rules.geometry.layers
    return min(rules.window, fast.capacity / selected)
