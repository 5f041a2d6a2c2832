"""Tiered sparse attention for one decoder model, whatever framework runs the rest of it."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tierstore import kernels
from tierstore.adapters.attention.batch import Batch
from tierstore.adapters.attention.chain import TierFactory, TierSizes, stack_for
from tierstore.adapters.attention.planning import check_planning, plan_for, window_for
from tierstore.adapters.attention.report import Report, TierReport
from tierstore.adapters.attention.rules import Rules, filter_for, schedule_for
from tierstore.adapters.presets import Preset, preset_named
from tierstore.errors import ConfigError
from tierstore.layout import BlockLayout
from tierstore.metrics import StoreMetrics
from tierstore.sizes import parse_budget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.rules import SelectionListener
    from tierstore.policies.plan import Plan
    from tierstore.store import BlockStore
    from tierstore.timeline import Timeline


class SparseAttention:
    """Keeps the KV cache of a model in tiers and attends to the blocks that matter.

    Attention is exact while several new tokens come at once (prefill, a second turn); for a single
    new token per sequence it is sparse: over sinks, local window and the selected blocks.

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
    disk_codec: name of the codec of blocks on disk, in a `FileTier`: checksummed extents, read past
        the page cache. With a lossy one, blocks come back within its error bound. None for a
        memory-mapped file.
    window: capacity of the fast tier in budgets; the preset's by default, less where the limit is
        tight.
    hysteresis: nats of log score by which a selected block that is not in the first tier must beat
        the last one selected in its row to be fetched; or the bytes that a step should fetch, such
        as ``"512KiB"``, which the nats then follow. What is not fetched is not attended; everything
        in the fast tier is. 0 fetches all; the preset's by default.
    plan: how the window, and perhaps the budget, is shared out between layers and heads: a `Plan`,
        or the file of one. Alike by default. Its mean window is then the `window`.
    recalibrate: make the windows' plan anew once, after so many steps, from what they selected; 64
        to 100 are enough. A quarter as many before them only warm up.
    tiers: instead of `fast`, `dram` and `disk`: makes any stack of tiers for a layout. `window`
        then says whether the first tier is a window (a number) or a plain cache (None).
    record: remember which tokens each step attends to, for `attended`.
    schedule: in which order the stages of a step follow each other, as
        `tierstore.pipeline.schedule` names them; the preset's by default.
    micro_batch: sequences that pass the stages together; by default a quarter of the batch where
        the last tier is a disk, else all.
    on_selection: is called with what each step selects in each layer, as
        ``(layer, blocks of its rows, selection)``; the arrays are valid during the call. See
        `tierstore.traces.recorder`.

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
        disk_codec: str | None = None,
        keep: bool = False,
        window: float | None = None,
        hysteresis: float | str | None = None,
        plan: Plan | str | Path | None = None,
        recalibrate: int | None = None,
        tiers: TierFactory | None = None,
        record: bool = False,
        on_selection: SelectionListener | None = None,
        schedule: str | None = None,
        micro_batch: int | None = None,
    ) -> None:
        system = preset_named(preset)
        amount = parse_budget(system.budget if budget is None else budget)
        filter_ = filter_for(hysteresis, system, geometry)
        schedule_name = schedule_for(schedule, micro_batch, system)
        given = None if plan is None else plan_for(plan, geometry)
        window = window_for(
            window,
            given,
            fallback=system.window if tiers is None else None,
            has_fast=fast is not None or tiers is not None,
        )
        self.geometry = geometry
        self.layout = BlockLayout.kv(
            system.block_tokens, geometry.head_dim, geometry.dtype, geometry.value_size
        )
        sizes = TierSizes(fast, dram, disk, disk_codec, keep)
        self._stack = stack = stack_for(tiers, sizes, self.layout, geometry.device)
        if len(stack.tiers) == 1:
            window = None
        # An engine that is dropped without close() gives its files back all the same.
        self._close_stack = weakref.finalize(self, stack.close)
        check_planning(window, given, recalibrate)
        self._rules = Rules(
            geometry, system, amount, window, filter_, given, recalibrate, record, on_selection,
            schedule_name, micro_batch,
        )  # fmt: skip
        self._batch: Batch | None = None
        self._timeline: Timeline | None = None
        self._next_layer = 0
        self._is_closed = False
        self._process = os.getpid()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        scale: float,
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new keys and values, then attend causally over everything stored in the layer.

        Layers are called in order, 0 first, each once per forward pass.

        Parameters
        ----------
        query: [B, Hq, T, d]. key, value: [B, Hkv, T, d] and [B, Hkv, T, e], the new tokens only.
        valid: bool [B, T]; False marks padding, which is not stored. None: all are text.
        scale: factor on the logits, the same at every call.
        next_query: [B, Hq, 1, d], a guess of what the next layer will ask. The schedule
            ``"previous-layer"`` fetches by it; to all others it means nothing.

        Returns
        -------
        [B, T, Hq, e] in the query's dtype; at padding it is finite and means nothing.
        """
        if query.shape[1::2] != (self.geometry.query_heads, self.geometry.head_dim):
            raise ConfigError(
                f"query of shape {tuple(query.shape)}: expected [B, Hq, T, d] of {self.geometry}"
            )
        if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
            raise ConfigError(
                f"query {tuple(query.shape)} beside key {tuple(key.shape)}: expected the same "
                "sequences and tokens in both"
            )
        if valid is not None and (valid.dtype != torch.bool or valid.shape != key.shape[::2]):
            raise ConfigError(
                f"valid of shape {tuple(valid.shape)}, {valid.dtype}: expected bool "
                f"{tuple(key.shape[::2])}"
            )
        batch = self._batch_for(layer, key, value, scale)
        if query.shape[2] == 1 and not batch.layers[layer].is_empty:
            out = batch.step(layer, query, key, value, valid, next_query)
        else:
            out = batch.extend(layer, query, key, value, valid)
        self._next_layer = (layer + 1) % self.geometry.layers
        return out

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
        self._batch_for(layer, key, value, scale).absorb(layer, key, value, query)
        self._next_layer = (layer + 1) % self.geometry.layers

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make sequence i what ``rows[i]`` was: reorders, drops and duplicates sequences."""
        batch = self._stored()
        if not rows or min(rows) < 0 or max(rows) >= len(batch.tokens):
            raise ConfigError(
                f"rows={list(rows)}: expected numbers from 0 to {len(batch.tokens) - 1}"
            )
        if list(rows) != list(range(len(batch.tokens))):
            with self._changing():
                batch.arrange(rows)

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every sequence in every layer."""
        batch = self._stored()
        if not 0 <= tokens <= int(batch.tokens.min()):
            raise ConfigError(
                f"crop of {tokens} tokens: expected 0 to {batch.tokens.min()}, the shortest text"
            )
        with self._changing():
            batch.crop(tokens)

    def reset(self) -> None:
        """Forget everything; the next call may bring another number of sequences."""
        self._check_open()
        self._end_batch()
        self._next_layer = 0
        self._rules.hysteresis.reset()
        self._stack.clear()

    def close(self) -> None:
        """Free memory and files. Closing twice is allowed."""
        self._is_closed = True
        self._end_batch()
        self._close_stack()

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
            self._batch = None

    @property
    def store(self) -> BlockStore:
        """The block store; ConfigError before the first tokens."""
        batch = self._stored()
        try:
            batch.settle()
        except BaseException:
            self._next_layer = -1
            raise
        return batch.store

    @property
    def plan(self) -> Plan | None:
        """How window and budget are shared out now; None for alike."""
        return self._rules.plan if self._batch is None else self._batch.plan

    def attended(self, layer: int) -> list[list[int]]:
        """Positions of the tokens that each row (sequence x KV head) attended to in the last step.

        Needs ``record=True``.
        """
        if not self._rules.record:
            raise ConfigError("attended() needs record=True: make the engine with it")
        attended = self._stored().attended
        if layer not in attended:
            raise ConfigError(f"layer {layer} has made no step yet: known are {sorted(attended)}")
        return attended[layer]

    def watch(self, timeline: Timeline | None) -> None:
        """Note in a timeline when each stage and each transfer runs; None ends it."""
        self._timeline = timeline
        if self._batch is not None:
            self._batch.watch(timeline)

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
            fetched_bytes=metrics.fetched * self.layout.block_bytes,
            filtered_bytes=metrics.filtered * self.layout.block_bytes,
            hysteresis=rules.hysteresis.delta,
            index_bytes=batch.index_bytes if batch else 0,
            kernels=kernels.backend_of(tiers[0].view),
            tiers=tuple(
                TierReport(
                    name=tier.name,
                    medium=tier.medium,
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

    def _batch_for(self, layer: int, key: torch.Tensor, value: torch.Tensor, scale: float) -> Batch:
        """The batch that keys [B, Hkv, T, d] belong to; the first ones start it.

        No layer is next until the call has succeeded: half a pass is worth nothing.
        """
        batch, geometry = self._batch, self.geometry
        if (
            key.shape[1::2] != (geometry.kv_heads, geometry.head_dim)
            or value.shape[1::2] != (geometry.kv_heads, geometry.value_size)
            or key.shape[:3] != value.shape[:3]
            or not key.dtype == value.dtype == geometry.dtype
        ):
            raise ConfigError(
                f"key {tuple(key.shape)} of {key.dtype} and value {tuple(value.shape)} of "
                f"{value.dtype}: expected [B, heads, T, dim] of {geometry}"
            )
        self._check_whole()
        if batch is not None and len(batch.tokens) != key.shape[0]:
            raise ConfigError(
                f"{key.shape[0]} sequences come, {len(batch.tokens)} are stored: "
                "reset() or select_rows() first"
            )
        if batch is not None and scale != batch.scale:
            raise ConfigError(f"scale={scale}: expected {batch.scale}, as in the calls before")
        if layer != self._next_layer:
            raise ConfigError(
                f"layer {layer} comes, layer {self._next_layer} is next: call every layer once per "
                "pass, in order"
            )
        self._next_layer = -1
        if batch is None:
            sequences, _, tokens, _ = key.shape
            batch = self._batch = Batch(
                self._rules, self.layout, self._stack.tiers, sequences, tokens, scale
            )
            batch.watch(self._timeline)
        return batch

    def _stored(self) -> Batch:
        self._check_open()
        if self._batch is None:
            raise ConfigError("nothing is stored yet: run the model on a prompt first")
        return self._batch

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Between passes, and whole again only if the change succeeds."""
        self._check_whole()
        if self._next_layer != 0:
            raise ConfigError(f"layer {self._next_layer} is next: finish the pass first")
        self._next_layer = -1
        yield
        self._next_layer = 0

    def _check_whole(self) -> None:
        self._check_open()
        if self._next_layer < 0:
            raise ConfigError("an earlier call failed, and what is stored is incomplete: reset()")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the cache is closed: attach again")
        if os.getpid() != self._process:
            raise ConfigError(
                "the cache belongs to the process that forked this one: make a new one"
            )
