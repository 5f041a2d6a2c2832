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
    "fast, dram": {"fast": "96KiB", "dram": "4MiB"},
    "dram, disk": {"dram": "160KiB", "disk": "kv"},
    "fast, dram, disk": {"fast": "96KiB", "dram": "160KiB", "disk": "kv"},
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
@pytest.mark.parametrize("preset", ["kvdrive", "exact", "full"])
@pytest.mark.parametrize("with_query", [True, False])
def test_absorbing_equals_attending(
    preset: str, stack: str, with_query: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without queries blocks start elsewhere, which shows only where residents are attended."""
    monkeypatch.chdir(tmp_path)
    budget = 1.0 if preset == "kvdrive" and not with_query else 0.1
    options = {"preset": preset, "budget": budget, **STACKS[stack]}
    generator = torch.Generator().manual_seed(0)
    text = [
        tuple(random(heads, TOKENS, generator) for heads in (4, 2, 2))
        for _ in range(GEOMETRY.layers)
    ]
    attending, absorbing = (
        SparseAttention(GEOMETRY, **options),
        SparseAttention(GEOMETRY, **options),
    )
    for layer, (query, key, value) in enumerate(text):
        attending.attend(layer, query, key, value, scale=SCALE)
        absorbing.absorb(layer, key, value, query=query if with_query else None, scale=SCALE)
    if with_query:
        assert absorbing.report().tiers == attending.report().tiers
    torch.testing.assert_close(decode(absorbing), decode(attending), rtol=1e-5, atol=1e-5)
    assert absorbing.report().context_tokens == TOKENS + STEPS
    attending.close()
    absorbing.close()


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
