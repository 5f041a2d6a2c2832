"""Attaching a model to tierstore, and letting it go again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from weakref import WeakSet

from tierstore.adapters.attention.engine import SparseAttention
from tierstore.adapters.transformers.attention import NAME, register
from tierstore.adapters.transformers.cache import TierCache
from tierstore.adapters.transformers.engine import WantsNextQuery
from tierstore.adapters.transformers.guessing import Guesses
from tierstore.adapters.transformers.hooks import DecoderHooks
from tierstore.adapters.transformers.prefixes import reuse_for
from tierstore.adapters.transformers.profile import geometry_of, profile_of
from tierstore.adapters.transformers.session import Session
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from tierstore.adapters.attention.prefixes import Prefixes
    from tierstore.adapters.presets import Preset
    from tierstore.adapters.transformers.engine import AttentionEngine
    from tierstore.hardware import Hardware
    from tierstore.keyed import KeyedStore
    from tierstore.policies.plan import Plan
    from tierstore.timeline import Timeline

_attached_decoders: WeakSet[PreTrainedModel] = WeakSet()


def attach(
    model: PreTrainedModel,
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
    schedule: str | None = None,
    micro_batch: int | None = None,
    timeline: Timeline | None = None,
    attend_where: str = "fetch",
    hardware: Hardware | None = None,
    sync: str | None = None,
    prefixes: str | Path | KeyedStore | Prefixes | None = None,
) -> TierCache:
    """Let `model` generate with its keys and values in tiers.

    The result is a context manager; inside, pass it to the model as ``**cache.kwargs``. For a tier
    stack of your own, make the engine yourself and use `attach_engine`.

    Parameters
    ----------
    preset: which system to be, by name or as a `Preset`.
    budget: share of the context, or number of tokens, that a step selects; the preset's by default.
    fast, dram: limits of the fast and the DRAM tier, for example ``"64MiB"``; at least one of them.
    disk: directory of the disk tier; None for none.
    disk_codec: how blocks are coded on disk, for example ``"int8"``, in checksummed extents read
        past the page cache; None for a memory-mapped file.
    keep: leave the files in `disk` when the cache is closed.
    window: capacity of the fast tier in budgets; the preset's by default.
    hysteresis: nats by which a missing block must beat the last one selected to be fetched, or the
        bytes that a step should fetch, for example ``"512KiB"``; the preset's by default.
    plan: how window and budget are shared out between layers and heads: a
        `tierstore.policies.Plan` or the file of one. Alike by default.
    recalibrate: make that plan's windows anew once, after so many steps.
    schedule: in which order the stages of a step follow each other: ``"sfc"``, ``"sequential"``,
        ``"previous-layer"`` or ``"previous-step"``; the preset's by default.
    micro_batch: sequences that pass the stages together.
    timeline: notes when each stage and each transfer runs.
    attend_where: what happens to a selected block that is not in the fast tier: ``"fetch"``,
        ``"in-tier"``, or ``"auto"``, whichever costs less by the rates of `hardware`.
    sync: how blocks come from disk, ``"a"`` to ``"d"``; see `SparseAttention`.
    prefixes: where prompts that were computed are kept: a directory, an open `KeyedStore`, or
        `Prefixes`. Of a text that begins like one of them the beginning is loaded, and a call
        returns logits and hidden states of the rest only, at least of two tokens.

    Raises
    ------
    UnsupportedModelError, ConfigError: at once; the model is as it was.
    """
    geometry = geometry_of(model)
    with ExitStack() as on_error:
        engine = SparseAttention(
            geometry,
            preset=preset,
            budget=budget,
            fast=fast,
            dram=dram,
            disk=disk,
            disk_codec=disk_codec,
            keep=keep,
            window=window,
            hysteresis=hysteresis,
            plan=plan,
            recalibrate=recalibrate,
            schedule=schedule,
            micro_batch=micro_batch,
            attend_where=attend_where,
            hardware=hardware,
            sync=sync,
        )
        engine.watch(timeline)
        on_error.callback(engine.close)
        cache = attach_engine(model, engine, prefixes=prefixes)
        on_error.pop_all()
    return cache


def attach_engine(
    model: PreTrainedModel,
    engine: AttentionEngine,
    *,
    prefixes: str | Path | KeyedStore | Prefixes | None = None,
) -> TierCache:
    """Let `model` attend through an engine of your own, made for `geometry_of(model)`.

    The engine is closed with the cache. Where attaching is refused, it stays open. prefixes: as for
    `attach`; the engine must be a `SparseAttention`.
    """
    return attach_session(Session(profile_of(model), engine), prefixes=prefixes)


def attach_session(
    session: Session, *, prefixes: str | Path | KeyedStore | Prefixes | None = None
) -> TierCache:
    """Let a model attend through a session, as `attach_engine` does."""
    profile, engine = session.profile, session.engine
    decoder = profile.decoder
    if decoder in _attached_decoders:
        raise ConfigError(
            f"this {profile.name} is attached already: close its cache before attaching it again"
        )
    if engine.geometry != profile.geometry:
        raise ConfigError(
            f"the engine was made for {engine.geometry}: expected geometry_of(model), which is "
            f"{profile.geometry}"
        )
    reuse = None if prefixes is None else reuse_for(session, prefixes)
    guesses = None
    if isinstance(engine, WantsNextQuery) and engine.wants_next_query:
        guesses = Guesses(session)
    register()
    detach = ExitStack()
    cache = TierCache(session, detach, reuse)
    hooks = DecoderHooks(cache, session)
    with ExitStack() as on_error:
        on_error.callback(detach.close)
        _attached_decoders.add(decoder)
        detach.callback(_attached_decoders.discard, decoder)
        detach.callback(_give_back_attention, decoder, decoder.config._attn_implementation)
        decoder.set_attn_implementation(NAME)
        before = decoder.register_forward_pre_hook(hooks.before_forward, with_kwargs=True)
        detach.callback(before.remove)
        after = decoder.register_forward_hook(hooks.after_forward)
        detach.callback(after.remove)
        if guesses is not None:
            guesses.attach(detach)
        on_error.pop_all()
    return cache


def _give_back_attention(decoder: PreTrainedModel, name: str) -> None:
    # Where somebody chose another attention meanwhile, that choice stands.
    if decoder.config._attn_implementation == NAME:
        decoder.set_attn_implementation(name)
