"""A language model with one kind of cache, timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tierstore.adapters.generate import next_logits, own_cache
from tierstore.benchmarks.language import sharing_weights
from tierstore.benchmarks.steps import Steps, time_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from tierstore.adapters.generate import TierOptions
    from tierstore.adapters.transformers import TierCache


class Subject:
    """Shares its weights with other subjects, and keeps its cache from call to call.

    Parameters
    ----------
    tiers: where keys and values are; None for transformers' own `DynamicCache`.
    """

    def __init__(self, model: PreTrainedModel, tiers: TierOptions | None) -> None:
        self._model = sharing_weights(model)
        self._tiers: TierCache | None = None if tiers is None else tiers.attach(self._model)
        self._cache: Mapping[str, object] = {}

    def prefill(self, text: Sequence[int]) -> float:
        """Forget everything and compute `text`; returns the seconds."""
        if self._tiers is None:
            self._cache = own_cache(self._model)
        else:
            self._tiers.reset()
            self._cache = self._tiers.kwargs
        start = time.perf_counter()
        next_logits(self._model, text, self._cache)
        return time.perf_counter() - start

    def decode(self, tokens: Sequence[int]) -> Steps:
        """Feed `tokens` one by one; a step ends when the next token is known, as in generation."""
        return time_steps(
            lambda token: int(next_logits(self._model, [token], self._cache).argmax()), tokens
        )

    def report(self) -> dict[str, object] | None:
        """What its tiers did; None without tiers."""
        return None if self._tiers is None else self._tiers.report().to_dict()

    def close(self) -> None:
        """Free memory and files."""
        if self._tiers is not None:
            self._tiers.close()
