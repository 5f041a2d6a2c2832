"""The GPU benchmarks as far as they run without a GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tierstore.benchmarks import gpu_compile, gpu_kernels
from tierstore.errors import ConfigError
from tierstore.kernels import cuda

DOCS = Path(__file__).parents[2] / "docs"

without_compilers = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("nvidia") is None, reason="no compilers for GPUs"
)


def test_every_operation_of_a_step_runs_where_its_arrays_are() -> None:
    for case in gpu_kernels.cases("cpu", tokens=256).values():
        case.run()
        assert case.nbytes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_not_measured_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        gpu_kernels.main()


@without_compilers
def test_the_cuda_source_compiles_for_both_targets_without_spilling() -> None:
    found = list(gpu_compile.compile_cuda())

    assert [row.target for row in found] == ["sm_80", "sm_90"]
    assert all(0 < row.registers <= 64 and row.spill_bytes == 0 for row in found)


@without_compilers
def test_a_broken_source_shows_the_log_of_the_compiler() -> None:
    with pytest.raises(RuntimeError, match="undeclared"):
        gpu_compile.nvrtc(f"{cuda.source()}\nundeclared x;", "sm_80")


def test_the_document_shows_the_report_of_the_compilers() -> None:
    report = json.loads((DOCS / "results" / "gpu-compile.json").read_text())
    rows = [gpu_compile.Compiled(**row) for row in report["kernels"]]

    assert "\n".join(gpu_compile.table(rows)) in (DOCS / "gpu.md").read_text()
