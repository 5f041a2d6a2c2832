"""How far sparse attention is from full attention in the distribution of the next token."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.generate import divergence, next_logits, own_cache
from tierstore.benchmarks.language import check_window, real_text
from tierstore.benchmarks.systems import SPARSE, SYSTEMS, System, attached

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.adapters.models import LoadedModel
    from tierstore.benchmarks.rounds import Say

STEPS = 64
BUDGETS = (1 / 64, 1 / 32, 1 / 16, 1 / 8)
WANTED = tuple((system, budget) for system in SPARSE for budget in BUDGETS)


class Distances(NamedTuple):
    """One number for each forced token, by system and budget.

    kl: KL(full || sparse) in nats. same: 1.0 where both have the same likeliest next token.
    fetched: bytes brought into the first tier. tiers: what the tiers did, as plain data.
    """

    kl: dict[str, list[float]]
    same: dict[str, list[float]]
    fetched: dict[str, list[float]]
    tiers: dict[str, object]


def distances(
    say: Say,
    loaded: LoadedModel,
    tokens: int,
    wanted: Sequence[tuple[str, float]] = WANTED,
    systems: Mapping[str, System] = SYSTEMS,
    *,
    steps: int = STEPS,
    start: int = 0,
) -> Distances:
    """Feed the continuation of a real text of `tokens` tokens to every wanted system and budget.

    Full attention is transformers' own, with a `DynamicCache`. start: see `real_text`.
    """
    model = loaded.model
    check_window(model, tokens + steps)
    text = real_text(loaded.tokenizer, tokens + steps, start)
    context, forced = text[:tokens], text[tokens:]
    own = own_cache(model)
    next_logits(model, context, own)
    expected = [next_logits(model, [token], own) for token in forced]
    say("full attention: done")
    found = Distances({}, {}, {}, {})
    with attached(model, tokens, wanted, systems) as (cache, engines):
        next_logits(model, context, cache.kwargs)
        say(f"prefilled for {len(wanted)} systems and budgets")
        for name in engines.names:
            engines.choose(name)
            kl, same, totals = [], [], [float(cache.report().fetched_bytes)]
            for full, token in zip(expected, forced, strict=True):
                sparse = next_logits(model, [token], cache.kwargs)
                kl.append(divergence(full, sparse))
                same.append(float(full.argmax() == sparse.argmax()))
                totals.append(float(cache.report().fetched_bytes))
            found.kl[name], found.same[name] = kl, same
            found.fetched[name] = [after - before for before, after in pairwise(totals)]
            found.tiers[name] = cache.report().to_dict()
            cache.crop(-len(forced))
            say(f"{name}: mean KL {fmean(kl):.4f}")
    return found
