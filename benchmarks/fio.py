"""What fio gets out of files that are already there, as a measure of the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_TIMEOUT_SECONDS = 120.0


class FioError(Exception):
    """fio is not here, or could not do it; the message is fio's own."""


def random_read(files: Sequence[Path], block: int, total: int, depth: int, *, seed: int) -> float:
    """MB/s of random reads of `block` bytes, `total` bytes in all, past the page cache.

    The files are read only, each within its whole length. FioError where that is impossible.
    """
    return _read(
        files, "--rw=randread", f"--bs={block}", f"--iodepth={depth}", f"--io_size={total}",
        f"--randseed={seed + 1}", "--file_service_type=random",
    )  # fmt: skip


def sequential_read(files: Sequence[Path], block: int, depth: int) -> float:
    """MB/s of reading whole files, one after the other, as `random_read` does."""
    return _read(
        files, "--rw=read", f"--bs={block}", f"--iodepth={depth}", "--file_service_type=sequential"
    )


def _read(files: Sequence[Path], *options: str) -> float:
    if shutil.which("fio") is None:
        raise FioError("fio is not installed")
    if not files:
        raise FioError("fio: no file to read")
    # fio takes no more than 4,096 characters of names.
    folder = os.path.commonpath([path.parent for path in files])
    names = (os.path.relpath(path, folder).replace(":", r"\:") for path in files)
    command = (
        "fio", "--name=cold", f"--filename={':'.join(names)}", "--readonly", "--direct=1",
        "--ioengine=io_uring", "--allow_file_create=0", "--output-format=json", *options,
    )  # fmt: skip
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FioError(f"fio: {error}") from error
    if done.returncode:
        raise FioError(f"fio: {done.stderr.strip() or done.stdout.strip()}")
    # Warnings may stand before the report.
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0]["read"]["bw_bytes"]) / 1e6
