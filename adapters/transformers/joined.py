"""The session of a model that computes for sequences which join and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.transformers.forward import Forward, new_shape
from tierstore.adapters.transformers.session import Session
from tierstore.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tierstore.adapters.attention import SparseAttention
    from tierstore.adapters.transformers.profile import ModelProfile


class JoinedSession(Session):
    """Hands each forward pass to the engine as the tokens of `sequences`.

    Attributes
    ----------
    sequences: whose rows the next pass brings; None while the model must not be called.
    is_step: whether it is one more token of each, and not a prompt.
    """

    def __init__(self, profile: ModelProfile, engine: SparseAttention) -> None:
        super().__init__(profile, engine)
        self._engine = engine
        self.sequences: Sequence[int] | None = None
        self.is_step = False
        if not all(profile.held):
            raise UnsupportedModelError(
                f"{profile.name} has layers that slide over a window, which keep no sequences "
                "apart: attach it, and generate one batch after the other"
            )

    def begin(self, arguments: Mapping[str, object]) -> None:
        if self.sequences is None:
            raise ConfigError(
                f"this {self.profile.name} computes a continuous batch: use its add() and step(), "
                "or close it first"
            )
        rows, tokens = new_shape(arguments)
        self.forward = Forward(rows, tokens, None, None, self.is_step)

    def finish(self) -> None:
        super().finish()
        # The rows of the next pass may be other ones; each brings its own positions.
        self.rows = self.length = 0

    def check_length(self, tokens: int) -> None:
        """UnsupportedModelError for a text so long that a window or LongRoPE would matter."""
        self._check_window(tokens)
        switch = self.profile.rope_switch
        if switch is not None and tokens > switch:
            raise UnsupportedModelError(
                f"a text of {tokens} tokens: expected at most {switch}, beyond which "
                f"{self.profile.name} rotates the keys of a whole batch differently (LongRoPE)"
            )

    def _through_engine(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        next_query: torch.Tensor | None,
    ) -> torch.Tensor:
        attend = self._engine.step if self.is_step else self._engine.attend
        return attend(
            layer, query, key, value,
            sequences=self.sequences, scale=scale, next_query=next_query,
        )  # fmt: skip
