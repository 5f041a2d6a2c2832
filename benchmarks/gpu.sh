#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the tests that need one, then the benchmarks.
#
#   benchmarks/gpu.sh [OUT]    leaves test output and JSON in OUT (default: build/gpu)
#
# Needs an environment with the extras test and cuda, and a CUDA build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build/gpu}
bin=${BIN:-.venv/bin}
mkdir -p "$out"
"$bin/python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; import cupy, triton'
nvidia-smi | tee "$out/device.txt"
"$bin/pytest" -m gpu tests 2>&1 | tee "$out/tests.txt"
PYTHONPATH=tests/kernels "$bin/pytest" tests/kernels/triton_*suite.py 2>&1 | tee "$out/kernels.txt"
"$bin/python" -m tierstore.benchmarks.gpu_compile "$out/gpu-compile.json" | tee "$out/gpu-compile.md"
"$bin/python" -m tierstore.benchmarks.gpu_kernels "$out/gpu-kernels.json" | tee "$out/gpu-kernels.md"
"$bin/tierstore" bench attention --json "$out/bench-attention.json"
"$bin/tierstore" bench decode --disk "$out/bench-kv" --json "$out/bench-decode.json"
