"""One text, one prefill, and one engine after another that goes on from there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierstore.adapters.attention.forwarding import Forwarding
from tierstore.adapters.attention.recorder import QueryRecorder
from tierstore.adapters.capture import WINDOW, full_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from tierstore.adapters.attention import SparseAttention
    from tierstore.adapters.transformers import TierCache


class Relay(Forwarding):
    """Full attention, until `hand_to` lets another engine go on from the text so far.

    For one sequence without padding. What such an engine has decoded has to be cropped before it
    hands back.
    """

    def __init__(self, recorder: QueryRecorder) -> None:
        super().__init__(recorder)
        self.recorder = recorder

    @contextmanager
    def hand_to(self, engine: SparseAttention) -> Iterator[None]:
        """Within, `engine` attends; it has absorbed the text so far, and is closed afterwards."""
        try:
            self.recorder.replay(engine)
            self.engine = engine
            yield
        finally:
            self.engine = self.recorder
            engine.close()

    def close(self) -> None:
        self.recorder.close()


@contextmanager
def relayed(model: PreTrainedModel, tokens: int) -> Iterator[tuple[TierCache, Relay]]:
    """`model` attached to a relay with room for so many tokens."""
    from tierstore.adapters.transformers import attach_engine, geometry_of

    relay = Relay(QueryRecorder(full_engine(geometry_of(model), tokens), WINDOW))
    with attach_engine(model, relay) as cache:
        yield cache, relay
