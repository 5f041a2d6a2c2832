"""What exists while sequences are stored: block store, layers, work space; and a step's stages."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import kernels
from tierstore.adapters.attention import attended, exact
from tierstore.adapters.attention.admission import check_room
from tierstore.adapters.attention.capacity import fit_middle_tiers, reserve_backing
from tierstore.adapters.attention.lanes import Lanes
from tierstore.adapters.attention.layer import Layer, Sealed
from tierstore.adapters.attention.selection import of_rows
from tierstore.adapters.attention.sharing import Sharing
from tierstore.arrays import as_array
from tierstore.errors import CapacityError, TierstoreError
from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.policies import LRU
from tierstore.policies.profile import ReuseProfile
from tierstore.scratch import Scratch
from tierstore.store import BlockStore, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierstore.adapters.attention.lanes import Admitted
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Pointers, Selection, Tier
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout

Failures = dict[int, Exception]
"""Lane to the error that ended its sequence."""

_STAGING_BLOCKS = 64
"""Blocks per KV head that a later turn reads at once."""


class Batch:
    """The stored past of some sequences, each in a lane of its own.

    Parameters
    ----------
    admitted: what each of the first sequences is let in for, to reserve room.
    scale: factor on the logits.
    """

    def __init__(
        self,
        rules: Rules,
        layout: BlockLayout,
        tiers: Sequence[Tier],
        admitted: Sequence[Admitted],
        scale: float,
    ) -> None:
        geometry, preset = rules.geometry, rules.preset
        self.rules, self.scale = rules, scale
        self.lanes = Lanes(admitted)
        self.attended: dict[int, list[list[int]]] = {}
        rows = geometry.layers * geometry.kv_heads
        blocks = self.lanes.blocks(preset)
        policies: list[EvictionPolicy] = [LRU() for _ in tiers[1:]]
        profile: ReuseProfile | None = None
        if rules.recalibrate is not None:
            policies[0] = profile = ReuseProfile(preset.policy(), rules.recalibrate // 4)
        elif policies:
            policies[0] = preset.policy()
        self.store = BlockStore(
            layout, tiers, policies, segments=rows * len(admitted), blocks_each=int(blocks.max())
        )
        self._device_memory = device_memory = tiers[0].memory or self.store.memory
        self._scratch = Scratch(self.store.memory)
        self._device_scratch = (
            self._scratch if device_memory is self.store.memory else Scratch(device_memory)
        )
        self._shape = kernels.BlockShape(
            preset.block_tokens,
            geometry.head_dim,
            geometry.value_size,
            preset.block_tokens * geometry.head_dim,
        )
        index_shape = IndexShape(
            geometry.group, geometry.head_dim, geometry.dtype, preset.block_tokens, scale,
            device_memory, self._device_scratch, self.store.memory, self._scratch,
            geometry.kv_heads,
        )  # fmt: skip
        self.layers = [
            Layer(
                geometry, preset, self.store, preset.index(index_shape), device_memory,
                len(admitted),
            )
            for _ in range(geometry.layers)
        ]  # fmt: skip
        reserve_backing(self.store, rows * int(blocks.sum()))
        fit_middle_tiers(self.store, rows * int(blocks.sum()))
        self.sharing = Sharing(rules, self.store, self.layers, self.lanes, profile)
        self._fetched: int | None = None
        """Blocks fetched before the running step; None before the first that selects."""
        self._lse: Array = np.empty((0, 0), np.float32)
        self._weights: Array = np.empty((0, 0, 0), np.float32)

    @property
    def tokens(self) -> Pointers:
        """Tokens of the sequence in each lane."""
        return self.lanes.tokens

    @property
    def index_bytes(self) -> int:
        """Bytes of all layers' indexes."""
        return sum(layer.index.nbytes for layer in self.layers)

    # Many new tokens

    def extend(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        lanes: Sequence[int],
    ) -> torch.Tensor:
        """Exact attention of new tokens [B, ., T, .] over past and themselves; then store them."""
        layer, new = self.layers[number], query.shape[2]
        starts = layer.is_empty(lanes)
        if number == 0:
            counts = new if valid is None else valid.sum(1).cpu().numpy()
            self.tokens[lanes] += counts
        if starts and (valid is None or bool(valid.all())):
            out = exact.causal(query, key, value, self.scale).transpose(1, 2)
            for row, lane in enumerate(lanes):
                self._store(number, lane, query[row], key[row], value[row])
            return out
        out = query.new_zeros(len(lanes), new, query.shape[1], value.shape[-1])
        for row, lane in enumerate(lanes):
            chosen = slice(None) if valid is None else valid[row].nonzero()[:, 0]
            q, k, v = query[row][:, chosen], key[row][:, chosen], value[row][:, chosen]
            if starts:
                part = exact.causal(q[None], k[None], v[None], self.scale)[0]
            else:
                part = exact.over_past(q, k, v, layer.past(lane, self._staging()), self.scale)
            out[row, chosen] = part.transpose(0, 1).to(out.dtype)
            self._store(number, lane, q, k, v)
        return out

    def absorb(
        self, number: int, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor | None
    ) -> None:
        """Store new tokens [B, ., T, .] without attending; `query`: the last ones', if known."""
        if number == 0:
            self.tokens[:] += key.shape[2]
        for sequence in range(self.layers[number].sequences):
            last = None if query is None else query[sequence]
            self._store(number, sequence, last, key[sequence], value[sequence])

    def _staging(self) -> Bytes:
        shape = (self.rules.geometry.kv_heads * _STAGING_BLOCKS, self.store.layout.block_bytes)
        staging: Bytes = self._scratch.array("staging", shape, np.uint8)
        return staging

    def _store(
        self,
        number: int,
        sequence: int,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Take tokens [., n, .] in; blocks start where the last queries' attention ranks them."""
        layer, geometry = self.layers[number], self.rules.geometry
        sealed = layer.absorb(sequence, key, value)
        if sealed is None:
            return
        last = None
        if query is not None:
            last = query[:, -self.rules.preset.observation :].unflatten(
                0, (geometry.kv_heads, geometry.group)
            )
        self._index(number, sealed, last)
        homes = None if last is None else self.sharing.homes(layer, sealed, last, self.scale)
        layer.store_tokens(sealed, homes)

    def _index(self, number: int, sealed: Sealed, last: torch.Tensor | None) -> None:
        layer = self.layers[number]
        first_block = int(layer.blocks[layer.rows(sealed.sequence)][0])
        layer.index_tokens(sealed, IndexContext(first_block, last))
        self.sharing.index_grew(layer, sealed, self._device_memory)

    # One new token per sequence

    def step(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor | None,
        failures: Failures | None = None,
    ) -> torch.Tensor:
        """Select, judge, fetch, attend, update: one token [B, ., 1, .] in every lane.

        failures: takes the error of each lane that fails; without it, the first one is raised.
        """
        layer, geometry = self.layers[number], self.rules.geometry
        if number == 0:
            self._begin_step(valid)
        rows = len(layer.segments)
        layer.append_token(
            as_array(key.reshape(rows, -1)), as_array(value.reshape(rows, -1)), self._keep
        )
        out = query.new_empty((rows, geometry.group, geometry.value_size))
        q = as_array(query.reshape(rows, geometry.group, geometry.head_dim))
        if self._has_blocks:
            self._attend_blocks(number, q, out, failures)
        else:
            self._take_work_space(layer, 0)
            every = slice(0, rows)
            self._attend(layer, q, _nothing(rows), every, out, merge=False)
            self._note(number, _nothing(rows), every, is_first=True)
        for sequence in [full for full in self._full if self.lanes.live[full]]:
            with self._contained(sequence, failures):
                sealed = layer.absorb(sequence, key[sequence, :, :0], value[sequence, :, :0])
                assert sealed is not None
                self._index(number, sealed, None)
                layer.store_tokens(sealed, None)
        return out.view(layer.sequences, 1, geometry.query_heads, geometry.value_size)

    def _begin_step(self, valid: torch.Tensor | None) -> None:
        """What is the same in every layer of a step; the layers are in the same state."""
        layer = self.layers[0]
        taking = np.ones(layer.sequences, np.bool_) if valid is None else valid[:, 0].cpu().numpy()
        self._keep = taking & self.lanes.live
        self.tokens[:] += self._keep
        self._budgets: Ids = self.sharing.of_step(self._keep)
        self._has_blocks = bool(layer.blocks.any())
        fetched = self.store.metrics.fetched
        if self._fetched is not None:
            size = self.store.layout.block_bytes
            self.rules.hysteresis.after_step((fetched - self._fetched) * size)
        self._fetched = fetched if self._has_blocks else None
        self._full = layer.full_sequences(self._keep)

    def _attend_blocks(
        self, number: int, query: Array, out: torch.Tensor, failures: Failures | None
    ) -> None:
        """Attend to what the index selects, all lanes together or, if that fails, one by one."""
        layer = self.layers[number]
        beside = self._device_scratch.array("beside", query.shape[:2], np.float32)
        kernels.weigh_strips(query, layer.strip_key, layer.strip_length, self.scale, beside)
        selection = layer.index.select(query, self._budgets[number], beside)
        if self.rules.on_selection is not None:
            self.rules.on_selection(number, layer.blocks, selection)
        longest = int((selection.row_ptr[1:] - selection.row_ptr[:-1]).max())
        # A visit pins blocks, so the work space must be there before: taking it may move some.
        self._take_work_space(layer, max(longest, self.sharing.most_residents))
        try:
            self._attend_selected(number, query, selection, slice(0, len(query)), out)
        except Exception:
            if failures is None:
                raise
            for lane in np.flatnonzero(self._keep & self.lanes.live).tolist():
                rows = layer.rows(lane)
                with self._contained(lane, failures):
                    self._attend_selected(number, query, of_rows(selection, rows), rows, out)

    def _attend_selected(
        self, number: int, query: Array, selection: Selection, rows: slice, out: torch.Tensor
    ) -> None:
        """Attend to the blocks selected for `rows`, in one visit or several merged in float32."""
        layer = self.layers[number]
        segments, rows_out = layer.segments[rows], out[rows]
        partial: torch.Tensor | None = None
        delta = self.rules.hysteresis.delta
        with closing(self.store.visit(selection, segments, hysteresis=delta)) as visits:
            for i, visit in enumerate(visits):
                if visit.is_whole and self.rules.attends_residents:
                    visit = self.store.residents(segments)
                elif not visit.is_whole and partial is None:
                    partial = torch.zeros(rows_out.shape, dtype=torch.float32, device=out.device)
                target = rows_out if partial is None else partial
                self._attend(layer, query, visit, rows, target, merge=i > 0)
                self._note(number, visit, rows, is_first=i == 0)
        if partial is not None:
            rows_out.copy_(partial)

    def _attend(
        self,
        layer: Layer,
        query: Array,
        visit: Visit,
        rows: slice,
        out: torch.Tensor,
        *,
        merge: bool,
    ) -> None:
        """Blocks of a visit, and at the first visit the strips, of `rows`."""
        length = layer.strip_length[rows]
        kernels.attend_blocks(
            query[rows], self._pool(), self._shape, visit.row_ptr, visit.slots, visit.valid,
            layer.strip_key[rows], layer.strip_value[rows], np.zeros_like(length) if merge
            else length, self.scale, as_array(out), self._lse[rows], self._weights[rows],
            merge=merge,
        )  # fmt: skip

    @contextmanager
    def _contained(self, lane: int, failures: Failures | None) -> Iterator[None]:
        """Let an error end the sequence of one lane, and no other."""
        try:
            yield
        except Exception as error:
            if failures is None:
                raise
            failures[lane] = error
            self.give_up(lane, error)

    def _take_work_space(self, layer: Layer, blocks: int) -> None:
        """Room for the weights of rows of so many blocks."""
        rows, group = len(layer.segments), self.rules.geometry.group
        width = blocks * self.rules.preset.block_tokens + layer.strip_room
        if self._weights.shape[0] != rows or self._weights.shape[2] < width:
            array = self._device_scratch.array
            self._lse = array("lse", (rows, group), np.float32)
            self._weights = array("weights", (rows, group, width), np.float32)

    def _pool(self) -> Array:
        """The top tier's slots as elements."""
        view = self.store.tiers[0].view
        return view.view(self.layers[0].strip_key.dtype)

    def _note(self, number: int, visit: Visit, rows: slice, *, is_first: bool) -> None:
        """Remember the token positions that each of `rows` of a layer attends to."""
        if not self.rules.record:
            return
        layer, sinks = self.layers[number], self.rules.preset.sinks
        if is_first:
            known = list(self.attended.get(number, [[]] * len(layer.segments)))
            known[rows] = attended.in_strips(layer, sinks)[rows]
            self.attended[number] = known
        in_blocks = attended.in_blocks(self.store, layer.segments[rows], visit, sinks)
        for row, positions in enumerate(in_blocks, rows.start):
            self.attended[number][row].extend(positions)

    # Lanes

    def admit(self, lane: int, admitted: Admitted) -> None:
        """Let a new sequence have a free lane, which is made if there is none of that number.

        CapacityError, and no change, if it does not fit beside what the others were promised.
        """
        more = 0 if lane < len(self.lanes) else max(1, len(self.lanes) // 4)
        lanes = self.lanes.with_more(more)
        lanes.enter(lane, admitted)
        check_room(self.store, self.layers, self.rules.preset, lanes)
        with self._growing(more):
            blocks = int(lanes.blocks(self.rules.preset).sum())
            reserve_backing(self.store, blocks * self.layers[0].heads * len(self.layers))
        self._use(lanes)

    @contextmanager
    def _growing(self, more: int) -> Iterator[None]:
        """Make so many more lanes, and take them back if that fails or the rest does."""
        before = len(self.lanes)
        with ExitStack() as spare:
            # Taking back copies one array after the other, which needs room that is there now.
            for memory in {self._device_memory, self.store.memory} if more else ():
                held = memory.take(memory.largest_bytes, np.uint8, "work space")
                spare.callback(memory.give, held)
            try:
                for layer in self.layers if more else ():
                    layer.grow(more)
                yield
            except CapacityError:
                spare.close()
                for layer in self.layers:
                    layer.cut(before)
                raise

    def give_up(self, lane: int, error: Exception) -> None:
        """Free a lane whose sequence `error` has ended."""
        try:
            self.clear(lane)
        except TierstoreError as another:
            error.add_note(f"forgetting the sequence: {another}")

    def clear(self, lane: int) -> None:
        """Free a lane; the first error of a policy is raised when all is done."""
        self.lanes.leave(lane)
        errors = []
        for layer in self.layers:
            try:
                layer.clear(lane)
            except TierstoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def crop(self, tokens: int, lanes: Sequence[int]) -> None:
        """Forget the last `tokens` tokens of the sequences in `lanes`."""
        for layer in self.layers:
            for lane in lanes:
                layer.crop(lane, tokens)
        self.tokens[lanes] -= tokens

    def arrange(self, sources: Sequence[int]) -> None:
        """Let lane i be what lane ``sources[i]`` was."""
        for layer in self.layers:
            layer.arrange(sources)
        self._use(self.lanes.arranged(sources))

    def _use(self, lanes: Lanes) -> None:
        self.lanes = self.sharing.lanes = lanes
        self.attended.clear()
        self.sharing.sequences_changed()


def _nothing(rows: int) -> Visit:
    none: Ids = np.empty(0, np.int32)
    return Visit(np.zeros(rows + 1, np.int64), none, none.astype(np.uint8), none, is_whole=True)
