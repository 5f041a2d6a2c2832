"""A batch and the passes of a model over it: whose tokens come next, and what an error ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierstore.adapters.attention.batch import Batch, Failures
from tierstore.adapters.attention.calls import check_tokens
from tierstore.adapters.attention.lanes import Admitted
from tierstore.adapters.attention.passes import Passes
from tierstore.adapters.attention.spread import Spread
from tierstore.errors import ConfigError
from tierstore.sizes import MOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tierstore.adapters.attention.rules import Rules
    from tierstore.interfaces import Tier
    from tierstore.layout import BlockLayout
    from tierstore.timeline import Timeline


class Running:
    """What an engine has between `reset` and `reset`.

    Attributes
    ----------
    batch: what is stored; None before the first tokens.
    passes: which call may come next, and the sequences.
    """

    def __init__(self, rules: Rules, layout: BlockLayout, tiers: Sequence[Tier]) -> None:
        self.batch: Batch | None = None
        self.passes = Passes(rules.geometry.layers)
        self._rules, self._layout, self._tiers = rules, layout, tiers
        self._timeline: Timeline | None = None
        self._spread = Spread()

    def begin(self, batch: Batch) -> Batch:
        """Have a batch; returns it."""
        self.batch = batch
        batch.watch(self._timeline)
        return batch

    def end_batch(self) -> None:
        """Forget what is stored; the sequences, and what ended them, stay known."""
        if self.batch is not None:
            self.batch.close()
            self.batch = None

    def end_all(self) -> None:
        """Forget everything."""
        self.end_batch()
        self.passes = Passes(self._rules.geometry.layers)

    def watch(self, timeline: Timeline | None) -> None:
        """Note in a timeline when each stage and each transfer runs; None ends it."""
        self._timeline = timeline
        if self.batch is not None:
            self.batch.watch(timeline)

    def named(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        sequences: Sequence[int] | None,
        scale: float,
    ) -> list[int]:
        """Whose tokens come; ConfigError for a call that cannot be the next."""
        check_tokens(self._rules.geometry, key, value)
        named = self.passes.named(layer, key.shape[0], sequences)
        if self.batch is not None and scale != self.batch.scale:
            raise ConfigError(f"scale={scale}: expected {self.batch.scale}, as in the calls before")
        return named

    @contextmanager
    def one_layer(
        self, layer: int, key: torch.Tensor, named: list[int], scale: float, *, ends_all: bool
    ) -> Iterator[Batch]:
        """One layer of a pass of the `named` sequences; the first tokens start the batch.

        An error ends these sequences, or with `ends_all` everything.
        """
        passes, known = self.passes, self.passes.sequences
        if not known.numbers:
            promised = Admitted(key.shape[2], self._rules.budget)
            named = [known.enter(lane, promised) for lane in range(key.shape[0])]
        passes.begin(layer, named)
        try:
            batch = self.batch
            if batch is None:
                batch = self.begin(
                    Batch(self._rules, self._layout, self._tiers, known.admitted(), scale)
                )
            yield batch
        except Exception as error:
            if not ends_all:
                self.end(named, error)
            raise
        passes.succeed(layer)

    def select_rows(self, batch: Batch, rows: Sequence[int]) -> None:
        """Make sequence i what the ``rows[i]``-th was; they are numbered anew."""
        known = self.passes.sequences
        if not rows or min(rows) < 0 or max(rows) >= len(known.numbers):
            raise ConfigError(
                f"rows={list(rows)}: expected numbers from 0 to {len(known.numbers) - 1}"
            )
        chosen = [known.numbers[row] for row in rows]
        known.lanes(list(dict.fromkeys(chosen)))
        sources = [known.lane(each) for each in chosen]
        if sources != list(range(len(batch.lanes))):
            with self.passes.changing():
                batch.arrange(sources)
        self.passes.sequences = known.renumbered(chosen)

    def crop(self, batch: Batch, tokens: int, sequences: Sequence[int] | None) -> None:
        """Forget the last `tokens` tokens of `sequences`, by default of all."""
        known = self.passes.sequences
        self.passes.check_between()
        lanes = known.lanes(known.numbers if sequences is None else sequences)
        shortest = int(batch.tokens[lanes].min(initial=MOST))
        if not 0 <= tokens <= shortest:
            raise ConfigError(
                f"crop of {tokens} tokens: expected 0 to {shortest}, the shortest text"
            )
        with self.passes.changing():
            batch.crop(tokens, lanes)

    def end(self, sequences: Sequence[int], error: Exception) -> None:
        """Give the running pass up: `error` has ended these sequences."""
        known, batch = self.passes.sequences, self.batch
        for each in sequences:
            lane = known.lane(each)
            known.failures.setdefault(each, error)
            if batch is not None and batch.lanes.live[lane]:
                batch.give_up(lane, error)
        self.passes.next_layer = 0

    def check_prompts(self, named: Sequence[int]) -> None:
        """ConfigError if one of these sequences has no tokens yet."""
        lanes = self.passes.sequences.lanes(named)
        if self.batch is None or not self.batch.tokens[lanes].all():
            raise ConfigError(f"sequences {list(named)}: expected such that have had their prompt")

    def step(
        self,
        batch: Batch,
        layer: int,
        token: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        valid: torch.Tensor | None,
        failed: Failures | None,
        next_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A step of the lanes of the running pass; `token` is query, key and value."""
        spread = self._spread
        spread.over(self.passes.lanes, len(batch.lanes), self._rules.geometry.device)
        names = "query", "key", "value"
        query, key, value = (spread.out(*each) for each in zip(names, token, strict=True))
        taking = spread.taking
        if valid is not None:
            taking = valid if taking is None else taking & spread.out("valid", valid)
        guess = None if next_query is None else spread.out("next query", next_query)
        return spread.back(batch.step(layer, query, key, value, taking, guess, failed))
