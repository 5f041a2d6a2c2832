"""Triton kernels under the interpreter, in a process of its own; nothing else imports Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from tierstore.kernels import backend_of

class OnDevice:
    pass

assert backend_of(OnDevice()) == "torch"
"""

UNUSED = """
import sys
import numpy as np
from tierstore.adapters.attention import SparseAttention
from tierstore.kernels import backend_of, operations

assert backend_of(np.zeros(1)) in {"numba", "torch"}
assert "tierstore.kernels.triton" not in sys.modules
assert not any(name.startswith("triton.compiler") for name in sys.modules)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no build for this system")
@pytest.mark.parametrize("suite", sorted(HERE.glob("triton_*suite.py")), ids=lambda path: path.stem)
def test_kernels_pass_their_suite_under_the_interpreter(suite: Path) -> None:
    """One thread: OpenMP threads that wait for each other take minutes on matrices this small."""
    answer = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite),
        TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
        PYTHONPATH=str(HERE),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "skipped" not in answer.stdout


@pytest.mark.parametrize("program", [WITHOUT, UNUSED], ids=["missing", "unused"])
def test_triton_is_needed_only_where_arrays_are_on_a_gpu(program: str) -> None:
    answer = run("-c", program)
    assert answer.returncode == 0, answer.stderr
