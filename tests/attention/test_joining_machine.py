"""Sequences join, go on, shrink and leave in any order; every output is exact attention's."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from joining import EXACT, GEOMETRY, KVDRIVE, LAYERS, Text, prefill, step

from tierstore.adapters.attention import SparseAttention
from tierstore.errors import CapacityError

if TYPE_CHECKING:
    from tierstore.adapters.presets import Preset

MOST = 6
"""Sequences at once."""

TIGHT = "60KiB"

TIERS: list[dict[str, Any]] = [
    {"dram": "2MiB"},
    {"dram": "160KiB"},
    {"fast": "120KiB", "dram": "2MiB"},
    {"fast": "120KiB", "dram": "120KiB", "disk": True},
    {"fast": TIGHT, "dram": "200KiB"},
]


class JoiningMachine(RuleBasedStateMachine):
    """`texts` maps a sequence to its text and the tokens it may have.

    The budget is everything, so that what is attended to is known.
    """

    @initialize(
        tiers=st.sampled_from(TIERS),
        preset=st.sampled_from([EXACT, KVDRIVE]),
        schedule=st.sampled_from(["sfc", "previous-layer"]),
    )
    def build(self, tiers: dict[str, Any], preset: Preset, schedule: str) -> None:
        self.folder = TemporaryDirectory()
        self.is_tight = tiers.get("fast") == TIGHT
        if "disk" in tiers:
            tiers = tiers | {"disk": self.folder.name}
        self.engine = SparseAttention(
            GEOMETRY, preset=preset, budget=1.0, schedule=schedule, **tiers
        )
        self.texts: dict[int, tuple[Text, int]] = {}
        self.seed = 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            self.folder.cleanup()

    @property
    def growing(self) -> list[int]:
        """Sequences that may have more tokens."""
        return [each for each, (text, most) in self.texts.items() if len(text) < most]

    @precondition(lambda self: len(self.texts) < MOST)
    @rule(tokens=st.integers(1, 120), more=st.integers(1, 60))
    def join(self, tokens: int, more: int) -> None:
        before = self.engine.sequences
        try:
            sequence = self.engine.add_sequence(tokens + more)
        except CapacityError:
            assert self.engine.sequences == before
            return
        self.seed += 1
        text = Text(self.seed)
        prompt = text.more(tokens)
        try:
            out = prefill(self.engine, sequence, prompt)
        except CapacityError:
            assert sequence in self.engine.failures or not self.texts
            self.engine.finish(sequence)
            return
        for layer in range(LAYERS):
            np.testing.assert_allclose(
                out[layer], text.attention(layer, prompt.query[layer]), atol=2e-5
            )
        self.texts[sequence] = text, tokens + more

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), steps=st.integers(1, 12))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Some, in any order."""
        order = data.draw(st.permutations(self.growing))
        chosen = order[: data.draw(st.integers(1, len(order)))]
        self._steps(chosen, steps)

    @precondition(lambda self: self.growing)
    @rule(steps=st.integers(1, 30))
    def all_go_on(self, steps: int) -> None:
        self._steps(self.growing, steps)

    def _steps(self, chosen: list[int], steps: int) -> None:
        room = min(self.texts[each][1] - len(self.texts[each][0]) for each in chosen)
        for _ in range(min(steps, room)):
            tokens = [self.texts[each][0].more(1) for each in chosen]
            out = step(self.engine, tokens, chosen)
            for place, sequence in enumerate(chosen):
                if sequence in self.engine.failures:
                    continue
                for layer in range(LAYERS):
                    expected = self.texts[sequence][0].attention(layer, tokens[place].query[layer])
                    np.testing.assert_allclose(out[layer, place], expected[0], atol=2e-5)
            chosen = [each for each in chosen if each not in self.engine.failures]
            self._bury()
            if not chosen:
                return

    def _bury(self) -> None:
        """What no promise covers: the index of the first sequence, in a fast tier too small."""
        for sequence, error in dict(self.engine.failures).items():
            assert self.is_tight, error
            assert isinstance(error, CapacityError)
            self.engine.finish(sequence)
            del self.texts[sequence]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        self.engine.finish(sequence)
        del self.texts[sequence]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        text, _ = self.texts[sequence]
        count = data.draw(st.integers(0, len(text) - 1))
        self.engine.crop(count, sequences=[sequence])
        text.cut(count)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.texts))))
        order = order[: data.draw(st.integers(1, len(order)))]
        held = list(self.texts.values())
        try:
            self.engine.select_rows(order)
        except CapacityError:
            # It copies an index: for a moment, both are there.
            self.engine.reset()
            self.texts = {}
            return
        self.texts = dict(enumerate(held[each] for each in order))

    @precondition(lambda self: hasattr(self, "engine"))
    @invariant()
    def whole(self) -> None:
        assert self.engine.sequences == list(self.texts)
        if self.engine._running.batch is None:
            return
        self.engine.store.validate()
        for tier in self.engine.store.tiers:
            if tier.memory is not None:
                assert tier.memory.used_bytes <= tier.memory.limit_bytes
        blocks = sum(int(layer.blocks.sum()) for layer in self.engine._running.batch.layers)
        backing = self.engine.store._moves.residency[self.engine.store.backing]
        assert backing.resident == blocks, "what left the batch still has blocks"


TestJoining = JoiningMachine.TestCase
TestJoining.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
