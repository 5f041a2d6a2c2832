"""What exists while sequences are stored: block store, layers, work space; and a step's stages."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tierstore.adapters.attention import exact
from tierstore.adapters.attention.admission import check_room
from tierstore.adapters.attention.attending import Attending, nothing
from tierstore.adapters.attention.capacity import fit_middle_tiers, reserve_backing
from tierstore.adapters.attention.lanes import Lanes
from tierstore.adapters.attention.layer import Layer, Sealed
from tierstore.adapters.attention.places import Places
from tierstore.adapters.attention.sharing import Sharing
from tierstore.adapters.attention.speculation import SPECULATIVE
from tierstore.adapters.attention.stages import Question, Stages
from tierstore.adapters.attention.warm_up import WarmUp
from tierstore.arrays import as_array
from tierstore.below import can_stay
from tierstore.errors import CapacityError, TierstoreError
from tierstore.indexers import IndexShape
from tierstore.interfaces import IndexContext
from tierstore.policies import LRU, FairShares
from tierstore.policies.profile import ReuseProfile
from tierstore.scratch import Scratch
from tierstore.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tierstore.adapters.attention.lanes import Admitted
    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Bytes, EvictionPolicy, Ids, Pointers, Tier
    from tierstore.kernels.element import Array
    from tierstore.layout import BlockLayout
    from tierstore.timeline import Timeline

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
        rows = geometry.layers * geometry.kv_heads
        blocks = self.lanes.blocks(preset)
        partitioned = 2 if rules.sync is not None and rules.sync.pinned else 1
        fair = [FairShares(LRU()) for _ in tiers[1 + partitioned :]]
        policies: list[EvictionPolicy] = [*[LRU() for _ in tiers[1 : 1 + partitioned]], *fair]
        profile: ReuseProfile | None = None
        if rules.recalibrate is not None:
            policies[0] = profile = ReuseProfile(preset.policy(), rules.recalibrate // 4)
        elif policies:
            policies[0] = preset.policy()
        self.store = BlockStore(
            layout, tiers, policies, segments=rows * len(admitted), blocks_each=int(blocks.max()),
            partitioned=partitioned,
        )  # fmt: skip
        self._device_memory = device_memory = tiers[0].memory or self.store.memory
        self._scratch = Scratch(self.store.memory)
        self._device_scratch = (
            self._scratch if device_memory is self.store.memory else Scratch(device_memory)
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
        self.warm_up = WarmUp(self.store, preset, self.layers, scale)
        reserve_backing(self.store, rows * int(blocks.sum()))
        if rules.sync is None:
            fit_middle_tiers(self.store, rows * int(blocks.sum()))
        self.sharing = Sharing(rules, self.store, self.layers, self.lanes, profile, fair)
        self._fetched: int | None = None
        """Blocks fetched before the running step; None before the first that selects."""
        self._keep = np.zeros(len(admitted), np.bool_)
        """Lanes that take part in the running step."""
        self._late: Failures = {}
        """Of lanes whose tokens could not leave the strip for blocks, until their next step."""
        self._attending = Attending(self.store, rules, scale, self._device_scratch)
        kind = SPECULATIVE.get(rules.schedule, Stages)
        memories = device_memory, self.store.memory
        self._stages = kind(self.store, rules, self._attending, self.layers, memories)
        if rules.sync is not None and rules.sync.reads_layers:
            self._stages.layer_scratch = self._scratch

    def settle(self) -> None:
        """Return when nothing is under way any more; raise what went wrong with it."""
        self._stages.settle()
        for error in self._late.values():
            raise error

    def watch(self, timeline: Timeline | None) -> None:
        """Note in a timeline when each stage and each transfer runs; None ends it."""
        self._stages.watch(timeline)

    def close(self) -> None:
        """End what is under way."""
        self._stages.close()

    @property
    def attended(self) -> dict[int, list[list[int]]]:
        """Tokens that each row of a layer attended to in its last step, if they are recorded."""
        return self._attending.positions

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
        self._begin_change(lanes)
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
        self._begin_change(range(len(self.lanes)))
        if number == 0:
            self.tokens[:] += key.shape[2]
        for sequence in range(self.layers[number].sequences):
            last = None if query is None else query[sequence]
            self._store(number, sequence, last, key[sequence], value[sequence])

    def _begin_change(self, lanes: Sequence[int] = ()) -> None:
        """Before what no step does; raise what went wrong in `lanes` as tokens became blocks."""
        self._stages.settle()
        self._stages.forget()
        for lane in lanes:
            if lane in self._late:
                raise self._late.pop(lane)

    def hold(self, tokens: Pointers) -> None:
        """Have so many tokens in each lane, which came another way, and fit the tiers to it."""
        self.lanes.tokens[:] = tokens
        self.sharing.hold()

    def segments_of(self, sequence: int) -> Ids:
        """Segments of one sequence: (layer, KV head), the last changing fastest."""
        return np.concatenate([layer.segments[layer.rows(sequence)] for layer in self.layers])

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
        homes = None if last is None else self.warm_up.homes(number, sealed, last)
        layer.store_tokens(sealed, homes)
        self.warm_up.after(number, sequence)

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
        next_query: torch.Tensor | None = None,
        failures: Failures | None = None,
    ) -> torch.Tensor:
        """Select, judge, fetch, attend, update: one token [B, ., 1, .] in every lane.

        failures: takes the error of each lane that fails; without it, the first one is raised.
        """
        self._stages.settle_updates()
        layer, geometry = self.layers[number], self.rules.geometry
        if number == 0:
            self._begin_step(valid)
        self._end_late(failures)
        rows = len(layer.segments)
        layer.append_token(
            as_array(key.reshape(rows, -1)), as_array(value.reshape(rows, -1)), self._keep
        )
        out = query.new_empty((rows, geometry.group, geometry.value_size))
        q, guess = self._rows_of(query), None if next_query is None else self._rows_of(next_query)
        if self._has_blocks:
            self._attend_blocks(number, q, guess, out, failures)
        else:
            self._attending.take_work_space(layer, 0)
            self._attending.attend(layer, q, nothing(rows), as_array(out))
            self._attending.note(number, layer, nothing(rows), is_first=True)
        full = [lane for lane in self._full if self.lanes.live[lane]]
        if full:
            self._stages.update(number, partial(self._seal, number, full, key, value))
            if not self._stages.is_overlapped:
                self._end_late(failures)
        return out.view(layer.sequences, 1, geometry.query_heads, geometry.value_size)

    def _rows_of(self, query: torch.Tensor) -> Array:
        """Queries [B, Hq, 1, d] as [R, G, d]."""
        geometry = self.rules.geometry
        return as_array(query.reshape(-1, geometry.group, geometry.head_dim))

    def _seal(
        self, number: int, lanes: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Let tokens leave the strips of lanes for blocks. key, value: [B, ., 1, .]."""
        layer = self.layers[number]
        for lane in lanes:
            try:
                sealed = layer.absorb(lane, key[lane, :, :0], value[lane, :, :0])
                assert sealed is not None
                self._index(number, sealed, None)
                layer.store_tokens(sealed, None)
            except Exception as error:
                self._late[lane] = error

    def _end_late(self, failures: Failures | None) -> None:
        """Tell lanes of the step what went wrong as their tokens became blocks; see `step`."""
        for lane in [lane for lane in self._late if self._keep[lane]]:
            with self._contained(lane, failures):
                raise self._late.pop(lane)

    def _begin_step(self, valid: torch.Tensor | None) -> None:
        """What is the same in every layer of a step; the layers are in the same state."""
        layer = self.layers[0]
        taking = np.ones(layer.sequences, np.bool_) if valid is None else valid[:, 0].cpu().numpy()
        self._keep = taking & self.lanes.live
        self.tokens[:] += self._keep
        if self.sharing.has_counted:
            self._stages.end_visits()
            self.sharing.recalibrate()
        self._budgets: Ids = self.sharing.of_step(self._keep)
        self._has_blocks = bool(layer.blocks.any())
        fetched = self.store.metrics.fetched
        if self._fetched is not None:
            size = self.store.layout.block_bytes
            self.rules.hysteresis.after_step((fetched - self._fetched) * size)
        self._fetched = fetched if self._has_blocks else None
        self._full = layer.full_sequences(self._keep)
        if self._stages.places is None and self.rules.attend_where != "fetch":
            self._stages.places = self._make_places()

    def _make_places(self) -> Places | None:
        """Who attends to blocks where they lie, if they can be read there."""
        if not can_stay(self.store):
            return None
        shape = self._attending.shape
        share = float(self.sharing.budgets().sum()) * shape.tokens / float(self.tokens.sum())
        return Places(
            self.rules, self.store, shape, self._scratch, self.scale, self.sharing.plan,
            len(self.lanes), min(1.0, share),
        )  # fmt: skip

    def _attend_blocks(
        self,
        number: int,
        query: Array,
        guess: Array | None,
        out: torch.Tensor,
        failures: Failures | None,
    ) -> None:
        """Attend to what the index selects, all lanes together or, if that fails, one by one."""
        most = self.sharing.most_residents
        asked = Question(number, query, self._budgets, most, guess)
        try:
            self._stages.attend(asked, out)
        except Exception:
            if failures is None:
                raise
            for lane in np.flatnonzero(self._keep & self.lanes.live).tolist():
                rows = self.layers[number].rows(lane)
                with self._contained(lane, failures):
                    self._stages.attend_rows(asked, rows, out)

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

    # Lanes

    def admit(self, lane: int, admitted: Admitted) -> None:
        """Let a new sequence have a free lane, which is made if there is none of that number.

        CapacityError, and no change, if it does not fit beside what the others were promised.
        """
        self._begin_change()
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
        # What was guessed for the next layer may have failed with the same blocks.
        self._stages.drop_guesses()
        try:
            self.clear(lane)
        except TierstoreError as another:
            error.add_note(f"forgetting the sequence: {another}")

    def clear(self, lane: int) -> None:
        """Free a lane; the first error of a policy is raised when all is done."""
        self._begin_change()
        self._late.pop(lane, None)
        self._keep[lane : lane + 1] = False
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
        self._begin_change(lanes)
        for layer in self.layers:
            for lane in lanes:
                layer.crop(lane, tokens)
        self.tokens[lanes] -= tokens

    def arrange(self, sources: Sequence[int]) -> None:
        """Let lane i be what lane ``sources[i]`` was."""
        self._begin_change(range(len(self.lanes)))
        for layer in self.layers:
            layer.arrange(sources)
        self._use(self.lanes.arranged(sources))

    def _use(self, lanes: Lanes) -> None:
        self.lanes = self.sharing.lanes = lanes
        self.attended.clear()
        self._stages.places = None
        self.sharing.sequences_changed()
