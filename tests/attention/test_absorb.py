"""A text that was computed elsewhere is stored as if the engine had attended over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierstore.adapters.attention import Geometry, SparseAttention
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = Geometry(2, 4, 2, 16, torch.float32, torch.device("cpu"))
TOKENS, STEPS, SCALE = 700, 40, 0.25

STACKS: dict[str, dict[str, Any]] = {
    "dram": {"dram": "4MiB"},
    "fast, dram": {"fast": "600KiB", "dram": "4MiB"},
    "dram, disk": {"dram": "900KiB", "disk": "kv"},
    "fast, dram, disk": {"fast": "600KiB", "dram": "400KiB", "disk": "kv"},
}


def random(heads: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, heads, tokens, GEOMETRY.head_dim, generator=generator)


def decode(engine: SparseAttention) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for _ in range(STEPS):
        for layer in range(GEOMETRY.layers):
            query, key, value = (random(heads, 1, generator) for heads in (4, 2, 2))
            outputs.append(engine.attend(layer, query, key, value, scale=SCALE))
    return torch.stack(outputs)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    ("preset", "with_query"),
    [("kvdrive", True), ("chunk-mean", True), ("chunk-mean", False), ("full", False)],
)
def test_absorbing_equals_attending(
    preset: str, with_query: bool, stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without queries blocks start in other tiers; where residents are attended, that shows."""
    monkeypatch.chdir(tmp_path)
    engines = [SparseAttention(GEOMETRY, preset=preset, budget=0.1, **STACKS[stack]) for _ in "12"]
    attending, absorbing = engines
    generator = torch.Generator().manual_seed(0)
    for layer in range(GEOMETRY.layers):
        query, key, value = (random(heads, TOKENS, generator) for heads in (4, 2, 2))
        attending.attend(layer, query, key, value, scale=SCALE)
        absorbing.absorb(layer, key, value, query=query if with_query else None, scale=SCALE)
    if with_query:
        assert absorbing.report() == attending.report()
    torch.testing.assert_close(decode(absorbing), decode(attending), rtol=1e-5, atol=1e-5)
    assert absorbing.report().context_tokens == TOKENS + STEPS
    for engine in engines:
        engine.close()


def test_a_later_text_is_absorbed_after_the_first() -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (random(2, TOKENS, generator) for _ in range(2))
    whole, parts = (SparseAttention(GEOMETRY, preset="full", dram="4MiB") for _ in range(2))
    for layer in range(GEOMETRY.layers):
        whole.absorb(layer, key, value, scale=SCALE)
    for part in (slice(0, 333), slice(333, TOKENS)):
        for layer in range(GEOMETRY.layers):
            parts.absorb(layer, key[:, :, part], value[:, :, part], scale=SCALE)
    torch.testing.assert_close(decode(parts), decode(whole), rtol=1e-5, atol=1e-5)


def test_another_number_of_sequences_is_refused() -> None:
    engine = SparseAttention(GEOMETRY, dram="4MiB")
    key = torch.zeros(2, 2, 8, 16)
    engine.absorb(0, key, key, scale=SCALE)
    with pytest.raises(ConfigError, match="1 sequences come, 2 are stored"):
        engine.absorb(0, key[:1], key[:1], scale=SCALE)
