"""The part of ``tierstore trace record`` that needs a model, and so takes seconds to import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.attention.selectable import SelectableShare
from tierstore.adapters.cli.screen import waiting
from tierstore.adapters.documents import beginning
from tierstore.adapters.generate import check_length, next_logits
from tierstore.adapters.models import load_model, named_dtype
from tierstore.adapters.presets import preset_named
from tierstore.sizes import parse_budget
from tierstore.traces.recorder import AttentionRecorder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from tierstore.adapters.documents import Document
    from tierstore.adapters.models import LoadedModel
    from tierstore.adapters.presets import Preset
    from tierstore.traces.attention import AttentionTrace

_WORK_BYTES = 256 << 20


def record(options: argparse.Namespace, document: Document) -> AttentionTrace:
    """Record as `options` say."""
    preset = preset_named(options.preset)
    if options.block_tokens is not None:
        preset = replace(preset, block_tokens=options.block_tokens)
    if options.budget is not None:
        preset = replace(preset, budget=parse_budget(options.budget))
    with waiting(f"loading {options.model}"):
        loaded = load_model(options.model, named_dtype(options.dtype))
    check_length(loaded.model, options.tokens, options.steps)
    text = beginning(loaded.tokenizer, document.text, options.tokens + options.steps)
    context, forced = text[: options.tokens], text[options.tokens :]
    with waiting(f"recording {options.steps} steps"):
        return record_trace(
            loaded,
            context,
            None if options.generate else forced,
            options.steps,
            preset,
            document=Path(options.document).name,
        )


def record_trace(
    loaded: LoadedModel,
    context: Sequence[int],
    forced: Sequence[int] | None,
    steps: int,
    preset: Preset,
    *,
    document: str,
) -> AttentionTrace:
    """A trace of `record_steps`, with the facts that tell what it is of."""
    from tierstore.adapters.transformers import geometry_of

    recorder, selectable = record_steps(loaded.model, context, forced, steps, preset)
    geometry = geometry_of(loaded.model)
    return recorder.trace(
        model=loaded.name,
        dtype=str(geometry.dtype).removeprefix("torch."),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        query_heads=geometry.query_heads,
        head_dim=geometry.head_dim,
        value_size=geometry.value_size,
        selectable=selectable,
        document=document,
        preset=preset.name,
        budget=preset.budget,
        block_tokens=preset.block_tokens,
        context_tokens=len(context),
        is_generated=forced is None,
    )


def record_steps(
    model: PreTrainedModel,
    context: Sequence[int],
    forced: Sequence[int] | None,
    steps: int,
    preset: Preset,
) -> tuple[AttentionRecorder, list[float]]:
    """Decode `steps` tokens after `context`: those of `forced`, or with None the model's own.

    Returns what was selected, and the share of its attention that each segment gives to tokens
    that have to be selected.
    """
    from tierstore.adapters.transformers import attach_engine, geometry_of

    geometry = geometry_of(model)
    recorder = AttentionRecorder(geometry.layers)
    # K and V, and as much again for an index of all keys, tables and work space.
    dram = 2 * geometry.kv_bytes(len(context) + steps) + _WORK_BYTES
    engine = SparseAttention(geometry, preset=preset, dram=dram, on_selection=recorder.listen)
    measured = SelectableShare(engine, preset)
    with attach_engine(model, measured) as cache:
        logits = next_logits(model, context, cache.kwargs)
        for step in range(steps):
            token = int(logits.argmax()) if forced is None else forced[step]
            logits = next_logits(model, [token], cache.kwargs)
    return recorder, measured.shares.flatten().tolist()
