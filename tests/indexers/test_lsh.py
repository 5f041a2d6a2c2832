"""Hashed tokens: what collides, under which budget, at which cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from index_rows import BLOCK_TOKENS, DIM, add_rows, extend, make_index, select

from tierstore.errors import ConfigError
from tierstore.indexers import LSHIndex


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(keys: list[torch.Tensor], **options: float) -> LSHIndex:
    index = add_rows(make_index(LSHIndex, **options), keys)  # type: ignore[arg-type]
    assert isinstance(index, LSHIndex)
    return index


def test_collisions_are_frequent_as_the_angle_to_the_centred_key_says() -> None:
    """Of 300 tables of 4 bits, (1 - angle / pi)**4 on average, within 4 standard deviations."""
    keys = randn(400, DIM, seed=0) + 5
    query = randn(1, 2, DIM, seed=1) + (keys[:2] - keys.mean(0))
    index = make([keys], bits=4, tables=300)

    found = index.collisions(query.numpy())[0]

    centred = (keys - keys.mean(0)).double().numpy()
    asked = query[0].double().numpy()
    cosine = asked @ centred.T / np.linalg.norm(asked, axis=1)[:, None]
    hit = (1 - np.arccos(cosine / np.linalg.norm(centred, axis=1)) / np.pi) ** 4
    deviation = np.sqrt(300 * hit * (1 - hit))
    assert (np.abs(found[:, :400] - 300 * hit) <= 5 * deviation + 1).all()
    assert np.abs(found[:, :400] - 300 * hit).mean() < deviation.mean()


def test_blocks_come_in_the_order_of_their_best_tokens_collisions() -> None:
    keys, query = randn(160, DIM, seed=2), randn(1, 2, DIM, seed=3)
    index = make([keys], bits=5, tables=40)
    best = index.collisions(query.numpy())[0, :, :160].max(0).reshape(-1, BLOCK_TOKENS).max(1)

    [(ids, scores)] = select(index, query, [7])

    assert scores == best[ids].tolist()
    assert min(scores) >= np.delete(best, ids).max()


def test_a_shift_of_all_keys_changes_no_code() -> None:
    """Whole numbers: a shift by whole numbers is exact, and so is the centre."""
    keys = (4 * randn(64, DIM, seed=4)).round()
    first, second = (make([own], bits=6, tables=30) for own in (keys, keys + 7))

    np.testing.assert_array_equal(first.state()["codes"], second.state()["codes"])
    np.testing.assert_allclose(second.centre() - first.centre(), 7, atol=1e-5)


def test_later_tokens_are_hashed_with_the_centre_of_the_build() -> None:
    keys = randn(64, DIM, seed=5)
    index = make([keys], bits=6, tables=30)
    centre = index.centre().copy()

    extend(index, slice(0, 1), keys[None, :8])

    np.testing.assert_array_equal(index.centre(), centre)
    codes = index.state()["codes"][0]
    np.testing.assert_array_equal(codes[64:72], codes[:8])


def test_a_token_costs_two_bytes_a_table() -> None:
    """Beside codes: hyperplanes, once; the centre and two counts of each row."""
    index = make([randn(400, DIM, seed=6)], bits=10, tables=150)

    assert index.nbytes == 400 * 2 * 150 + 4 * DIM * 1500 + 4 * DIM + 8


def test_seeds_give_other_hashes() -> None:
    keys = randn(64, DIM, seed=7)
    first, second = (make([keys], seed=seed).state()["codes"] for seed in (0, 1))
    assert (first != second).mean() > 0.5


@pytest.mark.parametrize("options", [{"bits": 0}, {"bits": 16}, {"tables": 1}], ids=str)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        make_index(LSHIndex, **options)  # type: ignore[arg-type]
