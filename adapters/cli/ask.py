"""The part of ``tierstore generate`` that needs a model, and so takes seconds to import."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from tierstore.adapters.cli.json_file import write_json
from tierstore.adapters.cli.outcome import Outcome
from tierstore.adapters.cli.screen import Screen, waiting
from tierstore.adapters.cli.summary import print_summary
from tierstore.adapters.cli.text import visible
from tierstore.adapters.cli.timeline import save_timeline
from tierstore.adapters.documents import Document, build_prompt, builtin_document
from tierstore.adapters.generate import TierOptions, check_length, compare, end_tokens, generate
from tierstore.adapters.models import LoadedModel, load_model, named_dtype
from tierstore.adapters.presets import preset_named
from tierstore.sizes import parse_size_of
from tierstore.timeline import Timeline

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.generate import Generation, Result


def ask(options: argparse.Namespace, document: Document | None) -> None:
    """Generate as `options` say, from the built-in document where there is no other, and report."""
    preset_named(options.preset)
    with waiting(f"loading {options.model}"):
        loaded = load_model(options.model, named_dtype(options.dtype), options.device)
    tokenizer, ends = loaded.tokenizer, end_tokens(loaded.model)
    document = document or builtin_document(tokenizer)
    if options.question is not None:
        document = Document(document.text, options.question)
    prompt = build_prompt(tokenizer, document.text, document.question, document.begun_answer)
    check_length(loaded.model, len(prompt), options.max_new_tokens)
    print(visible(document.question), end="\n\n", flush=True)
    timeline = None if options.timeline is None else Timeline(loaded.name)
    with Screen(tokenizer, document.begun_answer, ends, options.max_new_tokens) as screen:
        tokens = len(prompt) + options.max_new_tokens
        tiers = replace(_tiers(options, loaded, tokens), timeline=timeline)
        work = compare if options.compare else generate
        result = work(loaded.model, prompt, options.max_new_tokens, tiers, screen)
    outcome = _outcome(loaded, document, result)
    print_summary(outcome)
    if options.json is not None:
        write_json(options.json, outcome.to_dict())
    if timeline is not None:
        save_timeline(timeline, options.timeline)


def _tiers(options: argparse.Namespace, loaded: LoadedModel, tokens: int) -> TierOptions:
    """The options for a model that holds so many tokens."""
    from tierstore.adapters.transformers import geometry_of

    whole = geometry_of(loaded.model).kv_bytes(tokens)

    def size(name: str) -> int | None:
        limit = getattr(options, name)
        return None if limit is None else parse_size_of(limit, whole, name)

    return TierOptions(
        preset=options.preset,
        budget=options.budget,
        fast=size("fast"),
        dram=size("dram"),
        disk=options.disk,
        disk_codec=options.disk_codec,
        keep=options.keep,
        window=options.window,
        hysteresis=options.hysteresis,
        plan=options.plan,
        recalibrate=options.recalibrate,
        prefixes=options.prefixes,
    )


def _outcome(loaded: LoadedModel, document: Document, result: Result) -> Outcome:
    comparison = result.comparison
    return Outcome(
        model=loaded.name,
        device=_name(loaded.model.device),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        document=document,
        result=result,
        answer=_answer(loaded, result.generation),
        full_answer=None if comparison is None else _answer(loaded, comparison.full),
    )


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _answer(loaded: LoadedModel, generation: Generation) -> str:
    ends = end_tokens(loaded.model)
    tokens = list(takewhile(lambda token: token not in ends, generation.tokens))
    text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
