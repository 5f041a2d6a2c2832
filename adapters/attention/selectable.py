"""How much of its attention each head gives to tokens that a budget has to select."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierstore.adapters.attention.forwarding import Forwarding

if TYPE_CHECKING:
    from tierstore.adapters.presets import Preset
    from tierstore.adapters.transformers.engine import AttentionEngine


class SelectableShare(Forwarding):
    """An engine like the one it is given, which measures full attention beside each step.

    For one sequence without padding; it keeps all keys, and is as slow as full attention.
    """

    def __init__(self, engine: AttentionEngine, preset: Preset) -> None:
        super().__init__(engine)
        self._always = preset.sinks, preset.local
        self._keys: list[torch.Tensor]
        self._forget()

    @property
    def shares(self) -> torch.Tensor:
        """float64 [layers, KV heads], the mean over steps and query heads; 0 before the first.

        Counted is the attention to all but the sinks and the local window.
        """
        return self._sums / max(1, self._steps)

    def on_attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> None:
        self._keys[layer] = torch.cat([self._keys[layer], key[0]], 1)
        if query.shape[2] == 1:
            self._sums[layer] += self._share(self._keys[layer], query[0, :, 0], scale)
            self._steps += layer == 0

    def _share(self, keys: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
        sinks, local = self._always
        queries = query.unflatten(0, (len(keys), -1)).float()
        weights = (queries @ keys.float().transpose(1, 2) * scale).softmax(-1)
        share: torch.Tensor = weights[..., sinks:-local].sum(-1).mean(-1).double()
        return share

    def crop(self, tokens: int) -> None:
        self._keys = [keys[:, : keys.shape[1] - tokens] for keys in self._keys]
        super().crop(tokens)

    def reset(self) -> None:
        """Forget the texts, and what was measured."""
        super().reset()
        self._forget()

    def _forget(self) -> None:
        shape = self.geometry
        none = torch.empty(shape.kv_heads, 0, shape.head_dim, dtype=shape.dtype)
        self._keys = [none] * shape.layers
        self._sums = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.float64)
        self._steps = 0

    def close(self) -> None:
        self._keys = []
        super().close()
