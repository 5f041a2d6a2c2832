"""Where a step attends to blocks that are not in the fast tier: there, or where they lie (K35)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore import kernels
from tierstore.adapters.attention.speculation import SPECULATIVE
from tierstore.adapters.planner.locality import reload_share
from tierstore.below import LEVEL, visit_below
from tierstore.costs import PlaceCosts
from tierstore.errors import ConfigError
from tierstore.kernels.element import is_host, stored_dtype, to_array, to_tensor
from tierstore.policies.windows import WINDOWS

if TYPE_CHECKING:
    from tierstore.adapters.attention.rules import Rules
    from tierstore.costs import Amounts, Flags
    from tierstore.interfaces import Ids, Pointers, Selection
    from tierstore.kernels import BlockShape
    from tierstore.kernels.element import Array
    from tierstore.policies.plan import Plan
    from tierstore.scratch import Scratch
    from tierstore.store import BlockStore
    from tierstore.visits import Visit

ATTEND_WHERE = ("fetch", "in-tier", "auto")

_MOST_USES = 1e6


def check_where(attend_where: str, recalibrate: int | None, schedule: str) -> None:
    """ConfigError for a rule that is none, or that does not go with what else is asked for.

    A recalibration would not see everything, a guess would bring what should stay.
    """
    if attend_where not in ATTEND_WHERE:
        raise ConfigError(
            f"attend_where={attend_where!r}: expected one of {', '.join(ATTEND_WHERE)}"
        )
    if attend_where != "fetch" and recalibrate is not None:
        raise ConfigError(
            f"attend_where={attend_where!r}, recalibrate={recalibrate}: blocks that stay where "
            "they are cannot be counted: pass one or the other"
        )
    if attend_where != "fetch" and schedule in SPECULATIVE:
        raise ConfigError(
            f"attend_where={attend_where!r}, schedule={schedule!r}: blocks that stay where they "
            "are cannot be brought early: pass one or the other"
        )


class Places:
    """Attends to blocks in the tier under the top one, for the rows for which that costs less.

    Parameters
    ----------
    scale: factor on the logits. scratch: work space of the host.
    plan: what is known of each head's reuse; the usual curve without one.
    sequences: in the batch.
    share: of the context that a step selects.
    """

    def __init__(
        self,
        rules: Rules,
        store: BlockStore,
        shape: BlockShape,
        scratch: Scratch,
        scale: float,
        plan: Plan | None,
        sequences: int,
        share: float,
    ) -> None:
        geometry, block_bytes = rules.geometry, store.layout.block_bytes
        # Each number of a block is in one multiply-add with every query head of its group.
        flops = 2.0 * geometry.group * block_bytes / geometry.dtype.itemsize
        self._is_auto = rules.attend_where == "auto"
        self._costs = PlaceCosts.of(
            rules.hardware, block_bytes, flops, uses_all_near=rules.attends_residents
        )
        missed = np.full(
            (geometry.layers, geometry.kv_heads), reload_share(rules.window or 1.0, share)
        )
        if plan is not None and plan.misses is not None:
            missed = _missed(plan)
        uses = 1 / np.clip(missed, 1 / _MOST_USES, 1.0)
        self._uses: Amounts = np.tile(uses, (1, sequences))
        self._store, self._shape, self._scale, self._scratch = store, shape, scale, scratch
        self._element = stored_dtype(geometry.dtype)

    def choose(self, layer: int, misses: Pointers) -> Flags:
        """Rows [R] of a layer whose missing blocks [R] are attended where they lie."""
        if not self._is_auto:
            return np.ones(len(misses), np.bool_)
        return self._costs.stays(misses, self._uses[layer])

    def attend(
        self,
        layer: int,
        segments: Ids,
        query: Array,
        selection: Selection,
        out: Array,
        lse: Array,
    ) -> tuple[Visit | None, Selection]:
        """Attend to blocks where they lie: which these were, and the selection without them.

        query, out, lse: [R, G, d] elements, float32 [R, G, e] and [R, G]; on any device. None, and
        nothing in `out`, where no block stays.
        """
        # Taking work space may move blocks, so all of it is there before the visit.
        host = self._work_space(query, selection, out, lse)
        with visit_below(self._store, selection, segments, partial(self.choose, layer)) as split:
            visit, others = split
            if not len(visit.slots):
                return None, selection
            self._attend(visit, *host)
            if not is_host(out):
                to_tensor(out).copy_(to_tensor(host[1]))
                to_tensor(lse).copy_(to_tensor(host[2]))
            return visit, others

    def _work_space(
        self, query: Array, selection: Selection, out: Array, lse: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Query, result, its log-sum-exp and weights, all in host memory."""
        rows, group, _ = query.shape
        longest = int((selection.row_ptr[1:] - selection.row_ptr[:-1]).max())
        take = self._scratch.array
        weights = take("weights below", (rows, group, longest * self._shape.tokens), np.float32)
        if is_host(out):
            return query, out, lse, weights
        host_out = take("attended below", out.shape, np.float32)
        host_lse = take("lse below", lse.shape, np.float32)
        return to_array(to_tensor(query).cpu()), host_out, host_lse, weights

    def _attend(self, visit: Visit, query: Array, out: Array, lse: Array, weights: Array) -> None:
        """Blocks of a visit and no strip."""
        pool = self._store.tiers[LEVEL].view.view(self._element)
        rows = len(query)
        no_strip = np.zeros((rows, 0, 1), self._element)
        kernels.attend_blocks(
            query, pool, self._shape, visit.row_ptr, visit.slots, visit.valid, no_strip, no_strip,
            np.zeros(rows, np.int32), self._scale, out, lse, weights,
        )  # fmt: skip


def _missed(plan: Plan) -> Amounts:
    """Share of its selected blocks that each head misses with its window, [layers, KV heads]."""
    assert plan.misses is not None
    sizes = plan.windows / plan.shares
    out = np.empty_like(plan.windows)
    for at in np.ndindex(*sizes.shape):
        out[at] = np.interp(sizes[at], WINDOWS, plan.misses[at]) / plan.shares[at]
    return out
