"""What is recorded is what the engine selected, and exact scores are attention's own masses."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.adapters.presets import PRESETS
from tierstore.errors import TraceError
from tierstore.interfaces import BlockScores, Selection
from tierstore.traces.attention import AttentionTrace
from tierstore.traces.recorder import AttentionRecorder

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = Geometry(2, 6, 2, 16, torch.float32, torch.device("cpu"))
SEQUENCES, CONTEXT, STEPS, SCALE = 2, 300, 40, 0.4
SINKS, BLOCK = 4, 4
"""Steps enough that tokens become blocks meanwhile."""


class Run:
    """Random queries and keys through an engine that is recorded; masses in float64 beside it."""

    def __init__(self, preset: str) -> None:
        recorder = AttentionRecorder(GEOMETRY.layers)
        chosen = replace(PRESETS[preset], block_tokens=BLOCK, budget=0.1)
        engine = SparseAttention(
            GEOMETRY, preset=chosen, dram="16MiB", record=True, on_selection=recorder.listen
        )
        generator = torch.Generator().manual_seed(3)
        self.queries: list[list[np.ndarray]] = []
        self.keys: list[list[np.ndarray]] = []
        self.attended: list[list[list[list[int]]]] = []
        past = [torch.zeros(SEQUENCES, 2, 0, 16) for _ in range(GEOMETRY.layers)]
        for tokens in (CONTEXT, *[1] * STEPS):
            queries, keys = [], []
            for layer in range(GEOMETRY.layers):
                query, key, value = (
                    torch.randn(SEQUENCES, heads, tokens, 16, generator=generator)
                    for heads in (6, 2, 2)
                )
                past[layer] = torch.cat([past[layer], key], 2)
                engine.attend(layer, query, key, value, scale=SCALE)
                queries.append(query[:, :, -1].unflatten(1, (2, 3)).flatten(0, 1).double().numpy())
                keys.append(past[layer].flatten(0, 1).double().numpy())
            if tokens == 1:
                self.queries.append(queries)
                self.keys.append(keys)
                self.attended.append([engine.attended(i) for i in range(GEOMETRY.layers)])
        engine.close()
        self.recorder = recorder
        self.trace = recorder.trace(block_tokens=BLOCK, context_tokens=CONTEXT)

    def selected(self, step: int, segment: int) -> list[int]:
        """Blocks of the tokens that the engine says it attended to beside the strip, ascending."""
        layer, row = divmod(segment, SEQUENCES * 2)
        blocks = int(self.trace.blocks[step, segment])
        attended = np.array(self.attended[step][layer][row]) - SINKS
        inside = attended[(attended >= 0) & (attended < blocks * BLOCK)]
        blocks_attended: list[int] = np.unique(inside // BLOCK).tolist()
        return blocks_attended

    def masses(self, step: int, segment: int) -> np.ndarray:
        """Log mass of each block, summed over tokens and the heads' softmaxes over all tokens."""
        layer, row = divmod(segment, SEQUENCES * 2)
        blocks = int(self.trace.blocks[step, segment])
        keys = self.keys[step][layer][row]
        logits = self.queries[step][layer][row] @ keys.T * SCALE
        weights = np.exp(logits - logits.max(1, keepdims=True))
        shares = (weights / weights.sum(1, keepdims=True)).sum(0)
        inside = shares[SINKS : SINKS + blocks * BLOCK]
        mass: np.ndarray = np.log(inside.reshape(blocks, BLOCK).sum(1))
        return mass


def recorded(trace: AttentionTrace) -> list[list[list[int]]]:
    """Blocks of each step and segment, ascending."""
    pieces = np.split(trace.ids, np.cumsum(trace.counts.reshape(-1))[:-1])
    sets = [np.sort(piece).tolist() for piece in pieces]
    width = trace.segments
    return [sets[step * width : (step + 1) * width] for step in range(trace.steps)]


@pytest.mark.parametrize("preset", ["exact", "kvdrive", "chunk-mean"])
def test_the_recorded_blocks_are_those_that_were_attended(preset: str) -> None:
    run = Run(preset)
    assert (run.trace.steps, run.trace.segments) == (STEPS, GEOMETRY.layers * SEQUENCES * 2)
    assert run.trace.blocks[-1, 0] > run.trace.blocks[0, 0]
    for step, segments in enumerate(recorded(run.trace)):
        for segment, blocks in enumerate(segments):
            assert blocks == run.selected(step, segment)


def test_exact_scores_are_the_softmax_masses_of_blocks() -> None:
    run = Run("exact")
    for step in range(0, STEPS, 7):
        for segment in range(run.trace.segments):
            expected = run.masses(step, segment)
            found = run.trace.unit_scores[step, segment]
            np.testing.assert_allclose(found[: len(expected)], expected, atol=5e-3)
            assert (found[len(expected) :] == -np.inf).all()
            chosen = recorded(run.trace)[step][segment]
            assert chosen == sorted(np.argsort(-expected)[: len(chosen)].tolist())


def test_a_coarse_index_scores_blocks_by_their_units() -> None:
    """The score that comes with a recorded selection is that of the unit of the block."""
    trace = Run("kvdrive").trace
    assert len(trace.unit_of) == trace.segments
    assert trace.unit_scores.shape[2] < trace.blocks.max()
    for step, selection in enumerate(trace.selections()):
        assert selection.everything is not None
        for row in range(trace.segments):
            mine = slice(selection.row_ptr[row], selection.row_ptr[row + 1])
            units = trace.unit_of[row, selection.ids[mine]]
            assert (selection.scores[mine] == trace.unit_scores[step, row, units]).all()
            assert (units >= 0).all()
            worst = selection.scores[mine].min()
            others = np.setdiff1d(np.arange(trace.blocks[step, row]), selection.ids[mine])
            assert (trace.unit_scores[step, row, trace.unit_of[row, others]] <= worst).all()


def test_an_index_without_scores_cannot_be_recorded() -> None:
    recorder = AttentionRecorder(1)
    geometry = replace(GEOMETRY, layers=1)
    engine = SparseAttention(geometry, preset="full", dram="4MiB", on_selection=recorder.listen)
    tensors = [torch.randn(1, heads, 200, 16) for heads in (6, 2, 2)]
    engine.attend(0, *tensors, scale=1.0)
    with pytest.raises(TraceError, match="expected one that scores all blocks"):
        engine.attend(0, *(tensor[:, :, :1] for tensor in tensors), scale=1.0)


def test_scores_that_are_no_numbers_are_refused_at_once() -> None:
    """A trace of them could not be read again. What was recorded before stays whole."""
    (selection, *_) = Run("exact").trace.selections()
    recorder = AttentionRecorder(1)
    blocks = np.full(8, 50, np.int32)
    recorder.listen(0, blocks, selection)
    assert selection.everything is not None
    selection.everything.unit_scores[3, 2] = np.nan
    with pytest.raises(TraceError, match="the index scored a block NaN"):
        recorder.listen(0, blocks, selection)
    assert recorder.trace(block_tokens=4, context_tokens=1).steps == 1


def test_what_an_index_leaves_beyond_a_row_is_not_recorded(tmp_path: Path) -> None:
    """One table serves rows of all lengths; beyond a row's blocks is what the memory held."""
    scores = np.array([[1, np.nan, np.nan], [1, 2, 3]], np.float32)
    everything = BlockScores(
        scores, np.arange(3, dtype=np.int32)[None], np.arange(2, dtype=np.int32)
    )
    one_each = np.arange(3), np.zeros(2, np.int32), np.zeros(2, np.float32)
    recorder = AttentionRecorder(1)
    recorder.listen(0, np.array([1, 3], np.int32), Selection(*one_each, everything))
    trace = recorder.trace(block_tokens=4, context_tokens=12)
    assert trace.unit_scores.tolist() == [[[1, -np.inf, -np.inf], [1, 2, 3]]]
    trace.unit_scores[0, 0, 2] = np.nan
    trace.save(tmp_path / "a.trace")
    AttentionTrace.load(tmp_path / "a.trace")


def test_tables_of_units_are_kept_once() -> None:
    """Many blocks share a unit, and a table would take a hundred times what the scores do."""
    rows, width, units, steps = 4, 20_000, 20, 50
    unit_of = np.repeat(np.arange(units, dtype=np.int32), width // units)[None].repeat(rows, 0)
    segments = np.arange(rows, dtype=np.int32)
    everything = BlockScores(np.zeros((rows, units), np.float32), unit_of, segments)
    row_ptr = np.array([0, 1, 2, 3, 3])
    selection = Selection(row_ptr, segments[1:], np.zeros(3, np.float32), everything)
    recorder = AttentionRecorder(1)
    tracemalloc.start()
    for _ in range(steps):
        recorder.listen(0, np.full(rows, width, np.int32), selection)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * unit_of.nbytes
    assert recorder.trace(block_tokens=4, context_tokens=1).steps == steps


def test_a_trace_is_of_whole_steps_of_one_batch() -> None:
    with pytest.raises(TraceError, match="0 whole steps of 2 layers: expected at least one"):
        AttentionRecorder(2).trace(block_tokens=4, context_tokens=1)
    selections = list(Run("exact").trace.selections())
    recorder = AttentionRecorder(2)
    blocks = np.full(8, 50, np.int32)
    recorder.listen(0, blocks, selections[0])
    with pytest.raises(TraceError, match="no part of another"):
        recorder.trace(block_tokens=4, context_tokens=1)
    for layer, fewer in ((1, 0), (0, 1), (1, 1)):
        recorder.listen(layer, blocks - fewer, selections[0])
    with pytest.raises(TraceError, match="came, went or shrank"):
        recorder.trace(block_tokens=4, context_tokens=1)
