"""One text, one prefill, and one engine after another that goes on from there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierstore.adapters.attention.recorder import QueryRecorder
from tierstore.adapters.capture import WINDOW, full_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from transformers import PreTrainedModel

    from tierstore.adapters.attention import Geometry, Report, SparseAttention
    from tierstore.adapters.transformers import TierCache
    from tierstore.adapters.transformers.engine import AttentionEngine


class Relay:
    """Full attention, until `hand_to` lets another engine go on from the text so far.

    For one sequence without padding. What such an engine has decoded has to be cropped before it
    hands back.
    """

    def __init__(self, recorder: QueryRecorder) -> None:
        self.recorder = recorder
        self._engine: AttentionEngine = recorder

    @contextmanager
    def hand_to(self, engine: SparseAttention) -> Iterator[None]:
        """Within, `engine` attends; it has absorbed the text so far, and is closed afterwards."""
        try:
            self.recorder.replay(engine)
            self._engine = engine
            yield
        finally:
            self._engine = self.recorder
            engine.close()

    @property
    def geometry(self) -> Geometry:
        return self._engine.geometry

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
        return self._engine.attend(layer, query, key, value, valid=valid, scale=scale)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._engine.select_rows(rows)

    def crop(self, tokens: int) -> None:
        self._engine.crop(tokens)

    def reset(self) -> None:
        self._engine.reset()

    def report(self) -> Report:
        return self._engine.report()

    def close(self) -> None:
        self.recorder.close()


@contextmanager
def relayed(model: PreTrainedModel, tokens: int) -> Iterator[tuple[TierCache, Relay]]:
    """`model` attached to a relay with room for so many tokens."""
    from tierstore.adapters.transformers import attach_engine, geometry_of

    relay = Relay(QueryRecorder(full_engine(geometry_of(model), tokens), WINDOW))
    with attach_engine(model, relay) as cache:
        yield cache, relay
