"""Several attention engines behind one model, so that one prefill serves them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.attention.forwarding import Forwarding
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tierstore.adapters.attention import SparseAttention


class Alternatives(Forwarding):
    """An engine made of engines: several tokens at once go to all, a single one to the chosen one.

    For one sequence without padding. Before another engine is chosen, single tokens have to be
    cropped again, so that all hold the same text.
    """

    def __init__(self, engines: Mapping[str, SparseAttention]) -> None:
        self._engines = dict(engines)
        super().__init__(next(iter(self._engines.values())))

    def choose(self, name: str) -> None:
        """Let engine `name` attend from now on."""
        if name not in self._engines:
            raise ConfigError(f"engine {name!r}: expected one of {', '.join(self._engines)}")
        self.engine = self._engines[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be chosen."""
        return tuple(self._engines)

    def on_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        if query.shape[2] > 1:
            for engine in self._engines.values():
                if engine is not self.engine:
                    engine.absorb(layer, key, value, query=query, scale=scale)

    def reset(self) -> None:
        for engine in self._engines.values():
            engine.reset()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
