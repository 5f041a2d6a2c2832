"""How far sparse attention is from full attention in the distribution of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.generate import divergence, next_logits, own_cache
from tierstore.benchmarks.language import check_window, real_text
from tierstore.benchmarks.systems import SPARSE, attached

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from transformers import PreTrainedModel

    from tierstore.adapters.models import LoadedModel
    from tierstore.benchmarks.rounds import Say

STEPS = 64
BUDGETS = (1 / 64, 1 / 32, 1 / 16, 1 / 8)


class Distances(NamedTuple):
    """One number for each forced token, by system and budget.

    kl: KL(full || sparse) in nats. same: 1.0 where both have the same likeliest next token.
    tiers: what the tiers did, as plain data.
    """

    kl: dict[str, list[float]]
    same: dict[str, list[float]]
    tiers: dict[str, object]


def distances(say: Say, loaded: LoadedModel, tokens: int) -> Distances:
    """Feed the continuation of a real text of `tokens` tokens to every system at every budget.

    Full attention is transformers' own, with a `DynamicCache`.
    """
    model = loaded.model
    check_window(model, tokens + STEPS)
    text = real_text(loaded.tokenizer, tokens + STEPS)
    context, forced = text[:tokens], text[tokens:]
    own = own_cache(model)
    next_logits(model, context, own)
    expected = _logits(model, forced, own)
    say("full attention: done")
    found = Distances({}, {}, {})
    wanted = [(system, budget) for system in SPARSE for budget in BUDGETS]
    with attached(model, tokens, wanted) as (cache, engines):
        next_logits(model, context, cache.kwargs)
        say(f"prefilled for {len(wanted)} systems and budgets")
        for name in engines.names:
            engines.choose(name)
            pairs = list(zip(expected, _logits(model, forced, cache.kwargs), strict=True))
            found.kl[name] = [divergence(full, sparse) for full, sparse in pairs]
            found.same[name] = [float(full.argmax() == sparse.argmax()) for full, sparse in pairs]
            found.tiers[name] = cache.report().to_dict()
            cache.crop(-len(forced))
            say(f"{name}: mean KL {sum(found.kl[name]) / len(forced):.4f}")
    return found


def _logits(
    model: PreTrainedModel, forced: Sequence[int], cache: Mapping[str, object]
) -> list[torch.Tensor]:
    """Of the token after each forced one, [vocabulary] in the model's type."""
    return [next_logits(model, [token], cache) for token in forced]
