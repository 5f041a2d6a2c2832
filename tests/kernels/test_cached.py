"""Kernels that were compiled in one process are there in the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import numpy as np
from tierstore import kernels
from tierstore.kernels import cpu

made = []
for name in ("attend_kernel", "weigh_kernel"):
    factory = getattr(cpu, name)
    def keeping(*arguments, factory=factory):
        made.append(factory(*arguments))
        return made[-1]
    setattr(cpu, name, keeping)

query, pool = np.ones((1, 2, 16), np.float32), np.ones((2, 2 * 32), np.float32)
strip, one = np.ones((1, 1, 16), np.float32), np.ones(1, np.int32)
out, lse, weights = (np.zeros((1, 2, n), np.float32) for n in (16, 1, 5))
kernels.attend_blocks(
    query, pool, kernels.BlockShape(2, 16, 16, 32), np.array([0, 2]), np.arange(2, dtype=np.int32),
    np.full(2, 2, np.uint8), strip, strip, one, 0.25, out, lse[:, :, 0].copy(), weights,
)
kernels.weigh_strips(query, strip, one, 0.25, lse[:, :, 0].copy())
print(len(made), sum(len(each.stats.cache_misses) for each in made))
"""


def _compiled(folder: Path) -> list[str]:
    """How many kernels a new process used, and how many of them it had to compile."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return result.stdout.split()


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert _compiled(tmp_path) == ["2", "2"]
    assert _compiled(tmp_path) == ["2", "0"]
