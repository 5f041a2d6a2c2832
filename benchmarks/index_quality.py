"""What selection by an index does to a model: next-token distributions, and planted numbers."""

from __future__ import annotations

from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.capture import captured
from tierstore.adapters.documents import build_prompt, builtin_prose
from tierstore.adapters.generate import divergence, next_logits
from tierstore.adapters.presets import Preset
from tierstore.benchmarks.indexes import LOCAL, SINKS, Budgeted, blocks_of
from tierstore.benchmarks.language import kv_bytes
from tierstore.benchmarks.relay import relayed
from tierstore.policies import LRU

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tierstore.adapters.models import LoadedModel
    from tierstore.adapters.transformers import TierCache
    from tierstore.benchmarks.indexes import Candidate, Row
    from tierstore.benchmarks.relay import Relay
    from tierstore.benchmarks.rounds import Say
    from tierstore.indexers import IndexShape
    from tierstore.traces.capture import Capture

FULL = "full attention"
_INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards."
)
_CITIES = (
    "Lima", "Cairo", "Oslo", "Accra", "Quito", "Kyoto", "Riga", "Sofia", "Hanoi", "Tunis", "Perth",
    "Bern", "Delhi", "Turin", "Lagos", "Osaka", "Minsk", "Porto", "Sydney", "Dallas", "Boston",
    "Vienna", "Dublin", "Munich",
)  # fmt: skip
_KEYS = 4  # numbers in one text, each asked for once


class Question(NamedTuple):
    """A prompt that ends right before a number, and the tokens of the number."""

    prompt: list[int]
    answer: list[int]


class Answers(NamedTuple):
    """One number for each question, by row and budget.

    is_exact: 1.0 where every token of the answer is the likeliest. log_probability: mean over the
    answer's tokens, in nats.
    """

    is_exact: dict[str, list[float]]
    log_probability: dict[str, list[float]]


def questions(loaded: LoadedModel, tokens: int, texts: int = 6) -> list[Question]:
    """Four questions about each of `texts` texts of at most `tokens` tokens of prose."""
    tokenizer, random = loaded.tokenizer, np.random.default_rng(5)
    prose = builtin_prose()
    found = []
    for number in range(texts):
        own = prose[number * len(prose) // texts :] + prose
        lengths = [len(tokenizer.encode(each, add_special_tokens=False)) + 1 for each in own[:500]]
        kept = sum(end <= tokens for end in accumulate(lengths))
        cities = [_CITIES[(number * _KEYS + i) % len(_CITIES)] for i in range(_KEYS)]
        facts = {city: int(random.integers(10_000, 100_000)) for city in cities}
        paragraphs = list(own[:kept])
        for i, (city, value) in reversed(list(enumerate(facts.items()))):
            paragraphs.insert(round((i + 0.5) / _KEYS * kept), _begun(city) + f"{value}.")
        text = "\n\n".join([_INSTRUCTION, *paragraphs])
        for city, value in facts.items():
            asked = f"What is the special magic number for {city}?"
            prompt = build_prompt(tokenizer, text, asked, _begun(city))
            found.append(Question(prompt, tokenizer.encode(str(value), add_special_tokens=False)))
    return found


def _begun(city: str) -> str:
    return f"One of the special magic numbers for {city} is: "


def distances(
    say: Say,
    loaded: LoadedModel,
    text: Sequence[int],
    steps: int,
    rows: Sequence[Row],
    table: Mapping[str, Candidate],
    budgets: Sequence[float],
) -> tuple[dict[str, list[float]], Capture]:
    """KL(full || sparse) in nats at each of the text's last `steps` tokens, by row and budget.

    Returns also what full attention saw.
    """
    model, prompt, forced = loaded.model, text[:-steps], text[-steps:]
    found: dict[str, list[float]] = {}
    with relayed(model, len(text)) as (cache, relay):
        next_logits(model, prompt, cache.kwargs)
        expected = _forced(loaded, forced, cache)
        seen = captured(relay.recorder, loaded.name, "")
        cache.crop(-steps)
        say("full attention: done")
        for row in rows:
            for budget, index_steps in _at_budgets(
                loaded, row, table, budgets, cache, relay, forced
            ):
                found[row.at(budget)] = [
                    divergence(p, q) for p, q in zip(expected, index_steps, strict=True)
                ]
            say(f"{row}: mean KL {_listed(found, row, budgets)}")
    return found, seen


def answers(
    say: Say,
    loaded: LoadedModel,
    asked: Sequence[Question],
    rows: Sequence[Row],
    table: Mapping[str, Candidate],
    budgets: Sequence[float],
) -> Answers:
    """Every question to every row at every budget, and to full attention.

    The prompt's last token is fed as a step, so that no token of an answer comes from the prefill.
    """
    names = [FULL, *(row.at(budget) for row in rows for budget in budgets)]
    found = Answers({name: [] for name in names}, {name: [] for name in names})
    room = max(len(each.prompt) + len(each.answer) for each in asked)
    with relayed(loaded.model, room) as (cache, relay):
        for number, question in enumerate(asked, 1):
            cache.reset()
            next_logits(loaded.model, question.prompt[:-1], cache.kwargs)
            fed = [question.prompt[-1], *question.answer[:-1]]
            _mark(found, FULL, question, _forced(loaded, fed, cache))
            cache.crop(-len(fed))
            for row in rows:
                for budget, steps in _at_budgets(loaded, row, table, budgets, cache, relay, fed):
                    _mark(found, row.at(budget), question, steps)
            say(f"question {number} of {len(asked)}")
    return found


def _mark(found: Answers, name: str, question: Question, logits: Sequence[torch.Tensor]) -> None:
    rows = torch.stack(list(logits)).double().log_softmax(-1)
    wanted = torch.tensor(question.answer)
    found.is_exact[name].append(float((rows.argmax(-1) == wanted).all()))
    found.log_probability[name].append(float(rows.gather(1, wanted[:, None]).mean()))


def _forced(loaded: LoadedModel, tokens: Sequence[int], cache: TierCache) -> list[torch.Tensor]:
    return [next_logits(loaded.model, [token], cache.kwargs) for token in tokens]


def _at_budgets(
    loaded: LoadedModel,
    row: Row,
    table: Mapping[str, Candidate],
    budgets: Sequence[float],
    cache: TierCache,
    relay: Relay,
    forced: Sequence[int],
) -> Iterator[tuple[float, list[torch.Tensor]]]:
    """Logits after each of `forced` at every budget, with an index that is built once."""
    held: list[Budgeted] = []
    room = len(forced) + 2 * row.block_tokens

    def make(shape: IndexShape) -> Budgeted:
        held.append(Budgeted(table[row.name].make(shape), room))
        return held[-1]

    preset = Preset(
        str(row), make, LRU, block_tokens=row.block_tokens, budget=1.0, sinks=SINKS, local=LOCAL
    )
    tokens = cache.report().context_tokens
    ample = 8 * kv_bytes(loaded.model, tokens + len(forced)) + (64 << 20)
    engine = SparseAttention(relay.geometry, preset=preset, dram=ample)
    with relay.hand_to(engine):
        for budget in budgets:
            for index in held:
                index.blocks = blocks_of(budget, tokens, row.block_tokens)
            yield budget, _forced(loaded, forced, cache)
            cache.crop(-len(forced))


def _listed(found: Mapping[str, Sequence[float]], row: Row, budgets: Sequence[float]) -> str:
    return ", ".join(f"{fmean(found[row.at(budget)]):.4f} at {budget:.2%}" for budget in budgets)
