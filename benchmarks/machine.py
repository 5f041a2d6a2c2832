"""The machine that a benchmark runs on, as far as it can change the numbers."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Self

import torch

from tierstore.kernels.threads import thread_count
from tierstore.sizes import format_size

_PACKAGES = ("tierstore", "torch", "numba", "numpy", "transformers")
_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "TIERSTORE_")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where numbers come from.

    Attributes
    ----------
    device: where models compute; so far the CPU, everywhere.
    threads: how many torch uses, and how many our kernels.
    environment: variables that change threads or memory allocation.
    load_average: of the last minute before the start; above 0 the machine was not idle.
    """

    cpu: str
    cores: int | None
    memory_bytes: int
    device: str
    system: str
    python: str
    versions: dict[str, str]
    threads: dict[str, int]
    environment: dict[str, str]
    load_average: float

    @classmethod
    def here(cls) -> Self:
        """This machine, now."""
        return cls(
            cpu=_cpu(),
            cores=os.cpu_count(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            device="cpu",
            system=platform.platform(),
            python=platform.python_version(),
            versions={name: version for name in _PACKAGES if (version := _version(name))},
            threads={"torch": torch.get_num_threads(), "kernels": thread_count()},
            environment={
                name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)
            },
            load_average=os.getloadavg()[0],
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (
            f"{self.cpu}, {self.cores} cores, {format_size(self.memory_bytes)} of memory",
            f"computing on the {self.device.upper()}",
            f"Python {self.python}",
            *(f"{name} {version}" for name, version in self.versions.items()),
            *(f"{count} threads in {name}" for name, count in self.threads.items()),
            *(f"{name}={value}" for name, value in self.environment.items()),
            f"load average {self.load_average:.1f} at the start",
        )
        return "; ".join(parts)


def available_memory() -> int | None:
    """Bytes that can be used without swapping; None where the system does not say."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return None


def file_system_of(path: Path) -> str:
    """Kind of the file system that `path` lies on, such as ext4; tmpfs is memory."""
    place, longest, kind = path.resolve(), "", "unknown"
    for line in _lines("/proc/mounts"):
        _, point, mounted, *_ = line.split()
        # Of several mounts at one place the last one is seen.
        if place.is_relative_to(point) and len(point) >= len(longest):
            longest, kind = point, mounted
    return kind


def _cpu() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
