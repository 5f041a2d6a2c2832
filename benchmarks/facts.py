"""Whether a model under sparse attention still finds numbers planted in a long document."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.documents import build_prompt, builtin_document
from tierstore.adapters.generate import next_logits
from tierstore.benchmarks.systems import SYSTEMS, System, attached

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.adapters.models import LoadedModel
    from tierstore.benchmarks.rounds import Say

BUDGET = 1 / 16
_ANSWER_TOKENS = 8


class Fact(NamedTuple):
    """A number planted for `city`, at the fraction `depth` of the document."""

    city: str
    number: int
    depth: float


FACTS = (
    Fact("Lima", 30_917, 0.1),
    Fact("Cairo", 74_662, 0.3),
    Fact("Oslo", 58_241, 0.5),
    Fact("Accra", 46_130, 0.6),
    Fact("Quito", 19_385, 0.75),
    Fact("Kyoto", 82_054, 0.9),
)


class Answer(NamedTuple):
    """How a system went on after the begun answer, and whether the number is in it."""

    fact: Fact
    text: str

    @property
    def is_right(self) -> bool:
        return str(self.fact.number) in self.text


def answers(
    say: Say,
    loaded: LoadedModel,
    tokens: int,
    facts: Sequence[Fact],
    systems: Mapping[str, System] = SYSTEMS,
) -> dict[str, list[Answer]]:
    """Answers of every system, each fact in a document of its own.

    The first token of an answer comes from the prefill, which is exact, so all systems share it.
    """
    found: dict[str, list[Answer]] = {name: [] for name in systems}
    prompts = [_prompt(loaded, tokens, fact) for fact in facts]
    room = max(map(len, prompts)) + _ANSWER_TOKENS
    wanted = [(name, BUDGET) for name in systems]
    with attached(loaded.model, room, wanted, systems) as (cache, engines):
        for fact, prompt in zip(facts, prompts, strict=True):
            cache.reset()
            first = int(next_logits(loaded.model, prompt, cache.kwargs).argmax())
            for name, engine in zip(systems, engines.names, strict=True):
                engines.choose(engine)
                new = [first]
                while len(new) < _ANSWER_TOKENS:
                    new.append(int(next_logits(loaded.model, new[-1:], cache.kwargs).argmax()))
                cache.crop(1 - len(new))
                found[name].append(Answer(fact, str(loaded.tokenizer.decode(new))))
            right = [name for name in systems if found[name][-1].is_right]
            say(f"fact about {fact.city}: found by {', '.join(right) or 'none'}")
    return found


def _prompt(loaded: LoadedModel, tokens: int, fact: Fact) -> list[int]:
    document = builtin_document(
        loaded.tokenizer, tokens, city=fact.city, number=fact.number, depth=fact.depth
    )
    return build_prompt(loaded.tokenizer, document.text, document.question, document.begun_answer)
