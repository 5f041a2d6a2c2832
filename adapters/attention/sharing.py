"""Who gets how much: budgets of a step, and the shares of tiers, as contexts grow and change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention.capacity import fit_middle_tiers, fit_top_tier
from tierstore.adapters.attention.planning import live_plan
from tierstore.adapters.attention.sync import fit_dram, stalls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tierstore.adapters.attention.lanes import Lanes
    from tierstore.adapters.attention.layer import Layer, Sealed
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Ids, Pointers
    from tierstore.memory import Memory
    from tierstore.policies import FairShares
    from tierstore.policies.profile import Amounts, ReuseProfile
    from tierstore.store import BlockStore

    Taking = npt.NDArray[np.bool_]
    """bool [B], the lanes that take part in a step."""


class Sharing:
    """Shares tiers and budgets out between the sequences, layers and heads of a batch.

    Parameters
    ----------
    fair: policies of the tiers that all segments share.

    Attributes
    ----------
    lanes: which sequences there are.
    plan: how window and budget are shared out now; None for alike.
    most_residents: blocks that a row attends to at most beside its selection.
    """

    def __init__(
        self,
        rules: Rules,
        store: BlockStore,
        layers: Sequence[Layer],
        lanes: Lanes,
        profile: ReuseProfile | None,
        fair: Sequence[FairShares],
    ) -> None:
        self._fair = fair
        self._rules, self._store, self._layers = rules, store, layers
        self._profile = profile
        self._is_fitted = False
        self.lanes = lanes
        self.plan = rules.plan
        self.most_residents = 0
        self._name_owners()

    # Budgets

    def budgets(self) -> Pointers:
        """Blocks that a row of each lane may select, at least one and at most all."""
        return self.lanes.budgets(self._rules.preset.block_tokens)

    def of_step(self, taking: Taking) -> Ids:
        """Blocks that each row may select in a step of lanes `taking` [B]: int32 [layers, R]."""
        budgets = self._per_head(self.budgets())
        if self.plan is not None:
            budgets = np.maximum(np.rint(budgets * self.plan.shares[:, None]), 1)
        rows = (budgets * taking[:, None]).reshape(len(self._layers), -1)
        chosen: Ids = np.minimum(rows, self._layers[0].blocks).astype(np.int32)
        return chosen

    @property
    def has_counted(self) -> bool:
        """Whether enough steps were counted to `recalibrate`."""
        steps, profile = self._rules.recalibrate, self._profile
        return profile is not None and steps is not None and profile.steps >= steps

    def recalibrate(self) -> None:
        """Share the windows out by what they selected. Requires: `has_counted`, no visit."""
        profile, rules = self._profile, self._rules
        assert profile is not None
        profile.is_counting = False
        self._profile = None
        budgets = self._per_head(self.budgets()[self.lanes.live])
        self.plan = live_plan(profile, self._segments(), budgets, rules, self.plan)
        self._fit(0)

    # Tiers

    def index_grew(self, first: Layer, sealed: Sealed, memory: Memory) -> None:
        """Share the tiers out after the index of the first layer took tokens in."""
        if self._store.backing > 0 and (first is self._layers[0] or not self._is_fitted):
            self._fit(self._index_to_come(first, sealed, memory))
            self._is_fitted = True

    def hold(self) -> None:
        """Share the tiers out to what the lanes have, whose indexes are complete."""
        if self._store.backing > 0:
            self._fit(0)
            self._is_fitted = True

    def sequences_changed(self) -> None:
        """Share the tiers out after sequences came or went, and count reuse from here on."""
        self._name_owners()
        if self._profile is not None:
            self._profile.restart()
        if self._is_fitted and self.lanes.live.any():
            self._fit(0)

    def _name_owners(self) -> None:
        """Tell tiers that all segments share which sequence each belongs to."""
        segments = [layer.segments for layer in self._layers]
        lanes = np.repeat(np.arange(len(self.lanes), dtype=np.int32), self._layers[0].heads)
        for policy in self._fair:
            policy.own(np.concatenate(segments), np.tile(lanes, len(segments)))

    def _index_to_come(self, layer: Layer, sealed: Sealed, memory: Memory) -> int:
        """Device bytes that the index of all other layers and sequences will take, by the first."""
        if self._is_fitted:
            # The other layers will grow as the first one has.
            return sum(max(0, layer.index.nbytes - each.index.nbytes) for each in self._layers)
        indexed = sealed.keys.shape[1] * layer.heads
        expected = int(self.lanes.tokens.sum()) * layer.heads * len(self._layers)
        so_far = memory.by_purpose().get("index", 0)
        return so_far * (expected - indexed) // indexed

    def _fit(self, index_to_come: int) -> None:
        rules, heads, live = self._rules, self._layers[0].heads, self.lanes.live
        stored = self.lanes.tokens[live] // rules.preset.block_tokens + 1
        useful = self._per_head(stored)
        if rules.window is not None:
            windows = rules.window if self.plan is None else self.plan.windows[:, None]
            useful = np.minimum(np.ceil(self._per_head(self.budgets()[live]) * windows), useful)
        wanted = useful.astype(np.int64).reshape(-1)
        self.most_residents = int(wanted.max()) if rules.attends_residents else 0
        lanes = np.broadcast_to(np.flatnonzero(live)[:, None], useful.shape).reshape(-1)
        fit_top_tier(self._store, self._segments(), wanted, index_to_come, lanes)
        if rules.sync is None:
            tokens = int(self.lanes.tokens.sum())
            each = tokens // rules.preset.block_tokens
            fit_middle_tiers(self._store, each * heads * len(self._layers))
        elif rules.sync.pinned:
            blocks = self._per_head(stored).astype(np.int64)
            fit_dram(self._store, rules.sync, self._segments(), rules.stalls, blocks)

    def stalls(self) -> Amounts:
        """How often each head's blocks came from the disk, float64 [layers, KV heads]."""
        shape = len(self._layers), -1, self._layers[0].heads
        stalls: Amounts = stalls_of(self._store, self._segments()).reshape(shape).sum(1)
        return stalls

    def _segments(self) -> Ids:
        """Segments of sequences: (layer, sequence, KV head), the last changing fastest."""
        own = np.repeat(self.lanes.live, self._layers[0].heads)
        return np.concatenate([layer.segments[own] for layer in self._layers])

    def _per_head(self, per_sequence: Pointers) -> Amounts:
        """A number of each sequence for all its heads: float64 [layers, sequences, KV heads]."""
        shape = len(self._layers), len(per_sequence), self._layers[0].heads
        return np.broadcast_to(per_sequence[:, None].astype(np.float64), shape)
