"""Long contexts made of a captured one: its blocks again and again, in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.adapters.attention import Geometry
from tierstore.benchmarks.synthetic import Token
from tierstore.errors import ConfigError
from tierstore.kernels.element import to_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.interfaces import Pointers
    from tierstore.traces.capture import Capture

BLOCK, SINKS, LOCAL = 4, 4, 64
_STRETCH = 16
"""Blocks that stay next to each other: what a text says at one place is said at one place."""

FIRST_STEP = 16
"""Step that reloads are counted from; before, a window fills up."""

WINDOWS = (1, 2, 3)
MEASURED = {
    1 / 64: (0.362, 0.210, 0.151),
    1 / 32: (0.334, 0.167, 0.107),
    1 / 16: (0.299, 0.121, 0.067),
}
"""Reloads of the demo model by budget and window (three documents, 192 steps, LRU): the share of
selected blocks that a window of so many budgets does not have."""


class ResampledText:
    """A prompt of `tokens` tokens and the steps after it, in some layers of a captured model.

    Sinks, local window and steps are those of the capture. Between them stand all its blocks, in
    stretches that are shuffled anew each time around. A block occurs equally often in every layer,
    so the best share of blocks is what it was, and so is what changes from step to step.
    """

    def __init__(self, seen: Capture, tokens: int, layers: Sequence[int], *, seed: int = 0) -> None:
        self._seen, self._layers = seen, list(layers)
        self.source = resampled_blocks(seen, tokens, seed)
        self.tokens = SINKS + len(self.source) * BLOCK + LOCAL
        self.steps, self.scale = seen.steps, seen.scale
        facts = seen.facts
        self.geometry = Geometry(
            len(self._layers), facts["query_heads"], facts["kv_heads"], facts["head_dim"],
            seen.dtype, torch.device("cpu"),
        )  # fmt: skip

    def context(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, H, tokens, d] of the prompt in one of the layers."""
        layer, end = self._layers[number], self._seen.prompt_tokens
        inside = SINKS + self.source[:, None] * BLOCK + np.arange(BLOCK)
        positions = np.concatenate(
            [np.arange(SINKS), inside.reshape(-1), np.arange(end - LOCAL, end)]
        )
        key, value = (
            to_tensor(np.ascontiguousarray(each[layer][:, positions]))[None]
            for each in (self._seen.keys, self._seen.values)
        )
        return key, value

    def last_queries(self, number: int) -> torch.Tensor:
        """Queries [1, Hq, w, d] of the prompt's last tokens."""
        return to_tensor(self._seen.last_queries[self._layers[number]]).flatten(0, 1)[None]

    def step(self, number: int) -> list[Token]:
        """The token of a step in every layer."""
        at = self._seen.prompt_tokens + number
        return [
            Token(
                to_tensor(self._seen.queries[layer][:, :, number : number + 1]).flatten(0, 1)[None],
                to_tensor(self._seen.keys[layer][:, at : at + 1])[None],
                to_tensor(self._seen.values[layer][:, at : at + 1])[None],
            )
            for layer in self._layers
        ]


def resampled_blocks(seen: Capture, tokens: int, seed: int) -> Pointers:
    """For each block between sinks and local window of a long prompt, the captured one it copies.

    ConfigError if the captured prompt is the longer one.
    """
    have, want = ((n - SINKS - LOCAL) // BLOCK for n in (seen.prompt_tokens, tokens))
    if want < have:
        raise ConfigError(
            f"tokens={tokens}: the captured prompt has {seen.prompt_tokens} already: ask for more"
        )
    random, rounds = np.random.default_rng(seed), -(-want // have)
    stretches = np.array_split(np.arange(have), max(1, have // _STRETCH))
    order = [
        np.concatenate([stretches[i] for i in random.permutation(len(stretches))])
        for _ in range(rounds)
    ]
    blocks: Pointers = np.concatenate(order)[:want].astype(np.int64)
    return blocks


def reloads(
    seen: Capture, source: Pointers, layers: Sequence[int]
) -> dict[float, tuple[float, ...]]:
    """By budget, the reload in windows of 1, 2 and 3 budgets when steps select by true attention.

    source: the captured block behind each block, as of `resampled_blocks`.
    """
    scores = np.stack([true_scores(seen, layer, source) for layer in layers])
    ranked = scores.reshape(-1, *scores.shape[2:])
    tokens = SINKS + len(source) * BLOCK + LOCAL
    found = {}
    for budget in MEASURED:
        best = round(budget * tokens / BLOCK)
        top = np.argpartition(-ranked, best - 1, axis=2)[:, :, :best]
        found[budget] = tuple(_reload(ranked, top, window) for window in WINDOWS)
    return found


def true_scores(seen: Capture, layer: int, source: Pointers) -> npt.NDArray[np.float32]:
    """Attention mass [H, T, n] of each block in each step, the mean over a group's heads."""
    have = (seen.prompt_tokens - SINKS - LOCAL) // BLOCK
    copies = np.bincount(source, minlength=have)
    keys, queries = to_tensor(seen.keys[layer]).float(), to_tensor(seen.queries[layer]).float()
    logits = torch.einsum("hgtd,hnd->hgtn", queries, keys) * seen.scale
    steps, end = logits.shape[2], seen.prompt_tokens
    hidden = torch.arange(keys.shape[1]) > end + torch.arange(steps)[:, None]
    weights = (logits.masked_fill(hidden, -torch.inf) - logits.amax(-1, keepdim=True)).exp()
    blocks = weights[..., SINKS : SINKS + have * BLOCK].unflatten(-1, (have, BLOCK)).sum(-1)
    others = weights.sum(-1) - weights[..., SINKS : SINKS + have * BLOCK].sum(-1)
    total = (blocks * torch.from_numpy(copies)).sum(-1) + others
    mass = (blocks / total[..., None]).mean(1)
    scores: npt.NDArray[np.float32] = mass.numpy()[:, :, source].astype(np.float32)
    return scores


def _reload(scores: npt.NDArray[np.float32], top: npt.NDArray[np.intp], window: int) -> float:
    """What of top [rows, T, K] a window of so many times K, least recently used out, has not.

    Among blocks of one step those with lower scores [rows, T, n] leave first.
    """
    rows, steps, best = top.shape
    used = np.full((rows, scores.shape[2]), -1.0)
    missed = selected = 0
    for step in range(steps):
        ids = top[:, step]
        is_new = np.take_along_axis(used, ids, 1) < 0
        if step >= FIRST_STEP:
            missed, selected = missed + int(is_new.sum()), selected + is_new.size
        rank = np.argsort(np.argsort(np.take_along_axis(scores[:, step], ids, 1), 1), 1)
        np.put_along_axis(used, ids, step + rank / best, 1)
        capacity = window * best
        if capacity < used.shape[1]:
            oldest = np.argpartition(-used, capacity, axis=1)[:, capacity:]
            np.put_along_axis(used, oldest, -1.0, 1)
    return missed / max(1, selected)
