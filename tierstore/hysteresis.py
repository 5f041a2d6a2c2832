"""How much better than the K-th a missing block must be to be fetched: fixed, or steered."""

from __future__ import annotations

import math

from tierstore.arguments import is_number
from tierstore.errors import ConfigError
from tierstore.sizes import parse_size

MOST = 8.0
"""Nats beyond which a steered difference does not go: a block e^8 times as heavy is fetched."""

_GAIN = 0.25
"""Nats for each factor of e between bytes and target. Bytes fall by e^1 to e^1.5 a nat on real
attention, so that what is left of a deviation shrinks by a quarter to 0.4 in each step; the loop
is stable up to e^8."""

_LARGEST_STEP, _SMALLEST_STEP = 0.25, 0.01
"""Nats by which one step moves at most. The limit halves whenever the difference turns round and
grows by a fifth while it goes on, so that it settles also where bytes fall off a cliff."""


class Hysteresis:
    """The difference in log score, in nats, that one engine asks of blocks to be fetched.

    Parameters
    ----------
    amount: a number of nats, 0 to fetch everything; or a size such as ``"512KiB"``: bytes that a
        step should fetch, all layers and sequences together. The difference then follows them: up
        after a step that fetched more, down after one that fetched less.
    """

    def __init__(self, amount: float | str) -> None:
        self._first, self.target_bytes = parse_hysteresis(amount)
        self.reset()

    def reset(self) -> None:
        """Forget what was fetched: begin with the first difference again."""
        self.delta = self._first
        self._limit, self._was_up = _LARGEST_STEP, True

    @property
    def is_on(self) -> bool:
        """Whether some selected blocks may be left where they are."""
        return self.delta > 0 or self.target_bytes is not None

    def after_step(self, fetched_bytes: int) -> None:
        """Learn what a step fetched."""
        if self.target_bytes is None:
            return
        error = math.log(max(fetched_bytes, 1)) - math.log(self.target_bytes)
        is_up = error > 0
        limit = self._limit * (1.2 if is_up == self._was_up else 0.5)
        self._limit = min(max(limit, _SMALLEST_STEP), _LARGEST_STEP)
        self._was_up = is_up
        change = min(max(_GAIN * error, -self._limit), self._limit)
        self.delta = min(max(self.delta + change, 0.0), MOST)


def parse_hysteresis(amount: float | str) -> tuple[float, int | None]:
    """The difference to begin with, and the bytes of a step that it is to follow; None if fixed."""
    try:
        if isinstance(amount, str) and amount[-1:].isalpha():
            return 0.0, parse_size(amount)
        delta = float(amount) if isinstance(amount, str) or is_number(amount) else math.nan
    except ValueError:
        delta = math.nan
    if not 0 <= delta < math.inf:
        raise ConfigError(
            f"hysteresis={amount!r}: expected nats >= 0, for example 1.0, or the bytes that a step "
            "should fetch, for example '512KiB'"
        )
    return delta, None
