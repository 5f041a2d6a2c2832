"""What a run did, tier by tier."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.table import Table

from tierstore.sizes import format_size

if TYPE_CHECKING:
    from tierstore.interfaces import Tier
    from tierstore.metrics import TierMetrics


@dataclass(frozen=True)
class TierReport:
    """One tier. Bytes moved are block payloads; `used_for` is what the limit was spent on."""

    name: str
    medium: str
    limit_bytes: int | None
    peak_bytes: int
    hits: int
    bytes_read: int
    bytes_written: int
    evictions: int
    used_for: dict[str, int]

    @classmethod
    def of(cls, tier: Tier, counters: TierMetrics) -> Self:
        """What a tier did, by its counters."""
        memory = tier.memory
        return cls(
            name=tier.name,
            medium=tier.medium,
            limit_bytes=memory.limit_bytes if memory else None,
            peak_bytes=memory.peak_bytes if memory else tier.used_bytes,
            hits=counters.hits,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            evictions=counters.evictions,
            used_for=memory.by_purpose() if memory else {"slots": tier.used_bytes},
        )


@dataclass(frozen=True)
class Report:
    """Counters since the engine was made or reset.

    hit_rate: share of selected blocks that were in the first tier already. window: capacity of the
    fast tier in budgets, as far as it is limited by one; None without a fast tier. fetched_bytes:
    selected blocks that were brought into the first tier. filtered_bytes: those that were not there
    and not worth it. hysteresis: nats that a block must be better to be worth it, as of now.
    """

    preset: str
    budget: float | int
    context_tokens: int
    block_tokens: int
    window: float | None
    selected_blocks: int
    hit_rate: float
    fetched_bytes: int
    filtered_bytes: int
    hysteresis: float
    index_bytes: int
    kernels: str
    tiers: tuple[TierReport, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """The tiers as a table for rich."""
        table = Table(
            title=f"tierstore: preset {self.preset}, budget {self._budget()}", title_justify="left"
        )
        for heading in ("tier", "medium"):
            table.add_column(heading)
        for heading in ("limit", "peak", "hits", "read", "written", "evicted"):
            table.add_column(heading, justify="right")
        for tier in self.tiers:
            limit = "free space" if tier.limit_bytes is None else format_size(tier.limit_bytes)
            table.add_row(
                tier.name, tier.medium, limit, format_size(tier.peak_bytes), f"{tier.hits:,}",
                format_size(tier.bytes_read), format_size(tier.bytes_written),
                f"{tier.evictions:,}",
            )  # fmt: skip
        window = "" if self.window is None else f", window x{self.window:.2f}"
        found = "no blocks selected yet"
        if self.selected_blocks:
            share = f"{self.hit_rate:.1%} of {self.selected_blocks:,} selected blocks"
            found = f"{self.tiers[0].name} held {share}"
        filtered = ""
        if self.filtered_bytes:
            filtered = (
                f"; {format_size(self.fetched_bytes)} fetched, {format_size(self.filtered_bytes)} "
                f"less than {self.hysteresis:.2f} nats better and not fetched"
            )
        table.caption = (
            f"{found}{window}{filtered}; index {format_size(self.index_bytes)}; "
            f"context {self.context_tokens:,} tokens; kernels: {self.kernels}"
        )
        table.caption_justify = "left"
        return table

    def _budget(self) -> str:
        return (
            f"{self.budget:.2%} of the context"
            if isinstance(self.budget, float)
            else f"{self.budget:,} tokens"
        )

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=110).print(self.table())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
