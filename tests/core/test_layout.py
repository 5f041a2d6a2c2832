"""What a block is made of."""

from __future__ import annotations

import pytest
import torch

from tierstore.errors import ConfigError
from tierstore.layout import BlockLayout, Blocks, Part


def low_rank_keys(blocks: Blocks) -> torch.Tensor:
    return blocks["a"].float() @ blocks["b"].float()


LAYOUT = BlockLayout(
    (
        Part("k", (2, 4), torch.float32, rebuild=low_rank_keys),
        Part("a", (2, 3), torch.float16),
        Part("b", (2, 3, 4), torch.bfloat16),
        Part("v", (2, 5), torch.uint8),
    )
)


def test_kv_blocks_hold_keys_then_values() -> None:
    layout = BlockLayout.kv(4, 64, torch.bfloat16)
    assert (layout.tokens, layout.block_bytes) == (4, 2 * 4 * 64 * 2)
    assert (layout.offset("k"), layout.offset("v")) == (0, 4 * 64 * 2)


def test_values_may_have_a_dimension_of_their_own() -> None:
    layout = BlockLayout.kv(3, 8, torch.float32, value_dim=5)
    assert layout.part("v").shape == (3, 5)
    assert layout.block_bytes == 3 * (8 + 5) * 4


def test_stored_parts_stand_one_after_the_other() -> None:
    assert LAYOUT.block_bytes == 12 + 48 + 10
    assert [LAYOUT.offset(name) for name in "abv"] == [0, 12, 60]
    assert LAYOUT.part("k").nbytes == 0


def test_a_rebuilt_part_has_no_place() -> None:
    with pytest.raises(ConfigError, match=r"'k' is rebuilt from others"):
        LAYOUT.offset("k")


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'q' is unknown: expected one of \['k', 'a', 'b', 'v'\]"
    ):
        LAYOUT.part("q")


@pytest.mark.parametrize(
    ("names", "spans"),
    [
        (None, [(0, 70)]),
        ([], []),
        (["b"], [(12, 60)]),
        (["v", "a"], [(0, 12), (60, 70)]),
        (["b", "v"], [(12, 70)]),
        (["v", "b", "a", "b"], [(0, 70)]),
    ],
)
def test_spans_join_neighbours(names: list[str] | None, spans: list[tuple[int, int]]) -> None:
    assert LAYOUT.spans(names) == spans


def values(n: int) -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(n, 2, 3).half(),
        "b": torch.randn(n, 2, 3, 4).bfloat16(),
        "v": torch.randint(0, 256, (n, 2, 5), dtype=torch.uint8),
    }


@pytest.mark.parametrize("n", [0, 1, 7])
def test_unpacking_gives_what_was_packed_and_rebuilds_the_rest(n: int) -> None:
    layout = BlockLayout(
        (
            Part(
                "k", (2, 2, 4), torch.float32, rebuild=lambda blocks: blocks["b"].float()[:, :, :2]
            ),
            *LAYOUT.parts[1:],
        )
    )
    blocks = values(n)
    stored = layout.pack(blocks)
    assert (stored.dtype, stored.shape) == (torch.uint8, (n, 70))
    found = layout.unpack(stored)
    assert torch.equal(found.pop("k"), blocks["b"].float()[:, :, :2])
    assert found.keys() == blocks.keys()
    assert all(torch.equal(found[name], blocks[name]) for name in blocks)


def test_packed_bytes_are_those_of_the_parts() -> None:
    blocks = values(2)
    stored = LAYOUT.pack(blocks)
    for name in "abv":
        start = LAYOUT.offset(name)
        part = stored[:, start : start + LAYOUT.part(name).nbytes]
        assert (
            part.contiguous().numpy().tobytes() == blocks[name].view(torch.uint8).numpy().tobytes()
        )


def test_parts_need_not_be_contiguous_to_be_packed() -> None:
    layout = BlockLayout.kv(4, 6, torch.float32)
    wide = torch.randn(3, 6, 4)
    blocks = {"k": wide.transpose(1, 2), "v": torch.randn(6, 4, 6)[::2]}
    found = layout.unpack(layout.pack(blocks))
    assert all(torch.equal(found[name], blocks[name]) for name in blocks)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (4, -1)])
def test_parts_without_elements_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected positive extents"):
        Part("k", shape, torch.float32)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Part("k", (4,), torch.float32), Part("k", (4,), torch.float16)),
        (Part("k", (4,), torch.float32, rebuild=low_rank_keys),),
    ],
)
def test_layouts_without_distinct_stored_parts_are_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ConfigError, match="expected distinct names and at least one stored part"):
        BlockLayout(parts)


def test_parts_of_different_token_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="same number of tokens"):
        BlockLayout((Part("k", (4, 2), torch.float32), Part("v", (5, 2), torch.float32)))


def test_blocks_of_more_tokens_than_a_valid_count_can_say_are_refused() -> None:
    assert BlockLayout.kv(255, 2, torch.float32).tokens == 255
    with pytest.raises(ConfigError, match="256 tokens: expected at most 255"):
        BlockLayout.kv(256, 2, torch.float32)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_parts_at_odd_offsets_are_unpacked(n: int) -> None:
    """A float after three bytes stands at no multiple of its size; one row needs no copy to be
    contiguous."""
    odd = BlockLayout((Part("a", (3, 1), torch.int8), Part("k", (3, 5), torch.float32)))
    stored = torch.arange(n * odd.block_bytes, dtype=torch.uint8).reshape(n, odd.block_bytes)
    blocks = odd.unpack(stored)
    assert blocks["k"].shape == (n, 3, 5)
    assert torch.equal(odd.pack(blocks), stored)
