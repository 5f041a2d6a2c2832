"""Continuous batching: requests join and leave while a model makes tokens for others (K27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from tierstore.adapters.generate import check_length
from tierstore.adapters.transformers.attach import attach_session
from tierstore.adapters.transformers.joined import JoinedSession
from tierstore.adapters.transformers.profile import profile_of
from tierstore.chain import token_ids
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from types import TracebackType

    from transformers import PreTrainedModel

    from tierstore.adapters.attention import Report, SparseAttention

Choose = Callable[[torch.Tensor], int]
"""Chooses the next token by its logits [vocabulary]."""


class Finished(NamedTuple):
    """What became of a request.

    tokens: the new ones. reason: ``"stop"`` for a stop token, the last of `tokens`; ``"length"``
    for as many as were asked for; ``"error"``; or ``"left"`` if it was taken out before that.
    error: what ended it, with the reason ``"error"``.
    """

    tokens: tuple[int, ...]
    reason: str
    error: Exception | None = None


@dataclass(slots=True)
class _Request:
    """A request: its sequence in the engine, its length so far, and its next token."""

    sequence: int
    length: int
    most: int
    stop: Collection[int]
    choose: Choose | None
    next: int = -1
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    error: Exception | None = None
    is_held: bool = True


class ContinuousBatch:
    """A model that makes tokens for several requests at once, each with its keys in tiers.

    A request's prompt is computed when it joins, exactly and alone; from then on a step computes
    one token for all. Each gets the logits it would get alone, as far as the model's own matrix
    products do not depend on the size of a batch. Leaving the ``with`` block, or `close`, gives the
    model back as it was and closes the engine.

    One thread at a time.

    Parameters
    ----------
    engine: made for ``geometry_of(model)``, and empty. Its limits are for all requests together.

    Raises
    ------
    UnsupportedModelError, ConfigError: at once; the model is as it was.
    """

    def __init__(self, model: PreTrainedModel, engine: SparseAttention) -> None:
        if engine.sequences:
            raise ConfigError(f"the engine has sequences {engine.sequences}: expected an empty one")
        self._model, self._engine = model, engine
        self._session = JoinedSession(profile_of(model), engine)
        self._cache = attach_session(self._session)
        self._requests: dict[int, _Request] = {}
        self._next = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        budget: float | str | None = None,
        stop: Collection[int] = (),
        choose: Choose | None = None,
    ) -> int:
        """Let a request join, and compute its prompt; returns its number.

        Parameters
        ----------
        prompt: token ids, at least one.
        max_new_tokens: after so many it leaves.
        budget: share of its context, or tokens, that a step selects; the engine's by default.
        stop: tokens after which it leaves.
        choose: the next token by its logits; the greatest by default.

        Raises
        ------
        CapacityError: it does not fit beside those there are; ConfigError, or another error of its
        prompt. In each case it is not there, and the others are as they were.
        """
        ids = self._checked(prompt, max_new_tokens)
        promised = len(ids) + max_new_tokens - 1
        self._session.check_length(promised)
        sequence = self._engine.add_sequence(promised, budget=budget)
        request = _Request(sequence, len(ids), max_new_tokens, stop, choose)
        try:
            (request.next,) = self._compute([request], ids[None], torch.arange(len(ids))[None])
        except BaseException:
            self._leave(request)
            raise
        if request.error is not None:
            raise request.error
        number = self._next
        self._next += 1
        self._requests[number] = request
        return number

    def step(self) -> dict[int, int]:
        """The next token of each running request, by its number; nothing if none runs.

        Requests whose last token this is leave, and what they had is the others' from now on. Then
        the tokens after these are computed. A request that fails in that leaves too, with its
        error.
        """
        running = {number: self._requests[number] for number in self.running}
        made = {number: request.next for number, request in running.items()}
        for request in running.values():
            self._note(request)
        going = [request for request in running.values() if not request.reason]
        if going:
            tokens = torch.tensor([[request.next] for request in going])
            places = torch.tensor([[request.length - 1] for request in going])
            for request, token in zip(going, self._compute(going, tokens, places), strict=True):
                request.next = token
        return made

    def finish(self, number: int) -> Finished:
        """Take a request out, whether it has left the batch or not; ConfigError if it is unknown.

        Those that have left are kept until then.
        """
        if number not in self._requests:
            raise ConfigError(f"request {number}: expected one of {list(self._requests)}")
        request = self._requests.pop(number)
        if not request.reason:
            request.reason = "left"
            self._leave(request)
        return Finished(tuple(request.tokens), request.reason, request.error)

    @property
    def running(self) -> list[int]:
        """Numbers of the requests that will have another token."""
        return [number for number, request in self._requests.items() if not request.reason]

    def __iter__(self) -> Iterator[dict[int, int]]:
        """Steps, until no request runs; others may join meanwhile."""
        while self.running:
            yield self.step()

    def report(self) -> Report:
        """What was stored, moved and attended so far."""
        return self._engine.report()

    def close(self) -> None:
        """Give the model back as it was, and close the engine. May be called twice."""
        self._requests.clear()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, prompt: Sequence[int], max_new_tokens: int) -> torch.Tensor:
        """The prompt as int64 [n]; ConfigError for one that the model cannot read."""
        ids = torch.from_numpy(token_ids(prompt).astype("int64"))
        check_length(self._model, len(ids), max_new_tokens)
        words = self._model.config.get_text_config().vocab_size
        if not len(ids) or int(ids.max()) >= words:
            raise ConfigError(
                f"prompt of {len(ids)} tokens up to {int(ids.max()) if len(ids) else None}: "
                f"expected at least one token, and ids below {words}"
            )
        return ids

    def _note(self, request: _Request) -> None:
        """Enter the next token of a request, which leaves if it is the last."""
        request.tokens.append(request.next)
        request.length += 1
        if request.next in request.stop:
            request.reason = "stop"
        elif len(request.tokens) == request.most:
            request.reason = "length"
        if request.reason:
            self._leave(request)

    def _compute(
        self, requests: Sequence[_Request], tokens: torch.Tensor, positions: torch.Tensor
    ) -> list[int]:
        """The tokens after `tokens` [B, T] at `positions`; a request that fails leaves."""
        session, device = self._session, self._model.device
        session.sequences = [request.sequence for request in requests]
        session.is_step = all(request.tokens for request in requests)
        try:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=tokens.to(device), position_ids=positions.to(device),
                    **self._cache.kwargs, use_cache=True, logits_to_keep=1,
                ).logits[:, -1]  # fmt: skip
        except Exception as error:
            for request in requests:
                self._fail(request, error)
            raise
        finally:
            session.sequences = session.forward = None
        return self._chosen(requests, logits)

    def _chosen(self, requests: Sequence[_Request], logits: torch.Tensor) -> list[int]:
        """The next tokens by `logits` [B, vocabulary]."""
        greedy, is_finite = logits.argmax(-1).tolist(), logits.isfinite().all(-1).tolist()
        for row, request in enumerate(requests):
            error = self._engine.failures.get(request.sequence)
            if error is None and not is_finite[row]:
                error = ArithmeticError("the logits of this request are not finite")
            if error is None and request.choose is not None:
                try:
                    greedy[row] = int(request.choose(logits[row]))
                except Exception as own:
                    error = own
            if error is not None:
                self._fail(request, error)
        return greedy

    def _fail(self, request: _Request, error: Exception) -> None:
        request.reason, request.error = "error", error
        self._leave(request)

    def _leave(self, request: _Request) -> None:
        """Let the engine forget a request, once."""
        if request.is_held:
            request.is_held = False
            self._engine.finish(request.sequence)
