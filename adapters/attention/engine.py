"""Tiered sparse attention for one decoder model, whatever framework runs the rest of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore import kernels
from tierstore.adapters.attention.batch import Batch, Rules
from tierstore.adapters.attention.chain import TierFactory, TierStack, medium_of
from tierstore.adapters.attention.report import Report, TierReport
from tierstore.adapters.presets import Preset, preset_named
from tierstore.errors import ConfigError
from tierstore.layout import BlockLayout
from tierstore.metrics import StoreMetrics
from tierstore.sizes import parse_budget

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.store import BlockStore


class SparseAttention:
    """Keeps the KV cache of a model in tiers and attends to the blocks that matter.

    Attention is exact while several new tokens come at once (prefill, a second turn); for a single
    new
    token per sequence it is sparse: over sinks, local window and the selected blocks.

    One thread at a time.

    Parameters
    ----------
    geometry: sizes of the model.
    preset: which system to be, by name or as a `Preset`.
    budget: share of the context (a float in (0, 1]) or number of tokens that a step selects per KV
        head; the preset's by default. Sinks and local window are attended beside it.
    fast: limit of the fast tier: K and V there, representatives of the index, sinks, local windows
        and work space.
    dram: limit of the DRAM tier: K and V there, directory, the index's lists, policy state,
        staging; without a fast tier also what that would hold.
    disk: directory for the disk tier, which then holds every block. Its files are private and
        disappear with the process, unless `keep`.
    window: capacity of the fast tier in budgets; the preset's by default, less where the limit is
        tight.
    tiers: instead of `fast`, `dram` and `disk`: makes any stack of tiers for a layout. `window`
        then says whether the first tier is a window (a number) or a plain cache (None).
    record: remember which tokens each step attends to, for `attended`.

    Errors
    ------
    ConfigError: an argument is wrong. CapacityError: a limit is too small for the prompt or the
    disk is full; the past is then incomplete, and `reset` is the way on.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        preset: str | Preset = "kvdrive",
        budget: float | str | None = None,
        fast: str | int | None = None,
        dram: str | int | None = None,
        disk: str | Path | None = None,
        keep: bool = False,
        window: float | None = None,
        tiers: TierFactory | None = None,
        record: bool = False,
    ) -> None:
        system = preset_named(preset)
        amount = parse_budget(system.budget if budget is None else budget)
        if window is not None and window < 1:
            raise ConfigError(f"window={window}: expected at least 1 budget, for example window=2")
        if tiers is not None and not fast is dram is disk is None:
            raise ConfigError("tiers= replaces fast=, dram= and disk=: give one or the other")
        self.geometry = geometry
        self.layout = BlockLayout.kv(
            system.block_tokens, geometry.head_dim, geometry.dtype, geometry.value_size
        )
        if tiers is None:
            stack = TierStack.of_sizes(
                self.layout, geometry.device, fast=fast, dram=dram, disk=disk, keep=keep
            )
            window = (window or system.window) if fast is not None else None
        else:
            stack = TierStack(tiers(self.layout))
        self._stack = stack
        if len(stack.tiers) == 1:
            window = None
        self._rules = Rules(geometry, system, amount, window, record)
        self._batch: Batch | None = None
        self._is_closed = False

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
        """Store new keys and values, then attend causally over everything stored in the layer.

        Layers are called in order, 0 first, each once per forward pass.

        Parameters
        ----------
        query: [B, Hq, T, d]. key, value: [B, Hkv, T, d] and [B, Hkv, T, e], the new tokens only.
        valid: bool [B, T]; False marks padding, which is not stored. None: all are text.
        scale: factor on the logits, the same at every call.

        Returns
        -------
        [B, T, Hq, e] in the query's dtype; at padding it is finite and means nothing.
        """
        batch = self._batch_for(key, scale)
        if query.shape[2] == 1 and not batch.layers[layer].is_empty:
            return batch.step(layer, query, key, value, valid)
        return batch.extend(layer, query, key, value, valid)

    def absorb(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        query: torch.Tensor | None = None,
        scale: float,
    ) -> None:
        """Store keys and values without attending: those of a text that was computed elsewhere.

        Layers are called in order, 0 first, each once per text.

        Parameters
        ----------
        key, value: [B, Hkv, T, d] and [B, Hkv, T, e], the new tokens, none of them padding.
        query: [B, Hq, t, d], the last queries of the text. They rank its blocks: the best start
            in the upper tiers; without them, tiers fill as blocks are used.
        scale: factor on the logits, the same at every call.
        """
        self._batch_for(key, scale).absorb(layer, key, value, query)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make sequence i what ``rows[i]`` was: reorders, drops and duplicates sequences."""
        batch = self._stored()
        if not rows or min(rows) < 0 or max(rows) >= len(batch.tokens):
            raise ConfigError(
                f"rows={list(rows)}: expected numbers from 0 to {len(batch.tokens) - 1}"
            )
        if list(rows) != list(range(len(batch.tokens))):
            batch.arrange(rows)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every sequence in every layer."""
        batch = self._stored()
        if not 0 <= tokens <= int(batch.tokens.min()):
            raise ConfigError(
                f"crop of {tokens} tokens: expected 0 to {batch.tokens.min()}, the shortest text"
            )
        batch.crop(tokens)

    def reset(self) -> None:
        """Forget everything; the next call may bring another number of sequences."""
        self._check_open()
        self._batch = None
        self._stack.clear()

    def close(self) -> None:
        """Free memory and files. Closing twice is allowed."""
        self._is_closed = True
        self._batch = None
        self._stack.close()

    @property
    def store(self) -> BlockStore:
        """The block store; ConfigError before the first tokens."""
        return self._stored().store

    def attended(self, layer: int) -> list[list[int]]:
        """Positions of the tokens that each row (sequence x KV head) attended to in the last step.

        Needs ``record=True``.
        """
        if not self._rules.record:
            raise ConfigError("attended() needs record=True: make the engine with it")
        return self._stored().attended[layer]

    def report(self) -> Report:
        """What was stored, moved and attended since the engine was made or reset."""
        batch, rules, tiers = self._batch, self._rules, self._stack.tiers
        metrics = batch.store.metrics if batch else StoreMetrics([tier.name for tier in tiers])
        return Report(
            preset=rules.preset.name,
            budget=rules.budget,
            context_tokens=int(batch.tokens.max()) if batch else 0,
            block_tokens=rules.preset.block_tokens,
            window=self._window(),
            selected_blocks=metrics.selected,
            hit_rate=metrics.hit_rate,
            index_bytes=batch.index_bytes if batch else 0,
            kernels=kernels.backend_of(tiers[0].view),
            tiers=tuple(
                TierReport(
                    name=tier.name,
                    medium=medium_of(tier),
                    limit_bytes=tier.memory.limit_bytes if tier.memory else None,
                    peak_bytes=tier.memory.peak_bytes if tier.memory else tier.used_bytes,
                    hits=counters.hits,
                    bytes_read=counters.bytes_read,
                    bytes_written=counters.bytes_written,
                    evictions=counters.evictions,
                    used_for=tier.memory.by_purpose()
                    if tier.memory
                    else {"slots": tier.used_bytes},
                )
                for tier, counters in zip(tiers, metrics.tiers, strict=True)
            ),
        )

    def _window(self) -> float | None:
        """The fast tier's capacity in budgets, as it came out."""
        batch = self._batch
        if self._rules.window is None or batch is None or not batch.tokens.any():
            return self._rules.window
        selected = int(batch.budgets().sum()) * self.geometry.kv_heads * self.geometry.layers
        return min(self._rules.window, self._stack.tiers[0].capacity / selected)

    def _batch_for(self, key: torch.Tensor, scale: float) -> Batch:
        """The batch that keys [B, Hkv, T, d] belong to; the first ones start it."""
        batch = self._batch
        if batch is None:
            self._check_open()
            sequences, _, tokens, _ = key.shape
            batch = self._batch = Batch(
                self._rules, self.layout, self._stack.tiers, sequences, tokens, scale
            )
        if len(batch.tokens) != key.shape[0]:
            raise ConfigError(
                f"{key.shape[0]} sequences come, {len(batch.tokens)} are stored: "
                "reset() or select_rows() first"
            )
        return batch

    def _stored(self) -> Batch:
        self._check_open()
        if self._batch is None:
            raise ConfigError("nothing is stored yet: run the model on a prompt first")
        return self._batch

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the cache is closed: attach again")
