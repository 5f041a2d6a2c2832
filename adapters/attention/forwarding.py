"""An attention engine in front of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.report import Report
    from tierstore.adapters.transformers.engine import AttentionEngine


class Forwarding:
    """Hands every call on to `engine`; inherit to look at some of them, or to change `engine`."""

    def __init__(self, engine: AttentionEngine) -> None:
        self.engine = engine

    @property
    def geometry(self) -> Geometry:
        return self.engine.geometry

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        scale: float,
    ) -> torch.Tensor:
        self.on_attend(layer, query, key, value, scale)
        return self.engine.attend(layer, query, key, value, valid=valid, scale=scale)

    def on_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        """Is told what comes before the engine attends."""

    def select_rows(self, rows: Sequence[int]) -> None:
        self.engine.select_rows(rows)

    def crop(self, tokens: int) -> None:
        self.engine.crop(tokens)

    def reset(self) -> None:
        self.engine.reset()

    def report(self) -> Report:
        return self.engine.report()

    def close(self) -> None:
        self.engine.close()
