"""The cache object that a user passes to an attached model."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, cast

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from tierstore.adapters.transformers.graph import outside_graphs
from tierstore.adapters.transformers.layer import HeldLayer
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

    from transformers.cache_utils import (
        CacheLayerMixin,
        DummyLayer,
        LinearAttentionCacheLayerMixin,
    )

    from tierstore.adapters.attention.report import Report
    from tierstore.adapters.transformers.prefixes import PrefixReuse
    from tierstore.adapters.transformers.session import Session


CACHED_IN = "tierstore_layer"
"""Attribute of a key tensor that leads from the attention call back to the layer of the cache."""


class TierCache(Cache):
    """A transformers cache whose full-attention layers are held by an engine.

    Sliding-window layers are transformers' own. Pass it to every call of the model it was made for,
    as ``**cache.kwargs``. It holds one batch of texts: call `reset` before another one. Leaving the
    ``with`` block, or `close`, gives the model back as it was.
    """

    def __init__(
        self, session: Session, detach: ExitStack, reuse: PrefixReuse | None = None
    ) -> None:
        self._session = session
        self._detach = detach
        self.reuse = reuse
        super().__init__(layers=self._new_layers())

    @property
    def kwargs(self) -> dict[str, TierCache]:
        """The cache under the name by which the installed transformers takes it."""
        return {self._session.profile.keyword: self}

    def report(self) -> Report:
        """What was stored, moved and attended so far."""
        return self._session.engine.report()

    @property
    def loaded_tokens(self) -> list[int]:
        """Tokens of each row that were loaded from prefixes instead of being computed."""
        return [] if self.reuse is None else self.reuse.loaded

    def reset(self) -> None:
        """Forget the text; also what helps after a forward pass that failed."""
        self._require_open()
        self._session.reset()
        self.layers = self._new_layers()

    def close(self) -> None:
        """Give the model its own attention back, and free memory and files. May be called twice."""
        self._session.is_closed = True
        with ExitStack() as stack:
            stack.callback(self._session.engine.close)
            self._detach.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        raise ConfigError(
            "a tierstore cache cannot be copied: generate several continuations of one prompt with "
            "num_return_sequences, or go back to the prompt with cache.crop"
        )

    @outside_graphs
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the layer attends with, marked with the layer of the cache."""
        if self._session.forward is None:
            raise self._session.stray_error()
        layer = cast("HeldLayer | DynamicLayer", self.layers[layer_idx])
        keys, values = layer.update(key_states, value_states)
        setattr(keys, CACHED_IN, layer)
        return keys, values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())
        for layer in self._own_layers():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` selects, in its order; integers or booleans."""
        self._select(torch.arange(self._session.rows, device=indices.device)[indices].tolist())
        for layer in self._own_layers():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._select([row for row in range(self._session.rows) for _ in range(repeats)])
        for layer in self._own_layers():
            layer.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row."""
        self._require_open()
        tokens = -tokens_to_remove
        self._session.check_crop(tokens)
        # Also for none: sliding layers drop what they kept for this.
        for layer in self._own_layers():
            layer.crop(tokens_to_remove)
        if tokens:
            self._session.crop(tokens)
            self._forget_texts()

    def _select(self, rows: list[int]) -> None:
        self._require_open()
        if self._session.rows:
            self._session.select_rows(rows)
            self._forget_texts()

    def _forget_texts(self) -> None:
        if self.reuse is not None:
            self.reuse.forget()

    def _own_layers(self) -> list[DynamicLayer]:
        return [layer for layer in self.layers if isinstance(layer, DynamicLayer)]

    def _new_layers(self) -> list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer]:
        numbers = itertools.count()
        profile = self._session.profile
        return [
            HeldLayer(self._session, next(numbers)) if is_held else layer
            for layer, is_held in zip(profile.own_layers(), profile.held, strict=True)
        ]

    def _require_open(self) -> None:
        if self._session.is_closed:
            raise self._session.stray_error()
