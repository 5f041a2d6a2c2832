"""Where Numba is missing, plain torch serves the CPU and gives the same answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tierstore import kernels
from tierstore.adapters.attention import Geometry, SparseAttention

BLOCKED = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
sys.path.insert(0, sys.argv[2])
import torch
import test_without_numba
torch.save(test_without_numba.run(sys.argv[3]), sys.argv[1])
"""


def run(preset: str) -> tuple[str, torch.Tensor, list[list[int]]]:
    """A prompt of 200 tokens and 20 steps in a fast tier too small for one selection's window.

    Returns the kernels' name, all outputs, and the tokens that the last step attended to.
    """
    heads, dim = 2, 16
    geometry = Geometry(1, 2 * heads, heads, dim, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    engine = SparseAttention(
        geometry, preset=preset, budget=0.25, dram="4MiB", fast="200KiB", record=True
    )
    outputs = []
    for tokens in (200, *[1] * 20):
        query = torch.randn(2, 2 * heads, tokens, dim, generator=generator) * 2
        key, value = (torch.randn(2, heads, tokens, dim, generator=generator) for _ in range(2))
        outputs.append(engine.attend(0, query, key, value, scale=dim**-0.5))
    attended, name = engine.attended(0), engine.report().kernels
    engine.close()
    return name, torch.cat(outputs, 1), attended


@pytest.mark.parametrize("preset", ["kvdrive", "exact"])
def test_the_engine_gives_the_same_answers_with_plain_torch(preset: str, tmp_path: Path) -> None:
    saved = tmp_path / "run.pt"

    subprocess.run(
        [sys.executable, "-c", BLOCKED, str(saved), str(Path(__file__).parent), preset],
        check=True,
        timeout=200,
    )

    name, outputs, attended = torch.load(saved)
    name_here, expected, expected_attended = run(preset)
    assert (name, name_here) == ("torch", "numba")
    assert [sorted(row) for row in attended] == [sorted(row) for row in expected_attended]
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


def test_numba_serves_the_cpu_here() -> None:
    assert kernels.backend_of(torch.zeros(1).numpy()) == "numba"
