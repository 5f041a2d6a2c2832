"""Tiered sparse attention for one decoder model, whatever framework runs the rest of it."""

from __future__ import annotations

import os
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING

from tierstore.adapters.attention.admission import check_first
from tierstore.adapters.attention.batch import Failures
from tierstore.adapters.attention.calls import check_query, check_valid
from tierstore.adapters.attention.chain import TierFactory, TierSizes, stack_for
from tierstore.adapters.attention.lanes import Admitted, Lanes
from tierstore.adapters.attention.places import check_where
from tierstore.adapters.attention.planning import (
    check_planning,
    micro_batch_for,
    plan_for,
    tuned,
    window_for,
)
from tierstore.adapters.attention.reporting import report_of
from tierstore.adapters.attention.reuse import check_lossless, kept_tokens, load_batch, save_texts
from tierstore.adapters.attention.rules import Rules, filter_for, schedule_for
from tierstore.adapters.attention.running import Running
from tierstore.adapters.attention.sync import check_stalls, sync_level
from tierstore.adapters.presets import Preset, preset_named
from tierstore.arguments import check_whole
from tierstore.errors import ConfigError, PolicyError
from tierstore.hardware import PRESETS
from tierstore.layout import BlockLayout
from tierstore.sizes import MOST, parse_budget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from tierstore.adapters.attention.batch import Batch
    from tierstore.adapters.attention.geometry import Geometry
    from tierstore.adapters.attention.prefixes import Prefixes
    from tierstore.adapters.attention.report import Report
    from tierstore.adapters.attention.rules import SelectionListener
    from tierstore.chain import Tokens
    from tierstore.hardware import Hardware
    from tierstore.policies.plan import Plan
    from tierstore.policies.profile import Amounts
    from tierstore.store import BlockStore
    from tierstore.timeline import Timeline


class SparseAttention:
    """Keeps the KV cache of a model in tiers and attends to the blocks that matter.

    Attention is exact while several new tokens come at once (prefill, a second turn); for a single
    new token per sequence it is sparse: over sinks, local window and the selected blocks.

    Sequences come all together, with the first `attend`; or they join and leave while others run,
    with `add_sequence` and `finish`, and make their tokens in `step`.

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
        or the file of one. Alike by default. Its mean window is then the `window`. What it says of
        the index's clusters replaces the preset's number.
    recalibrate: make the windows' plan anew once, after so many steps, from what they selected; 64
        to 100 are enough. A quarter as many before them only warm up.
    tiers: instead of `fast`, `dram` and `disk`: makes any stack of tiers for a layout. `window`
        then says whether the first tier is a window (a number) or a plain cache (None).
    attend_where: what happens to a selected block that is not in the fast tier: ``"fetch"`` brings
        it there; ``"in-tier"`` attends to it where it lies, if that is memory, and merges;
        ``"auto"`` does for each head and step what costs less.
    hardware: rates of the machine for ``"auto"``, as tierstore roofline measures them; those of the
        reference machine by default.
    record: remember which tokens each step attends to, for `attended`.
    schedule: in which order the stages of a step follow each other, as
        `tierstore.pipeline.schedule` names them; the preset's by default.
    micro_batch: sequences that pass the stages together; by default what the plan says, or a
        quarter of the batch on a GPU over a disk, else all.
    sync: how blocks come from disk: ``"a"`` whole layers, ``"b"`` extents past the page cache,
        ``"c"`` through pages in DRAM, all asked for at once, ``"d"`` as (c) with slots in DRAM
        for each head. Needs `fast`, `dram` and `disk`; attention is the same at every level. By
        default DRAM caches what left the fast tier, before a memory-mapped file.
    stalls: float64 [layers, KV heads] >= 0, how often each head's blocks came from disk in
        another run, from `stalls`: shares out the slots of level (d). Alike by default.
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
        attend_where: str = "fetch",
        hardware: Hardware | None = None,
        sync: str | None = None,
        stalls: Amounts | None = None,
        record: bool = False,
        on_selection: SelectionListener | None = None,
        schedule: str | None = None,
        micro_batch: int | None = None,
    ) -> None:
        given = None if plan is None else plan_for(plan, geometry)
        system = tuned(preset_named(preset), given)
        amount = parse_budget(system.budget if budget is None else budget)
        filter_ = filter_for(hysteresis, system, geometry)
        micro_batch = micro_batch_for(micro_batch, given)
        schedule_name = schedule_for(schedule, micro_batch, system)
        check_where(attend_where, recalibrate, schedule_name)
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
        level = sync_level(sync, schedule_name)
        stalls = check_stalls(stalls, level, geometry, given)
        sizes = TierSizes(fast, dram, disk, disk_codec, keep, level)
        self._stack = stack = stack_for(tiers, sizes, self.layout, geometry.device)
        if len(stack.tiers) == 1:
            window = None
        # An engine that is dropped without close() gives its files back all the same.
        self._close_stack = weakref.finalize(self, stack.close)
        check_planning(window, given, recalibrate)
        self._rules = Rules(
            geometry, system, amount, window, filter_, given, recalibrate, record, on_selection,
            attend_where, hardware or PRESETS["reference"],
            schedule_name, micro_batch,
            level, stalls,
        )  # fmt: skip
        self._running = Running(self._rules, self.layout, stack.tiers)
        self._is_closed = False
        self._process = os.getpid()

    def add_sequence(self, tokens: int, *, budget: float | str | None = None) -> int:
        """Let one more sequence in; returns its number. Its prompt comes next, with `attend`.

        Parameters
        ----------
        tokens: that it may have in the end, prompt and new ones. As long as none has more, none
            runs out of room for its blocks.
        budget: share of its context, or tokens, that a step selects; the engine's by default.

        CapacityError if it does not fit beside what the others were let in for: nothing has changed
        then. How much index and work space take is learnt from the sequences there are. So a first
        one, for which they turn out too large, fails later.
        """
        self._check_open()
        self._running.passes.check_between()
        check_whole("tokens", tokens, 1, MOST)
        amount = self._rules.budget if budget is None else parse_budget(budget)
        admitted, known = Admitted(tokens, amount), self._running.passes.sequences
        lane = known.free_lane()
        if self._running.batch is None:
            check_first(Lanes([*known.admitted(), admitted]), self._rules, self._stack.tiers[-1])
        else:
            self._running.batch.admit(lane, admitted)
        return known.enter(lane, admitted)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        sequences: Sequence[int] | None = None,
        scale: float,
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new keys and values, then attend causally over everything stored in the layer.

        Layers are called in order, 0 first, each once per forward pass. After an error, other than
        a ConfigError for these arguments, the named sequences are at an end: `finish` them. Without
        names everything is, and `reset` is the way on.

        Parameters
        ----------
        query: [B, Hq, T, d]. key, value: [B, Hkv, T, d] and [B, Hkv, T, e], the new tokens only.
        valid: bool [B, T]; False marks padding, which is not stored. None: all are text.
        sequences: whose tokens these are, B numbers; by default all sequences'.
        scale: factor on the logits, the same at every call.
        next_query: [B, Hq, 1, d], a guess of what the next layer will ask. The schedule
            ``"previous-layer"`` selects and fetches by it; to all others it means nothing.

        Returns
        -------
        [B, T, Hq, e] in the query's dtype; at padding it is finite and means nothing.
        """
        check_query(self.geometry, query, key, next_query)
        check_valid(valid, key)
        self._check_open()
        running = self._running
        named = running.named(layer, key, value, sequences, scale)
        with running.one_layer(layer, key, named, scale, ends_all=sequences is None) as batch:
            lanes = running.passes.lanes
            if query.shape[2] != 1 or batch.layers[layer].is_empty(lanes):
                return batch.extend(layer, query, key, value, valid, lanes)
            return running.step(batch, layer, (query, key, value), valid, None, next_query)

    def step(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sequences: Sequence[int] | None = None,
        scale: float,
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One more token of each sequence, like `attend`; a failure ends no sequence but its own.

        A sequence is at an end when its blocks cannot be read, written or evicted, or its keys are
        not finite as they are indexed. `failures` then has the error; its blocks are forgotten, and
        it is held until `finish`. Its output means nothing from that layer on.

        Parameters
        ----------
        query: [B, Hq, 1, d]. key, value: [B, Hkv, 1, d] and [B, Hkv, 1, e].
        sequences: whose tokens these are, B numbers, the same in all layers of a pass; by default
            all that are not at an end. Each has had its prompt.
        next_query: [B, Hq, 1, d], as for `attend`.

        Returns
        -------
        [B, 1, Hq, e] in the query's dtype.
        """
        check_query(self.geometry, query, key, next_query)
        if query.shape[2] != 1:
            raise ConfigError(f"query of shape {tuple(query.shape)}: expected T = 1 token")
        self._check_open()
        running, failed = self._running, Failures()
        passes = running.passes
        if sequences is None:
            sequences = passes.taking if layer else self.sequences
        named = running.named(layer, key, value, sequences, scale)
        if layer == 0:
            running.check_prompts(named)
        with running.one_layer(layer, key, named, scale, ends_all=False) as batch:
            out = running.step(batch, layer, (query, key, value), None, failed, next_query)
        for sequence, lane in zip(named, passes.lanes, strict=True):
            if lane in failed:
                passes.sequences.failures[sequence] = failed[lane]
        return out

    def finish(self, sequence: int) -> None:
        """Forget a sequence; what it had is shared out between the others.

        In the middle of a pass in which it takes part, the pass is given up, and the others that
        take part are at an end. PolicyError if a policy raises when it hears of it; the sequence is
        gone then, too.
        """
        self._check_open()
        passes, batch = self._running.passes, self._running.batch
        lane = passes.sequences.lane(sequence)
        if passes.next_layer > 0 and sequence in passes.taking:
            self._running.end(passes.taking, ConfigError("a forward pass of several was given up"))
        passes.check_between()
        if batch is not None and batch.lanes.live[lane]:
            try:
                batch.clear(lane)
            except PolicyError:
                passes.sequences.leave(sequence)
                raise
        passes.sequences.leave(sequence)
        if batch is not None and passes.sequences.numbers:
            batch.sharing.sequences_changed()
        elif batch is not None:
            # Rows as long as the longest sequence ever are in nobody's way any more.
            batch.arrange([])

    @property
    def sequences(self) -> list[int]:
        """Numbers of the sequences that run, in the order in which they came."""
        return self._running.passes.sequences.whole

    @property
    def failures(self) -> Mapping[int, Exception]:
        """What ended each sequence that is at an end and not finished."""
        return MappingProxyType(self._running.passes.sequences.failures)

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
        self._check_open()
        named = self._running.named(layer, key, value, None, scale)
        with self._running.one_layer(layer, key, named, scale, ends_all=True) as batch:
            batch.absorb(layer, key, value, query)

    def load_prefix(
        self,
        prefixes: Prefixes,
        texts: Sequence[Tokens | Sequence[int]],
        *,
        padding: Sequence[int] | None = None,
    ) -> int:
        """Begin with what is kept of texts, one for each sequence, in place of computing it.

        At least two tokens of each text are left to compute. Damage makes it shorter, or nothing.

        Parameters
        ----------
        padding: columns before each text; none by default.

        Returns
        -------
        Columns that need not come any more, the same for all rows: sequence r has its first
        ``columns - padding[r]`` tokens, none if that is negative. 0 where nothing is kept.
        """
        self._check_open()
        known = self._running.passes.sequences
        if self._running.batch is not None or known.numbers:
            raise ConfigError("load_prefix() begins a text, and one is stored: reset() first")
        batch: Batch | None = None
        try:
            batch, columns = load_batch(
                prefixes, self._rules, self.layout, self._stack.tiers, texts, padding
            )
        finally:
            if batch is None:
                self.reset()
        if batch is not None:
            self._running.begin(batch)
            for lane, promised in enumerate(batch.lanes.promised.tolist()):
                known.enter(lane, Admitted(promised, self._rules.budget))
        return columns

    def save_prefix(self, prefixes: Prefixes, texts: Sequence[Tokens | Sequence[int]]) -> list[int]:
        """Keep the beginning of each sequence for `load_prefix`; returns how many tokens of each.

        texts: the tokens that the sequences begin with, as far as attention was exact: not those of
        decoding. Only whole pieces are kept, of some 64 tokens; what is kept already is not written
        again.
        """
        batch = self._stored()
        self._running.passes.check_between()
        batch.settle()
        return save_texts(prefixes, self._rules, batch, texts)

    def kept_tokens(self, tokens: int) -> int:
        """How many tokens `save_prefix` keeps of a text of so many, and `load_prefix` finds."""
        return kept_tokens(self._rules, tokens)

    def check_lossless(self) -> None:
        """ConfigError if a tier is lossy, so that prefixes can be neither loaded nor saved."""
        check_lossless(self._stack.tiers)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make sequence i what the ``rows[i]``-th was: reorders, drops and duplicates sequences.

        They are numbered anew, from 0.
        """
        self._running.select_rows(self._stored(), rows)

    def crop(self, tokens: int, *, sequences: Sequence[int] | None = None) -> None:
        """Forget the last `tokens` tokens of `sequences`, by default of all, in every layer."""
        self._running.crop(self._stored(), tokens, sequences)

    def reset(self) -> None:
        """Forget everything; the next call may bring another number of sequences."""
        self._check_open()
        self._running.end_all()
        self._rules.hysteresis.reset()
        self._stack.clear()

    def close(self) -> None:
        """Free memory and files. Closing twice is allowed."""
        self._is_closed = True
        self._running.end_batch()
        self._close_stack()

    @property
    def store(self) -> BlockStore:
        """The block store; ConfigError before the first tokens."""
        batch = self._stored()
        try:
            batch.settle()
        except BaseException:
            self._running.passes.next_layer = -1
            raise
        return batch.store

    @property
    def wants_next_query(self) -> bool:
        """Whether the schedule makes use of ``next_query=``."""
        return self._rules.schedule == "previous-layer"

    @property
    def plan(self) -> Plan | None:
        """How window and budget are shared out now; None for alike."""
        return self._rules.plan if self._running.batch is None else self._running.batch.sharing.plan

    def stalls(self) -> Amounts:
        """How often each head's blocks had to come from the disk, float64 [layers, KV heads].

        Counted by the pages of sync levels (a), (c) and (d), since the prompt came.
        """
        return self._stored().sharing.stalls()

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
        self._running.watch(timeline)

    def report(self) -> Report:
        """What was stored, moved and attended since the engine was made or reset."""
        return report_of(self._running.batch, self._rules, self._stack.tiers, self.layout)

    def _stored(self) -> Batch:
        self._check_open()
        if self._running.batch is None:
            raise ConfigError("nothing is stored yet: run the model on a prompt first")
        return self._running.batch

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the cache is closed: attach again")
        if os.getpid() != self._process:
            raise ConfigError(
                "the cache belongs to the process that forked this one: make a new one"
            )
