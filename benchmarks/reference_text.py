"""A text whose sparse attention is computed once more, slowly, in float64 and from the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention.layer import SEAL_BLOCKS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from tierstore.adapters.attention import Geometry
    from tierstore.adapters.presets import Preset

    Numbers = npt.NDArray[np.float64]


class ReferenceText:
    """Keys and values of one sequence in float64, and which of its tokens are in blocks.

    It follows preset ``exact`` and shares no code with it: the best blocks are those with the
    greatest attention of the KV head's queries, each query's attention adding up to 1 over all
    tokens; attended are these, the sinks, and what is not yet in a block.

    Parameters
    ----------
    budget: share of the context that a step selects.
    """

    def __init__(self, geometry: Geometry, preset: Preset, budget: float, scale: float) -> None:
        self._geometry, self._preset = geometry, preset
        self._budget, self._scale = budget, scale
        shape = geometry.layers, geometry.kv_heads, 0
        self._keys = np.zeros((*shape, geometry.head_dim))
        self._values = np.zeros((*shape, geometry.value_size))
        self._blocks = 0

    def __len__(self) -> int:
        return self._keys.shape[2]

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take in tokens [layers, Hkv, n, .]: a prompt, or one."""
        is_prompt = not len(self)
        self._keys = np.concatenate([self._keys, key.double().numpy()], 2)
        self._values = np.concatenate([self._values, value.double().numpy()], 2)
        if is_prompt:
            self._seal(least=0)

    def attention(self, query: torch.Tensor) -> Numbers:
        """Of the last token's queries [layers, Hq, d]: [layers, Hq, e]."""
        shape = self._geometry
        out = np.empty((shape.layers, shape.query_heads, shape.value_size))
        for layer in range(shape.layers):
            for head in range(shape.kv_heads):
                own = slice(head * shape.group, (head + 1) * shape.group)
                queries = query[layer, own].double().numpy()
                logits = queries @ self._keys[layer, head].T * self._scale
                seen = self._attended(logits)
                weights = np.exp(logits[:, seen] - logits[:, seen].max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                out[layer, own] = weights @ self._values[layer, head, seen]
        return out

    def after_step(self) -> None:
        """Tokens that have piled up beyond the local window become blocks."""
        self._seal(least=SEAL_BLOCKS)

    def _seal(self, least: int) -> None:
        size = self._preset.block_tokens
        outside = len(self) - self._blocks * size
        beyond = (outside - self._preset.sinks - self._preset.local) // size
        if beyond >= max(least, 1):
            self._blocks += beyond

    def _attended(self, logits: Numbers) -> npt.NDArray[np.intp]:
        """Places of the tokens that a row with these logits [G, n] attends to."""
        sinks, size = self._preset.sinks, self._preset.block_tokens
        end = sinks + self._blocks * size
        weights = np.exp(logits - logits.max(1, keepdims=True))
        mass = (weights / weights.sum(1, keepdims=True)).sum(0)[sinks:end]
        room = min(self._blocks, max(1, int(np.ceil(len(self) * self._budget / size - 1e-9))))
        best = np.argsort(mass.reshape(-1, size).sum(1))[::-1][:room]
        inside = (sinks + best[:, None] * size + np.arange(size)).reshape(-1)
        rest = np.arange(end, len(self))
        return np.concatenate([np.arange(min(sinks, len(self))), inside, rest])
