"""Several attention engines behind one model, so that one prefill serves them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tierstore.adapters.attention import Geometry, Report, SparseAttention


class Alternatives:
    """An engine made of engines: several tokens at once go to all, a single one to the chosen one.

    For one sequence without padding. Before another engine is chosen, single tokens have to be
    cropped again, so that all hold the same text.
    """

    def __init__(self, engines: Mapping[str, SparseAttention]) -> None:
        self._engines = dict(engines)
        self._chosen = next(iter(self._engines))

    def choose(self, name: str) -> None:
        """Let engine `name` attend from now on."""
        if name not in self._engines:
            raise ConfigError(f"engine {name!r}: expected one of {', '.join(self._engines)}")
        self._chosen = name

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be chosen."""
        return tuple(self._engines)

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
        out = self._engine.attend(layer, query, key, value, valid=valid, scale=scale)
        if query.shape[2] > 1:
            for name, engine in self._engines.items():
                if name != self._chosen:
                    engine.absorb(layer, key, value, query=query, scale=scale)
        return out

    def select_rows(self, rows: Sequence[int]) -> None:
        self._engine.select_rows(rows)

    def crop(self, tokens: int) -> None:
        self._engine.crop(tokens)

    def reset(self) -> None:
        for engine in self._engines.values():
            engine.reset()

    def report(self) -> Report:
        return self._engine.report()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    @property
    def _engine(self) -> SparseAttention:
        return self._engines[self._chosen]
