"""Sequences that join a running batch and leave it: alone, beside others, and as others fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from joining import EXACT, GEOMETRY, KV_HEADS, KVDRIVE, LAYERS, SCALE, Text, Tokens, prefill, step

from tierstore.adapters.attention import SparseAttention
from tierstore.errors import CapacityError, ConfigError, PolicyError
from tierstore.indexers import ExactIndex, Rule
from tierstore.policies import LRU
from tierstore.policies.fair import fair_shares
from tierstore.tiers import DeviceTier, PinnedTier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from tierstore.adapters.presets import Preset
    from tierstore.interfaces import Bytes, Completion, Demand, Ids
    from tierstore.layout import BlockLayout

LENGTHS = (300, 40, 120, 7)
DRAM: dict[str, Any] = {"dram": "4MiB"}


class Fragile(PinnedTier):
    """Cannot read some of its slots."""

    broken: Collection[int] = ()

    def read(
        self, slots: Ids, out: Bytes, rows: Ids, parts: Collection[str] | None = None
    ) -> Completion:
        if not set(self.broken).isdisjoint(slots.tolist()):
            raise OSError("a bad sector")
        return super().read(slots, out, rows, parts)


class Biased(LRU):
    """Breaks its contract where blocks of some segments have to leave."""

    spoilt: Collection[int] = ()

    def victims(self, demand: Demand) -> Ids:
        right = super().victims(demand)
        if set(self.spoilt).isdisjoint(demand.domains.tolist()):
            return right
        return np.full_like(right, -1)


def joined(engine: SparseAttention, lengths: Sequence[int] = LENGTHS) -> dict[int, Text]:
    """Texts of these lengths, in the engine, by sequence."""
    texts = {}
    for seed, length in enumerate(lengths):
        sequence = engine.add_sequence(length + 100)
        texts[sequence] = Text(seed)
        prefill(engine, sequence, texts[sequence].more(length))
    return texts


def alone(
    preset: Preset, seed: int, length: int, steps: int, tiers: dict[str, Any] = DRAM
) -> list[torch.Tensor]:
    """Outputs [layers, Hq, d] of each step of a text that has an engine to itself."""
    engine = SparseAttention(GEOMETRY, preset=preset, **tiers)
    text = Text(seed)
    prefill(engine, engine.add_sequence(length + 100), text.more(length))
    outputs = [step(engine, [text.more(1)])[:, 0] for _ in range(steps)]
    engine.close()
    return outputs


def rows_of(engine: SparseAttention, sequence: int) -> Ids:
    """Segments of a sequence in all layers."""
    assert engine._running.batch is not None
    lane = engine._running.passes.sequences.lane(sequence)
    return np.concatenate([each.segments[each.rows(lane)] for each in engine._running.batch.layers])


@pytest.mark.parametrize("preset", [EXACT, KVDRIVE], ids=lambda preset: preset.name)
def test_a_sequence_gets_beside_others_what_it_gets_alone(preset: Preset) -> None:
    """Others join and leave at other times, and take over lanes."""
    engine = SparseAttention(GEOMETRY, preset=preset, dram="4MiB")
    texts: dict[int, Text] = {}
    outputs: dict[int, list[torch.Tensor]] = {}
    for turn in range(60):
        if turn % 6 == 0 and turn < 36:
            seed = turn // 6
            sequence = engine.add_sequence(200)
            texts[sequence], outputs[sequence] = Text(seed), []
            prefill(engine, sequence, texts[sequence].more(30 + 25 * seed))
        if turn in (20, 44):
            engine.finish(min(texts))
            del texts[min(texts)]
        out = step(engine, [text.more(1) for text in texts.values()], list(texts))
        for place, sequence in enumerate(texts):
            outputs[sequence].append(out[:, place])
    for sequence, found in outputs.items():
        expected = alone(preset, sequence, 30 + 25 * sequence, len(found))
        assert len(found) >= 15
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(own, other)
    engine.store.validate()
    engine.close()


def test_lanes_are_used_again() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    texts = joined(engine)
    assert engine._running.batch is not None
    room = len(engine._running.batch.lanes)
    strips = [layer.strip_key for layer in engine._running.batch.layers]
    for number in range(20):
        gone = min(texts)
        engine.finish(gone)
        del texts[gone]
        sequence = engine.add_sequence(300)
        assert sequence == len(LENGTHS) + number, "no number comes twice"
        texts[sequence] = Text(number)
        prefill(engine, sequence, texts[sequence].more(100))
        step(engine, [text.more(1) for text in texts.values()])
    assert len(engine._running.batch.lanes) == room
    assert all(
        layer.strip_key is strip
        for layer, strip in zip(engine._running.batch.layers, strips, strict=True)
    ), "nothing was copied for those that joined"
    engine.store.validate()
    engine.close()


def test_each_sequence_has_its_own_budget() -> None:
    counts: dict[int, list[int]] = {}
    engine = SparseAttention(
        GEOMETRY, preset=EXACT, dram="4MiB",
        on_selection=lambda layer, _, selection: counts.update(
            {layer: np.diff(selection.row_ptr).tolist()}
        ),
    )  # fmt: skip
    texts: list[Text] = []
    for budget in (16, 0.5, None):
        texts.append(Text(len(texts)))
        prefill(engine, engine.add_sequence(500, budget=budget), texts[-1].more(399))
    step(engine, [text.more(1) for text in texts])
    assert counts[0] == counts[1] == [4, 4, 50, 50, 30, 30]
    with pytest.raises(ConfigError, match=r"budget=1\.5: expected a share"):
        engine.add_sequence(500, budget=1.5)
    engine.close()


def test_queries_that_turn_select_anew_also_where_lanes_are_free() -> None:
    """previous-step: with a free lane, queries pass through one buffer, step after step."""
    attended = []
    for schedule in ("sequential", "previous-step"):
        engine = SparseAttention(
            GEOMETRY, preset=EXACT, dram="4MiB", schedule=schedule, record=True
        )
        texts = joined(engine, (90, 120, 150))
        engine.finish(0)
        tokens = [texts[sequence].more(1) for sequence in (1, 2)]
        for sign in (1, -1):
            step(engine, [Tokens(sign * each.query, each.key, each.value) for each in tokens])
        attended.append([engine.attended(layer) for layer in range(LAYERS)])
        engine.close()
    assert attended[0] == attended[1]


# Capacity


def test_shares_are_as_wanted_or_as_much_as_anybody_gets() -> None:
    wanted = np.array([100, 3, 30, 8], np.int64)
    assert fair_shares(wanted, 200).tolist() == [100, 3, 30, 8]
    assert fair_shares(wanted, 61).tolist() == [25, 3, 25, 8]
    assert fair_shares(wanted, 11).tolist() == [3, 2, 3, 3]
    assert fair_shares(wanted, 0).tolist() == [0, 0, 0, 0]


def held(engine: SparseAttention, sequence: int) -> int:
    """Blocks of a sequence in the fast tier."""
    return int(engine.store.quota(rows_of(engine, sequence)).sum())


def test_a_long_sequence_does_not_starve_short_ones_and_gets_what_they_leave() -> None:
    """The short ones want 34 blocks a head each, the long one 297; there is room for about 180."""
    engine = SparseAttention(GEOMETRY, preset=KVDRIVE, budget=0.5, fast="512KiB", dram="4MiB")
    texts = joined(engine, (150, 1200, 150))
    heads = LAYERS * KV_HEADS
    before = {each: held(engine, each) / heads for each in texts}
    assert before[0] == before[2] == 150 // 4 + 1
    assert before[0] < before[1] < 200, "the tier must be too small for this test"
    for gone in (0, 2):
        engine.finish(gone)
        del texts[gone]
    assert held(engine, 1) / heads == pytest.approx(before[1] + 2 * before[0], abs=1)
    assert step(engine, [texts[1].more(1)]).isfinite().all()
    joined_again = engine.add_sequence(150)
    text = Text(5)
    prefill(engine, joined_again, text.more(150))
    assert held(engine, joined_again) / heads == 150 // 4 + 1
    engine.store.validate()
    engine.close()


def test_a_busy_sequence_pushes_no_other_out_of_dram(tmp_path: Path) -> None:
    """DRAM has half of the blocks, and room for all of the short sequence in its share of it."""
    tiers: dict[str, Any] = {"fast": "2MiB", "window": 1.0, "budget": 0.1}
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="400KiB", disk=tmp_path, **tiers)
    long, short = Text(0), Text(1)
    prefill(engine, engine.add_sequence(1400), long.more(1200))
    assert not (engine.store.owners(1) < 0).all(), "the long one has DRAM to itself so far"
    prefill(engine, engine.add_sequence(220), short.more(120))
    outputs, metrics = [], engine.store.metrics
    dram, disk = 0, 0
    for _ in range(10):
        for _ in range(5):
            step(engine, [long.more(1)], [0])
        before = [tier.hits for tier in metrics.tiers]
        outputs.append(step(engine, [short.more(1)], [1])[:, 0])
        after = [tier.hits for tier in metrics.tiers]
        dram, disk = dram + after[1] - before[1], disk + after[2] - before[2]
    assert dram > 9 * disk, "tables that grow may cost a block"
    assert np.isin(engine.store.owners(1), rows_of(engine, 0)).sum() > 300, "what is left"
    for own, other in zip(outputs, alone(EXACT, 1, 120, 10, DRAM | {"budget": 0.1}), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)
    engine.store.validate()
    engine.close()


@pytest.mark.parametrize(
    "tiers", [{"dram": "1MiB"}, {"fast": "500KiB", "dram": "4MiB"}], ids=["backing", "fast"]
)
def test_what_does_not_fit_is_refused_and_nothing_has_changed(tiers: dict[str, Any]) -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, **tiers)
    texts: dict[int, Text] = {}
    before: list[int] = []

    def used() -> list[int]:
        return [tier.memory.used_bytes for tier in engine._stack.tiers if tier.memory]

    def fill() -> None:
        while True:
            before[:] = used()
            sequence = engine.add_sequence(200)
            texts[sequence] = Text(sequence)
            prefill(engine, sequence, texts[sequence].more(150))

    with pytest.raises(CapacityError, match="with one more sequence"):
        fill()
    assert len(texts) >= 2
    assert used() == before
    assert engine.sequences == list(texts)
    for _ in range(50):
        out = step(engine, [text.more(1) for text in texts.values()])
        assert not engine.failures, "all that was promised is there"
    assert out.isfinite().all()
    for gone in texts:
        engine.finish(gone)
    # Tables and work space have grown meanwhile, and stay.
    for seed in range(len(texts) - 1):
        prefill(engine, engine.add_sequence(200), Text(seed).more(150))
    engine.store.validate()
    engine.close()


def test_a_first_sequence_larger_than_the_last_tier_is_refused() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="64KiB")
    with pytest.raises(CapacityError, match="raise dram= or add disk="):
        engine.add_sequence(10_000)
    assert engine.sequences == []
    prefill(engine, engine.add_sequence(30), Text(0).more(30))
    engine.close()


# Failures


def others_are_untouched(
    engine: SparseAttention,
    texts: dict[int, Text],
    found: dict[int, list[torch.Tensor]],
    gone: int,
    tiers: dict[str, Any] = DRAM,
) -> None:
    """After the failure of `gone`: the others have had, and go on to have, what they have alone.

    Alone, nothing is guessed.
    """
    assert list(engine.failures) == [gone]
    engine.finish(gone)
    del texts[gone]
    for _ in range(40):
        out = step(engine, [text.more(1) for text in texts.values()])
        for place, sequence in enumerate(texts):
            found[sequence].append(out[:, place])
    assert not engine.failures
    preset = replace(engine._rules.preset, schedule="sequential")
    for sequence in texts:
        own = found[sequence]
        expected = alone(preset, sequence, LENGTHS[sequence], len(own), tiers)
        for ours, theirs in zip(own, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    engine.store.validate()
    engine.close()


def steps(
    engine: SparseAttention, texts: dict[int, Text], count: int
) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in texts}
    for _ in range(count):
        out = step(engine, [text.more(1) for text in texts.values()])
        for place, sequence in enumerate(texts):
            found[sequence].append(out[:, place])
    return found


def on_two_tiers(
    policy: type[LRU] = LRU, schedule: str = "sfc"
) -> tuple[SparseAttention, list[Fragile]]:
    """A fast tier that cannot hold everything over one that may break."""
    lower: list[Fragile] = []

    def tiers(layout: BlockLayout) -> list[PinnedTier | DeviceTier]:
        lower.append(Fragile(layout, "4MiB"))
        return [DeviceTier(layout, "900KiB", device=GEOMETRY.device), lower[0]]

    # The newest token is no part of a guess, so it must not weigh in what a guess selects.
    index = partial(ExactIndex, rule=Rule("mean_group", softmax=False))
    preset = replace(EXACT, index=index, policy=policy, schedule=schedule)
    return SparseAttention(GEOMETRY, preset=preset, tiers=tiers, window=1.0), lower


@pytest.mark.parametrize("schedule", ["sfc", "previous-layer"])
@pytest.mark.parametrize("gone", [0, 2])
def test_blocks_that_cannot_be_read_end_their_sequence_alone(gone: int, schedule: str) -> None:
    engine, (lower,) = on_two_tiers(schedule=schedule)
    texts = joined(engine)
    found = steps(engine, texts, 5)
    slots = engine.store._moves.residency[1].slot_of.array
    handles = [engine.store.space.all_handles(each) for each in rows_of(engine, gone).tolist()]
    lower.broken = set(slots[np.concatenate(handles)].tolist())
    while not engine.failures:
        for sequence, own in steps(engine, texts, 1).items():
            found[sequence].extend(own)
    assert isinstance(engine.failures[gone], OSError)
    lower.broken = ()
    others_are_untouched(engine, texts, found, gone)


def test_a_guess_that_fails_with_its_layer_ends_no_other_sequence() -> None:
    """Layer 1's blocks are on their way, and fail too, when layer 0 gives the sequence up."""
    lower: list[Fragile] = []

    def tiers(layout: BlockLayout) -> list[PinnedTier | DeviceTier]:
        lower.append(Fragile(layout, "4MiB"))
        return [DeviceTier(layout, "1800KiB", device=GEOMETRY.device), lower[0]]

    preset = replace(EXACT, budget=0.1, schedule="previous-layer")
    engine = SparseAttention(GEOMETRY, preset=preset, tiers=tiers, window=1.5)
    texts = joined(engine)
    steps(engine, texts, 5)
    lower[0].broken = range(1 << 20)
    out = step(engine, [text.more(1) for text in texts.values()])
    assert list(engine.failures) == [0, 1, 2], "the last text has no blocks"
    assert out[:, 3].isfinite().all()
    lower[0].broken = ()
    for gone in (0, 1, 2):
        assert isinstance(engine.failures[gone], OSError)
        engine.finish(gone)
    assert step(engine, [texts[3].more(1)]).isfinite().all()
    engine.store.validate()
    engine.close()


@pytest.mark.parametrize("schedule", ["sfc", "previous-layer"])
def test_a_policy_that_fails_for_one_sequence_ends_that_one(schedule: str) -> None:
    policies: list[Biased] = []

    class Kept(Biased):
        def __init__(self) -> None:
            super().__init__()
            policies.append(self)

    engine, _ = on_two_tiers(Kept, schedule)
    texts = joined(engine)
    found = steps(engine, texts, 5)
    policies[-1].spoilt = set(rows_of(engine, 0).tolist())
    while not engine.failures:
        for sequence, own in steps(engine, texts, 1).items():
            found[sequence].extend(own)
    assert isinstance(engine.failures[0], PolicyError)
    policies[-1].spoilt = ()
    others_are_untouched(engine, texts, found, 0)


def test_a_key_that_is_nan_ends_its_sequence_when_it_is_indexed() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    texts = joined(engine)
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in texts}
    for turn in range(60):
        tokens = [text.more(1) for text in texts.values()]
        if turn == 3:
            tokens[1].key.fill_(torch.nan)
        out = step(engine, tokens)
        for place, sequence in enumerate(texts):
            found[sequence].append(out[:, place])
        if engine.failures:
            break
    assert "NaN or infinity" in str(engine.failures[1])
    others_are_untouched(engine, texts, found, 1)


def test_a_failure_beside_other_stages_waits_for_its_own_sequence(tmp_path: Path) -> None:
    """Blocks of the last layer are made while the next step, of others, has begun."""
    tiers: dict[str, Any] = {"fast": "2MiB", "dram": "4MiB", "disk": tmp_path / "kv"}
    engine = SparseAttention(GEOMETRY, preset=EXACT, schedule="sfc", micro_batch=1, **tiers)
    texts = joined(engine)
    found: dict[int, list[torch.Tensor]] = {sequence: [] for sequence in texts}
    for turn, taking in product(range(60), (list(texts), [0, 2])):
        tokens = [texts[sequence].more(1) for sequence in taking]
        if turn == 3 and 1 in taking:
            tokens[1].key[-1].fill_(torch.nan)
        out = step(engine, tokens, taking)
        for place, sequence in enumerate(taking):
            found[sequence].append(out[:, place])
        if engine.failures:
            assert 1 in taking, "the step of others was told"
            break
    assert "NaN or infinity" in str(engine.failures[1])
    again = engine.add_sequence(60)
    prefill(engine, again, Text(1).more(40))
    engine.finish(again)
    others_are_untouched(engine, texts, found, 1)


def test_a_prompt_that_fails_leaves_the_others_alone() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    texts = joined(engine)
    found = steps(engine, texts, 3)
    sequence, prompt = engine.add_sequence(200), Text(9).more(100)
    prompt.key[1].fill_(torch.inf)
    with pytest.raises(ConfigError, match="NaN or infinity"):
        prefill(engine, sequence, prompt)
    with pytest.raises(ConfigError, match=f"sequence {sequence} is at an end"):
        prefill(engine, sequence, Text(9).more(100))
    engine.finish(sequence)
    for own, more in zip(found.values(), steps(engine, texts, 3).values(), strict=True):
        own.extend(more)
    for number, own in found.items():
        expected = alone(EXACT, number, LENGTHS[number], 6)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    engine.store.validate()
    engine.close()


def test_a_wrong_shape_is_refused_and_the_right_one_may_follow() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    texts = joined(engine, (50, 90))
    tokens = [text.more(1) for text in texts.values()]
    one = (tokens[0].query[0][None], tokens[0].key[0][None], tokens[0].value[0][None])
    with pytest.raises(ConfigError, match="1 sequences come, 2 are stored"):
        engine.step(0, *one, scale=SCALE)
    with pytest.raises(ConfigError, match="expected T = 1 token"):
        engine.step(0, *(each.repeat(2, 1, 2, 1) for each in one), scale=SCALE)
    with pytest.raises(ConfigError, match="expected each of them once"):
        engine.step(0, *(each.repeat(2, 1, 1, 1) for each in one), sequences=[1, 1], scale=SCALE)
    with pytest.raises(ConfigError, match="sequence 5: expected one of"):
        engine.step(0, *one, sequences=[5], scale=SCALE)
    assert step(engine, tokens).isfinite().all()
    engine.close()


def test_a_pass_given_up_ends_those_that_took_part() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    texts = joined(engine, (50, 90, 70))
    token = Text(7).more(1)
    pair = [each[0][None].repeat(2, 1, 1, 1) for each in token]
    engine.step(0, *pair, sequences=[0, 1], scale=SCALE)
    with pytest.raises(ConfigError, match="layer 1 is next: finish the pass first"):
        engine.finish(2)
    with pytest.raises(ConfigError, match=r"sequences=\[1, 0\]: expected \[0, 1\]"):
        engine.step(1, *pair, sequences=[1, 0], scale=SCALE)
    engine.finish(0)
    assert engine.sequences == [2]
    assert list(engine.failures) == [1]
    engine.finish(1)
    assert step(engine, [texts[2].more(1)]).isfinite().all()
    engine.store.validate()
    engine.close()


def test_a_sequence_without_prompt_makes_no_step() -> None:
    engine = SparseAttention(GEOMETRY, preset=EXACT, dram="4MiB")
    engine.add_sequence(50)
    with pytest.raises(ConfigError, match="had their prompt"):
        step(engine, [Text(0).more(1)])
    engine.finish(0)
    assert engine.sequences == []
    engine.close()
