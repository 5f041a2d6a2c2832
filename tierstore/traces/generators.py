"""Seeded request traces in which policies differ, or which look like those of conversations."""

from __future__ import annotations

import numpy as np

from tierstore.arguments import check_whole, is_number
from tierstore.errors import ConfigError
from tierstore.traces.requests import Hashes, RequestTrace

CHAT, CALL = range(2)
"""Categories of the requests of `sessions`."""

_MOST = 2**30
"""Requests or blocks of a trace that is made in memory, at 8 bytes or more each."""


def zipf(requests: int, blocks: int, skew: float = 1.0, seed: int = 0) -> RequestTrace:
    """Each request uses one block: the one of rank r with a probability of r ** -skew.

    skew: 0 or more; 0 uses all alike.
    """
    _positive(requests=requests, blocks=blocks)
    if not (is_number(skew) and skew >= 0):
        raise ConfigError(f"skew={skew!r}: expected a number of at least 0")
    return RequestTrace.of_blocks(_zipf(_random(seed), requests, blocks, skew))


def _zipf(random: np.random.Generator, requests: int, blocks: int, skew: float) -> Hashes:
    mass = np.cumsum(np.arange(1, blocks + 1) ** -skew)
    drawn = np.searchsorted(mass, random.random(requests) * mass[-1], side="right")
    blocks_drawn: Hashes = drawn.astype(np.uint64)
    return blocks_drawn


def phase_shift(
    phases: int = 6, requests: int = 8_000, blocks: int = 1_000, scan: int = 400, seed: int = 0
) -> RequestTrace:
    """Phases of a skewed choice (0.9) among blocks that move on by half, each with a scan after it.

    What one policy learns is worth little in the next phase, so policies come apart.
    """
    _positive(phases=phases, requests=requests, blocks=blocks)
    check_whole("scan", scan, 0)
    random = _random(seed)
    parts = []
    for phase in range(phases):
        ranks = random.permutation(blocks).astype(np.uint64)
        parts.append(ranks[_zipf(random, requests, blocks, 0.9)] + np.uint64(phase * blocks // 2))
        parts.append(np.arange(scan, dtype=np.uint64) + np.uint64(10**9 + phase * scan))
    return RequestTrace.of_blocks(np.concatenate(parts))


def loop(requests: int, blocks: int) -> RequestTrace:
    """The same blocks in the same order, again and again."""
    _positive(requests=requests, blocks=blocks)
    return RequestTrace.of_blocks(np.arange(requests) % blocks)


def scan(requests: int) -> RequestTrace:
    """Blocks that are used once each."""
    _positive(requests=requests)
    return RequestTrace.of_blocks(np.arange(requests))


def sessions(
    requests: int = 2_000,
    concurrent: int = 40,
    turns: float = 5.0,
    calls: float = 0.35,
    seed: int = 0,
) -> RequestTrace:
    """Conversations that grow from turn to turn, and calls of programs that nobody continues.

    All begin with one of a few system prompts with a common root. The trace's categories are `CHAT`
    and `CALL`. Three quarters of the blocks are used once, and reuse comes soon, as in Mooncake's
    trace.

    Parameters
    ----------
    concurrent: conversations that are under way at a time. turns: mean number of a conversation.
    calls: share of the requests that are calls, in [0, 1].
    """
    _positive(requests=requests, concurrent=concurrent)
    if not (is_number(turns) and turns >= 1):
        raise ConfigError(f"turns={turns!r}: expected a number of at least 1")
    if not (is_number(calls) and 0 <= calls <= 1):
        raise ConfigError(f"calls={calls!r}: expected a share in [0, 1]")
    random = _random(seed)
    fresh = 1_000
    chains: list[list[int]] = [[] for _ in range(concurrent)]
    categories = np.where(random.random(requests) < calls, CALL, CHAT)
    used: list[list[int]] = []
    for category in categories.tolist():
        grown = int(random.geometric(0.08))
        added = range(fresh, fresh + grown)
        fresh += grown
        if category == CALL:
            used.append([*_prompt(random), *added])
            continue
        who = int(random.integers(concurrent))
        if not chains[who] or random.random() < 1 / turns:
            chains[who] = _prompt(random)
        chains[who] += added
        # The last block of a turn is rarely full: the next turn has another one in its place.
        used.append(chains[who])
        chains[who] = chains[who][: -int(random.integers(1, grown + 1))]
    ptr = np.cumsum([0, *map(len, used)]).astype(np.int64)
    blocks = np.array([block for chain in used for block in chain], np.uint64)
    times = np.cumsum(random.exponential(300.0, requests)).astype(np.int64)
    return RequestTrace(ptr, blocks, timestamps=times, categories=categories)


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(check_whole("seed", seed, 0))


def _prompt(random: np.random.Generator) -> list[int]:
    number = int(random.zipf(1.6)) % 8
    return [0, *range(1 + 4 * number, 5 + 4 * number)]


def _positive(**values: int) -> None:
    for name, value in values.items():
        check_whole(name, value, 1, _MOST)
