"""What a machine can do: rates of computing and of moving bytes, and some machines by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from tierstore.errors import ConfigError

_GIB = 1 << 30
_LEAST, _LARGEST = 1e-12, 1e21


@dataclass(frozen=True)
class Processor:
    """Something that computes over a memory of its own.

    Attributes
    ----------
    matmul: FLOP/s of products of 16-bit matrices.
    vector: FLOP/s of attention and of scoring.
    memory: bytes/s that it reads from its memory.
    memory_bytes: what the memory holds.
    launch: seconds that a stage takes beside its work.
    """

    matmul: float
    vector: float
    memory: float
    memory_bytes: int
    launch: float

    def seconds(self, nbytes: float, flops: float) -> float:
        """To read so many bytes and do so many operations on them, both at once."""
        return self.launch + max(nbytes / self.memory, flops / self.vector)

    def matmul_seconds(self, nbytes: float, flops: float) -> float:
        """As `seconds`, for products of matrices."""
        return self.launch + max(nbytes / self.memory, flops / self.matmul)


@dataclass(frozen=True)
class Hardware:
    """A device that computes, the host beside it, the link between them, and a disk.

    Attributes
    ----------
    link: bytes/s of blocks from host memory into the fast tier.
    disk: bytes of one read, and bytes/s of many such reads at once; sizes rise.
    judge: seconds for each selected block that is told to be there or not.
    admit: seconds for each fetched block beside its copy: who leaves for it, and the directory.
    is_one: whether device and host are the same processor, over the same memory.
    source: where the numbers are from.

    ConfigError for rates that are not finite and positive.
    """

    name: str
    device: Processor
    host: Processor
    link: float
    disk: tuple[tuple[int, float], ...]
    judge: float
    admit: float
    is_one: bool
    source: str

    def __post_init__(self) -> None:
        rates = {"link": self.link, "judge": self.judge, "admit": self.admit}
        for name, processor in (("device", self.device), ("host", self.host)):
            rates |= {f"{name} {rate}": value for rate, value in asdict(processor).items()}
        rates |= {f"disk at {size} bytes": rate for size, rate in self.disk}
        for name, rate in rates.items():
            if not _LEAST <= rate <= _LARGEST:
                raise ConfigError(
                    f"hardware {self.name!r}: {name}={rate!r}: expected a number above 0"
                )
        sizes = [size for size, _ in self.disk]
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise ConfigError(
                f"hardware {self.name!r}: disk reads of {sizes}: expected rising sizes"
            )

    def disk_rate(self, read_bytes: float) -> float:
        """Bytes/s of many reads of such a size: between two known sizes on a line of logarithms."""
        if read_bytes <= self.disk[0][0]:
            # What is smaller than the least read costs as much as that.
            return self.disk[0][1] * read_bytes / self.disk[0][0]
        for (low, slow), (high, fast) in pairwise(self.disk):
            if read_bytes <= high:
                share = math.log(read_bytes / low) / math.log(high / low)
                return float(slow * (fast / slow) ** share)
        return self.disk[-1][1]

    def with_memory(self, device_bytes: int | None, host_bytes: int | None) -> Hardware:
        """The same with other sizes of memory, where they are given."""
        device, host = self.device, self.host
        if device_bytes is not None:
            device = replace(device, memory_bytes=device_bytes)
        if host_bytes is not None:
            host = replace(host, memory_bytes=host_bytes)
        return replace(self, device=device, host=host)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self) | {"disk": [list(each) for each in self.disk]}

    @classmethod
    def from_dict(cls, content: object) -> Hardware:
        """What `to_dict` gave; ConfigError for anything else."""
        try:
            assert isinstance(content, Mapping)
            return cls(
                name=str(content["name"]),
                device=_processor(content["device"]),
                host=_processor(content["host"]),
                link=_number(content["link"]),
                disk=tuple((int(_number(size)), _number(rate)) for size, rate in content["disk"]),
                judge=_number(content["judge"]),
                admit=_number(content["admit"]),
                is_one=bool(content["is_one"]),
                source=str(content["source"]),
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "hardware: expected what tierstore roofline --json writes, found something else "
                f"({type(error).__name__}: {error}); measure the machine again"
            ) from error


def _processor(content: Mapping[str, object]) -> Processor:
    rates = {name: _number(content[name]) for name in ("matmul", "vector", "memory", "launch")}
    return Processor(memory_bytes=int(_number(content["memory_bytes"])), **rates)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    return float(value)


SUSTAINED = 0.8
"""Share of a data sheet's rates that programs reach, as FlexGen's planner assumes it."""

_U2 = ((4 << 10, 4.5e9), (64 << 10, 6.9e9), (1 << 20, 6.9e9))
"""Samsung PM9A3 U.2, data sheet: 1,100,000 random reads/s of 4 KiB, 6,900 MB/s in sequence."""

_JUDGE, _ADMIT = 20e-9, 150e-9
"""Seconds for a block on the reference machine, from `tierstore roofline` there."""

_LAUNCH = 15e-6
"""Seconds of one kernel launch with its synchronisation from Python."""

_HOST = Processor(
    matmul=SUSTAINED * 7.2e12,
    vector=SUSTAINED * 7.2e12,
    memory=SUSTAINED * 307.2e9,
    memory_bytes=200 * _GIB,
    launch=50e-6,
)
"""Xeon Platinum 8480+, data sheet: 56 cores at 2.0 GHz with two FMA units of 16 floats, 8 channels
of DDR5-4800. The hosts of published measurements are seldom named."""


def _gpu(
    name: str, tensor: float, vector: float, memory: float, gigabytes: int, link: float, sheet: str
) -> Hardware:
    device = Processor(
        SUSTAINED * tensor, SUSTAINED * vector, SUSTAINED * memory, gigabytes * _GIB, _LAUNCH
    )
    source = f"{sheet}; {SUSTAINED:.0%} of each rate; host Xeon Platinum 8480+, disk PM9A3 U.2"
    return Hardware(name, device, _HOST, SUSTAINED * link, _U2, _JUDGE, _ADMIT, False, source)


_CORES = Processor(1.9e12, 38e9, 19e9, 23 * _GIB, 235e-6)

_REFERENCE = Hardware(
    "reference", _CORES, _CORES, 8.7e9,
    ((4 << 10, 0.17e9), (16 << 10, 0.43e9), (64 << 10, 0.64e9), (256 << 10, 1.2e9)),
    _JUDGE, _ADMIT, True,
    "tierstore roofline on 2 cores of an Intel Xeon at 2.6 GHz with AVX-512 and AMX, 2026-11-30",
)  # fmt: skip

PRESETS = {
    hardware.name: hardware
    for hardware in (
        _REFERENCE,
        _gpu("l20", 119.5e12, 59.8e12, 864e9, 48, 32e9, "NVIDIA L20 data sheet, PCIe 4.0 x16"),
        _gpu("h20", 148e12, 44e12, 4.0e12, 96, 64e9, "NVIDIA H20 data sheet, PCIe 5.0 x16"),
        _gpu(
            "rtx4090", 165.2e12, 82.6e12, 1008e9, 24, 32e9,
            "NVIDIA Ada GPU architecture whitepaper, RTX 4090, PCIe 4.0 x16",
        ),
        _gpu("h200", 989e12, 67e12, 4.8e12, 141, 64e9, "NVIDIA H200 SXM data sheet, PCIe 5.0 x16"),
        _gpu(
            "a100", 312e12, 19.5e12, 2039e9, 80, 32e9,
            "NVIDIA A100 80GB SXM data sheet, PCIe 4.0 x16",
        ),
    )
}  # fmt: skip
