"""`GdsTier` on the real KvikIO, with a stand-in for the CUDA driver where there is none.

KvikIO takes every pointer for host memory where the driver answers that it is not initialised, and
does all I/O by POSIX calls.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tierstore.errors import ConfigError, MissingExtraError
from tierstore.layout import BlockLayout
from tierstore.tiers import GdsTier

SUITE = Path(__file__).with_name("gds_suite.py")
LAYOUT = BlockLayout.kv(4, 8, torch.float32)

NOT_INITIALIZED = """
    cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxGetDevice
    cuCtxGetId cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxSetCurrent cuCtxSynchronize cuDeviceGet
    cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetUuid cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxRetain cuEventCreate cuEventDestroy_v2 cuEventQuery cuEventRecord
    cuEventRecordWithFlags cuEventSynchronize cuGetErrorName cuGetErrorString cuGetProcAddress
    cuGetProcAddress_v2 cuLaunchHostFunc cuMemFreeHost cuMemGetAddressRange_v2 cuMemHostAlloc
    cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemHostRegister cuMemHostRegister_v2
    cuMemHostUnregister cuMemcpyAsync cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
    cuMemcpyDtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2
    cuMemcpyHtoD_v2 cuPointerGetAttribute cuPointerGetAttributes cuStreamCreate cuStreamDestroy_v2
    cuStreamGetCtx cuStreamQuery cuStreamSynchronize cuStreamWaitEvent
"""
"""What KvikIO 26.10 looks up; its first I/O names a symbol that is missing here."""


def needs_kvikio() -> None:
    if find_spec("kvikio") is None:
        pytest.skip("KvikIO is not installed")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def stand_in(folder: Path, cu_init: int) -> dict[str, str]:
    """The environment in which a driver is found whose `cuInit` says that, and nothing else works.

    Skips where there is no C compiler, or a real driver.
    """
    if has_driver():
        pytest.skip("a real CUDA driver is here")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = [
        f"int cuInit(unsigned flags) {{ return {cu_init}; }}",
        "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }",
        *(f"int {name}(void) {{ return 3; }}" for name in NOT_INITIALIZED.split()),
    ]
    (folder / "cuda.c").write_text("\n".join(source))
    build = [compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def child(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_the_tier_passes_its_suite(tmp_path: Path) -> None:
    """C18. In POSIX mode, which `medium` says, with parts and memory that are not aligned."""
    needs_kvikio()
    env = None if has_driver() else stand_in(tmp_path, cu_init=0)
    report = tmp_path / "report.xml"
    options = ("-p", "no:cacheprovider", "-q", f"--junitxml={report}", f"--basetemp={tmp_path}/t")
    done = child("-m", "pytest", *options, str(SUITE), cwd=SUITE.parents[2], env=env)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    passed = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
    assert passed > 200


OPEN = """
import sys
from tierstore.layout import BlockLayout
from tierstore.tiers import GdsTier
import torch
GdsTier(BlockLayout.kv(4, 8, torch.float32), sys.argv[1])
"""


def test_a_driver_that_does_not_start_is_refused(tmp_path: Path) -> None:
    """KvikIO itself would wait for ever."""
    needs_kvikio()
    env = stand_in(tmp_path, cu_init=100)
    done = child("-c", OPEN, str(tmp_path / "blocks"), cwd=SUITE.parents[2], env=env)
    assert "ConfigError: disk: the CUDA driver does not start (cuInit gives 100)" in done.stderr
    assert not (tmp_path / "blocks").exists()


def test_without_a_driver_the_message_says_so(tmp_path: Path) -> None:
    needs_kvikio()
    if has_driver():
        pytest.skip("a real CUDA driver is here")
    with pytest.raises(ConfigError, match=r"KvikIO needs the CUDA driver \(libcuda\.so\.1"):
        GdsTier(LAYOUT, tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()


def test_without_the_package_the_message_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[cuda\]'"):
        GdsTier(LAYOUT, tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()
