"""Greedy generation over tiers that times itself, alone or beside full attention."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from transformers import DynamicCache, PreTrainedModel

    from tierstore.adapters.attention.prefixes import Prefixes
    from tierstore.adapters.attention.report import Report
    from tierstore.adapters.transformers import TierCache
    from tierstore.policies.plan import Plan
    from tierstore.timeline import Timeline

_WARM_UP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The arguments of `tierstore.adapters.transformers.attach`, under the same names."""

    preset: str = "kvdrive"
    budget: float | str | None = None
    fast: str | int | None = None
    dram: str | int | None = None
    disk: str | Path | None = None
    disk_codec: str | None = None
    keep: bool = False
    window: float | None = None
    hysteresis: float | str | None = None
    plan: Plan | str | Path | None = None
    recalibrate: int | None = None
    sync: str | None = None
    timeline: Timeline | None = None
    prefixes: str | Path | Prefixes | None = None

    def attach(self, model: PreTrainedModel) -> TierCache:
        """Attach `model` with these options."""
        from tierstore.adapters.transformers import attach

        return attach(
            model,
            preset=self.preset,
            budget=self.budget,
            fast=self.fast,
            dram=self.dram,
            disk=self.disk,
            disk_codec=self.disk_codec,
            keep=self.keep,
            window=self.window,
            hysteresis=self.hysteresis,
            plan=self.plan,
            recalibrate=self.recalibrate,
            sync=self.sync,
            timeline=self.timeline,
            prefixes=self.prefixes,
        )


class Observer:
    """Is told how far a run is. This one does nothing with it."""

    def start(self, task: str, total: int) -> None:
        """A task of `total` parts begins: the layers of a prefill, or the tokens of a decode."""

    def advance(self) -> None:
        """Another part of the task is done."""

    def answer(self, token: int) -> None:
        """The tiered run made a new token."""


SILENCE = Observer()


@dataclass(frozen=True, slots=True)
class Generation:
    """A greedy continuation of a prompt, and how long it took.

    Attributes
    ----------
    tokens: the new tokens, at least one.
    prefill_seconds: computing the prompt and with it the first new token.
    step_seconds: each new token after the first. The first of these steps pays for what is set up
        once, so that `decode_rate` and `median_step_seconds` leave it out.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    prefill_seconds: float
    step_seconds: tuple[float, ...]

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def first_step_seconds(self) -> float | None:
        """The first decoding step; None if there was none."""
        return self.step_seconds[0] if self.step_seconds else None

    @property
    def decode_rate(self) -> float | None:
        """New tokens per second in steady state; None with fewer than two decoding steps."""
        steady = self.step_seconds[1:]
        return len(steady) / sum(steady) if steady else None

    @property
    def median_step_seconds(self) -> float | None:
        """Median time of a new token in steady state; None as for `decode_rate`."""
        steady = self.step_seconds[1:]
        return statistics.median(steady) if steady else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Full attention on the same prompt, for as many new tokens, and how far off the tiered run is.

    Attributes
    ----------
    full: the run with transformers' own `DynamicCache` and the model's own attention.
    full_kv_bytes: keys and values that it held in the end.
    first_difference: the first of the new tokens, from 0, that is another one; None if all agree.
    kl: KL(full || tiered) of the next-token distributions in nats, at each new token that was
        decoded. Both runs are fed full attention's tokens there: the tiered run by itself up to
        the first difference, after which it is set back to that place and fed the rest.
    """

    full: Generation
    full_kv_bytes: int
    first_difference: int | None
    kl: tuple[float, ...]

    @property
    def mean_kl(self) -> float | None:
        """Mean of `kl`; None where nothing was decoded."""
        return statistics.fmean(self.kl) if self.kl else None


@dataclass(frozen=True, slots=True)
class Result:
    """What a run made and moved.

    Attributes
    ----------
    loaded_tokens: of the prompt, from prefixes; the others were computed.
    comparison: None where there was none.
    """

    generation: Generation
    report: Report
    loaded_tokens: int = 0
    comparison: Comparison | None = None


def generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    tiers: TierOptions,
    observer: Observer = SILENCE,
) -> Result:
    """Continue `prompt` greedily with keys and values in tiers, up to the model's end of text.

    Raises
    ------
    ConfigError
        The arguments are wrong, the model cannot be served, or the text is too long for it.
    CapacityError
        A tier is too small for the prompt, or the disk is full.
    """
    check_length(model, len(prompt), max_new_tokens)
    with tiers.attach(model) as cache:
        generation = _run(
            _steps(model, prompt, cache.kwargs, "prefill", observer),
            len(prompt),
            max_new_tokens,
            stops=end_tokens(model),
            on_step=lambda step: observer.answer(step.token),
        )
        return Result(generation, cache.report(), sum(cache.loaded_tokens))


def compare(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    tiers: TierOptions,
    observer: Observer = SILENCE,
) -> Result:
    """Continue `prompt` with full attention, then with keys and values in tiers.

    Both make exactly `max_new_tokens` tokens, also beyond the end of the text, so that both are
    timed over the same number of steps. Full attention's cache is gone before the tiers are filled;
    of it, one row of logits per new token stays. Raises what `generate` raises.
    """
    check_length(model, len(prompt), max_new_tokens)
    _warm_up(model, prompt, tiers)
    full, full_kv_bytes, expected = _run_full(model, prompt, max_new_tokens, observer)
    own: list[torch.Tensor] = []

    def on_step(step: _Step) -> None:
        own.append(step.logits)
        observer.answer(step.token)

    with tiers.attach(model) as cache:
        steps = _steps(model, prompt, cache.kwargs, "prefill", observer)
        generation = _run(steps, len(prompt), max_new_tokens, on_step=on_step)
        report, loaded = cache.report(), sum(cache.loaded_tokens)
        difference = _first_difference(full.tokens, generation.tokens)
        if difference is not None:
            del own[difference + 1 :]
            # The last new token was never fed.
            cache.crop(difference - (max_new_tokens - 1))
            own.extend(_forced(model, full.tokens[difference:-1], cache, observer))
    # The first new token comes from the prefill, which is exact.
    kl = tuple(divergence(p, q) for p, q in zip(expected[1:], own[1:], strict=True))
    return Result(generation, report, loaded, Comparison(full, full_kv_bytes, difference, kl))


def check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ConfigError unless a prompt and its continuation fit the model's context window."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ConfigError(
            f"prompt of {prompt_tokens:,} tokens and max_new_tokens={max_new_tokens}: expected at "
            f"most {limit:,} together, the model's context window; shorten the document or ask for "
            "fewer new tokens"
        )


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens by which the model ends a text."""
    settings = model.generation_config or model.config.get_text_config()
    ends = settings.eos_token_id
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


class _Step(NamedTuple):
    """A new token, the logits [vocabulary] that it is the greatest of, and the time it took."""

    token: int
    logits: torch.Tensor
    seconds: float


def _steps(
    model: PreTrainedModel,
    prompt: Sequence[int],
    cache: Mapping[str, object],
    task: str,
    observer: Observer,
) -> Iterator[_Step]:
    """Greedy decoding without end; `cache` is the keyword argument of the model that holds it."""
    with _layers_observed(model, task, observer):
        step = _timed_step(model, prompt, cache)
    while True:
        yield step
        step = _timed_step(model, [step.token], cache)


def _run(
    steps: Iterator[_Step],
    prompt_tokens: int,
    limit: int,
    *,
    stops: Collection[int] = (),
    on_step: Callable[[_Step], None],
) -> Generation:
    tokens, seconds = [], []
    for step in islice(steps, limit):
        tokens.append(step.token)
        seconds.append(step.seconds)
        on_step(step)
        if step.token in stops:
            break
    return Generation(prompt_tokens, tuple(tokens), seconds[0], tuple(seconds[1:]))


def _run_full(
    model: PreTrainedModel, prompt: Sequence[int], limit: int, observer: Observer
) -> tuple[Generation, int, list[torch.Tensor]]:
    """The run with full attention, its cache's bytes, and the logits of each new token."""
    own = own_cache(model)
    (cache,) = own.values()
    logits: list[torch.Tensor] = []

    def on_step(step: _Step) -> None:
        if not logits:
            observer.start("full attention: decode", limit)
        logits.append(step.logits)
        observer.advance()

    steps = _steps(model, prompt, own, "full attention: prefill", observer)
    generation = _run(steps, len(prompt), limit, on_step=on_step)
    return generation, _nbytes(cache), logits


def own_cache(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """An empty cache of transformers' own, under the name that the model's forward gives it."""
    from transformers import DynamicCache

    from tierstore.adapters.transformers.profile import profile_of

    profile = profile_of(model)
    return {profile.keyword: DynamicCache(config=profile.decoder.config)}


def _nbytes(cache: DynamicCache) -> int:
    return sum(getattr(layer, part).nbytes for layer in cache.layers for part in ("keys", "values"))


def _forced(
    model: PreTrainedModel, tokens: Sequence[int], cache: TierCache, observer: Observer
) -> Iterator[torch.Tensor]:
    """Logits after each of `tokens`, fed one by one."""
    observer.start("comparing distributions", len(tokens))
    for token in tokens:
        yield next_logits(model, [token], cache.kwargs)
        observer.advance()


def _warm_up(model: PreTrainedModel, prompt: Sequence[int], tiers: TierOptions) -> None:
    """Pay once for what neither run shall be charged with; wrong options fail here already."""
    short = prompt[:_WARM_UP_TOKENS]
    with replace(tiers, keep=False, timeline=None, prefixes=None).attach(model) as cache:
        list(islice(_steps(model, short, cache.kwargs, "warm-up", SILENCE), 3))
    list(islice(_steps(model, short, own_cache(model), "warm-up", SILENCE), 3))


def _timed_step(
    model: PreTrainedModel, tokens: Sequence[int], cache: Mapping[str, object]
) -> _Step:
    start = time.perf_counter()
    logits = next_logits(model, tokens, cache)
    token = int(logits.argmax())
    return _Step(token, logits, time.perf_counter() - start)


@torch.inference_mode()
def next_logits(
    model: PreTrainedModel, tokens: Sequence[int], cache: Mapping[str, object]
) -> torch.Tensor:
    """Logits [vocabulary] of the token after `tokens`, which come after what `cache` holds."""
    ids = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, **cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1]


@contextmanager
def _layers_observed(model: PreTrainedModel, task: str, observer: Observer) -> Iterator[None]:
    """Within, each decoder layer that is through counts as one part of `task`."""
    layers = model.get_decoder().layers
    observer.start(task, len(layers))
    hooks = [layer.register_forward_hook(lambda *_: observer.advance()) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    pairs = zip(expected, found, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL(expected || found) in nats of the distributions that two rows of logits stand for."""
    p, q = (logits.double().log_softmax(-1) for logits in (expected, found))
    # Rounding can make it a little less than nothing.
    return max(0.0, float(functional.kl_div(q, p, log_target=True, reduction="sum")))
