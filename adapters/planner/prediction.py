"""What one system needs and how fast it decodes, predicted from the rates of a machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tierstore.adapters.planner.locality import covered_share, extents_touched, reload_share
from tierstore.adapters.planner.pipelining import Stage, layer_seconds
from tierstore.adapters.planner.systems import SYSTEMS

if TYPE_CHECKING:
    from tierstore.adapters.planner.models import ModelSize
    from tierstore.adapters.planner.systems import System
    from tierstore.hardware import Hardware

BLOCK_TOKENS = 4
EXTENTS = (4 << 10, 16 << 10, 64 << 10)
"""Sizes of a disk's reads that the plan chooses from."""

_SEQUENTIAL_BYTES = 1 << 20
_ALWAYS = 4 + 64
"""Sinks and local window, which every system but those that attend to everything keeps."""

_HIDDEN_COPIES = 4
"""Hidden states of one sequence that prefill holds at once."""

WINDOWS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Load:
    """What is asked of a system.

    Attributes
    ----------
    context: tokens of each sequence. batch: sequences. budget: share of the context (float) or
        tokens (int) that a step selects for each KV head.
    window, micro_batches: of systems that leave them open.
    extent_bytes: of reads from disk; the fastest by default.
    reload: share of the selected blocks that are not in the fast tier; the measured curve's by
        default. disk_bytes: read from disk in a step; by default what the misses come to.
    """

    model: ModelSize
    context: int
    batch: int
    budget: float | int
    window: float = 2.0
    micro_batches: int = 1
    extent_bytes: int | None = None
    reload: float | None = None
    disk_bytes: float | None = None

    @property
    def selected(self) -> int:
        """Tokens that a step selects for each KV head."""
        tokens = self.context * self.budget if isinstance(self.budget, float) else self.budget
        return max(1, min(self.context, math.ceil(tokens)))


@dataclass(frozen=True)
class Footprint:
    """Bytes on each medium.

    lacks: "device" or "host" where that has too little memory; empty if all fits.
    fast: the part of `device` that is index and keys and values.
    """

    fast: float
    device: float
    host: float
    disk: float
    lacks: str


@dataclass(frozen=True)
class Prediction:
    """A system under a load on a machine.

    Attributes
    ----------
    window: budgets that stay on the device. micro_batches: that a step is cut into.
    missed: share of what is attended to that has to be fetched.
    stages: seconds of select, judge, fetch, attend and the rest in a step, as if none overlapped.
    step_seconds: with what its schedule overlaps.
    """

    system: str
    window: float
    micro_batches: int
    missed: float
    footprint: Footprint
    stages: dict[str, float]
    step_seconds: float
    tokens_per_second: float

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory."""
        return not self.footprint.lacks

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def predict(system: System, load: Load, hardware: Hardware) -> Prediction:
    """One system with the window and micro-batches that `load` names."""
    model, window = load.model, _window(system, load)
    each = load.batch / (load.micro_batches if system.schedule == "sfc" else 1)
    ahead = [
        Stage("device", _select(system, load, hardware, each)),
        Stage("device" if hardware.is_one else "host", _judge(system, load, hardware, each)),
        Stage(*_fetch(system, load, hardware, each)),
    ]
    attend, rest = _attend(system, load, hardware), _rest(load, hardware)
    count = round(load.batch / each)
    # What selecting needs on the device comes while the layer before computes.
    sent = load.batch * system.sent(model, _indexed(load)) / hardware.link
    layer = max(sent, layer_seconds(system.schedule, ahead, attend + rest, count))
    head = model.head_parameters
    last = hardware.device.matmul_seconds(head * model.ELEMENT, 2.0 * head * load.batch)
    names = ("select", "judge", "fetch")
    stages = {
        name: model.layers * count * stage.seconds for name, stage in zip(names, ahead, strict=True)
    }
    stages |= {"attend": model.layers * attend, "rest": model.layers * rest + last}
    step = model.layers * layer + last
    return Prediction(
        system.name, window, count, _misses(system, load), _footprint(system, load, hardware),
        stages, step, load.batch / step,
    )  # fmt: skip


def best_of(system: System, load: Load, hardware: Hardware) -> Prediction:
    """The fastest that fits of a system's windows and micro-batches; one that does not, if none."""
    windows = WINDOWS if system.window is None else (system.window,)
    counts = [n for n in MICRO_BATCHES if n <= load.batch] if system.schedule == "sfc" else [1]
    predictions = [
        predict(system, replace(load, window=window, micro_batches=count), hardware)
        for window in windows
        for count in counts
    ]
    return max(predictions, key=lambda each: (each.fits, each.tokens_per_second))


def predict_all(load: Load, hardware: Hardware) -> list[Prediction]:
    """Every system at its best, in the order of `SYSTEMS`."""
    return [best_of(system, load, hardware) for system in SYSTEMS.values()]


def _window(system: System, load: Load) -> float:
    if not system.selects:
        return 0.0
    window = load.window if system.window is None else system.window
    return min(window, load.context / load.selected)


def _indexed(load: Load) -> int:
    return max(0, load.context - _ALWAYS)


def _select(system: System, load: Load, hardware: Hardware, sequences: float) -> float:
    """Seconds of selecting in one layer for so many sequences."""
    if not system.selects:
        return 0.0
    where = hardware.device if system.attends_on == "device" else hardware.host
    n = _indexed(load)
    operations = 2.0 * sequences * system.operations(load.model, n)
    return where.seconds(sequences * system.scanned(load.model, n), operations)


def _judge(system: System, load: Load, hardware: Hardware, sequences: float) -> float:
    """Seconds of telling hits from misses; nothing where nothing is kept."""
    if not system.selects or system.window == 0:
        return 0.0
    if system.judges_on == "device":
        return hardware.device.launch
    entries = sequences * load.model.kv_heads * load.selected / system.entry_tokens
    each = hardware.judge + _misses(system, load) * hardware.admit
    return hardware.host.launch + entries * each


def _misses(system: System, load: Load) -> float:
    """Share of what is attended to that is not on the device."""
    if system.kv_on == "device" or system.attends_on == "host":
        return 0.0
    if not system.selects:
        return 1.0
    if load.reload is not None and system.window is None:
        return load.reload
    return reload_share(_window(system, load), load.selected / load.context)


def _fetch(system: System, load: Load, hardware: Hardware, sequences: float) -> tuple[str, float]:
    """What fetching in one layer occupies most, and for how long."""
    model, share = load.model, _misses(system, load)
    if share == 0:
        return "link", 0.0
    attended = load.selected if system.selects else load.context
    missed = sequences * attended * share
    link = missed * model.kv_bytes * system.fetched_part / hardware.link
    link += 2.0 * missed * model.kv_heads * model.head_dim * system.rebuild / hardware.device.vector
    disk = _disk_seconds(system, load, hardware, sequences, share)
    if disk > link:
        return "disk", hardware.device.launch + disk
    return ("device" if hardware.is_one else "link"), hardware.device.launch + link


def _disk_seconds(
    system: System, load: Load, hardware: Hardware, sequences: float, share: float
) -> float:
    """Seconds that the disk needs for what host memory has no room for."""
    model, held = load.model, _held_share(system, load, hardware)
    if held >= 1:
        return 0.0
    if not system.selects:
        whole = sequences * load.context * (1 - held) * model.kv_bytes
        return whole / hardware.disk_rate(_SEQUENTIAL_BYTES)
    if load.disk_bytes is not None and load.extent_bytes is not None:
        each = load.disk_bytes / model.layers * sequences / load.batch
        return each / hardware.disk_rate(load.extent_bytes)
    # The best-ranked blocks are above, so that misses of the disk are among those of the device.
    from_disk = min(share, 1 - covered_share(held))
    block = 2 * model.head_dim * model.ELEMENT * BLOCK_TOKENS
    wanted = load.selected / BLOCK_TOKENS * from_disk
    sizes = EXTENTS if load.extent_bytes is None else (load.extent_bytes,)
    segments = sequences * model.kv_heads
    return segments * min(
        extents_touched(wanted, load.context / BLOCK_TOKENS, size / block, system.apart)
        * size
        / hardware.disk_rate(size)
        for size in sizes
    )


def _attend(system: System, load: Load, hardware: Hardware) -> float:
    """Seconds of attention in one layer for the whole batch."""
    model = load.model
    where = hardware.device if system.attends_on == "device" else hardware.host
    tokens = float(load.context)
    if system.selects:
        held = max(1.0, _window(system, load)) if system.attends_residents else 1.0
        tokens = min(tokens, held * load.selected + _ALWAYS)
    kv = load.batch * tokens * model.kv_bytes
    # A byte of keys and values meets each query head of its group in one multiply-add of two bytes.
    return where.seconds(kv, kv / model.ELEMENT * 2 * model.group)


def _rest(load: Load, hardware: Hardware) -> float:
    """Seconds of one layer beside attention: its weights are read once for the whole batch."""
    weights = load.model.layer_parameters
    return hardware.device.matmul_seconds(weights * load.model.ELEMENT, 2.0 * weights * load.batch)


def _total_kv(load: Load) -> float:
    return float(load.batch * load.context * load.model.kv_bytes * load.model.layers)


def _host_index(system: System, load: Load) -> float:
    return load.batch * load.model.layers * system.host_index(load.model, _indexed(load))


def _held_share(system: System, load: Load, hardware: Hardware) -> float:
    """Share of all keys and values that host memory has room for."""
    if not system.spills:
        return 1.0
    room = hardware.host.memory_bytes - _host_index(system, load)
    if hardware.is_one:
        room -= _device_bytes(system, load)
    return min(1.0, max(0.0, room / _total_kv(load)))


def _device_bytes(system: System, load: Load) -> float:
    """Weights, work space, and what the fast tier holds."""
    model = load.model
    work = _HIDDEN_COPIES * load.context * model.hidden * model.ELEMENT
    return model.weight_bytes + work + _fast_bytes(system, load)


def _fast_bytes(system: System, load: Load) -> float:
    """Index, and the keys and values that stay on the device."""
    model, kv = load.model, load.model.kv_bytes * load.model.layers * load.batch
    index = load.batch * model.layers * system.device_index(model, _indexed(load))
    if system.kv_on == "device":
        return index + kv * load.context
    if not system.selects:
        # One layer is attended to while the next one comes.
        return index + 2 * model.kv_bytes * load.batch * load.context
    held = 0.0
    if system.attends_on == "device":
        held = max(1.0, _window(system, load)) * load.selected
    return index + kv * (held + _ALWAYS)


def _footprint(system: System, load: Load, hardware: Hardware) -> Footprint:
    device, total = _device_bytes(system, load), _total_kv(load)
    host_index = _host_index(system, load)
    held = 0.0 if system.kv_on == "device" else system.fetched_part * total
    disk = 0.0
    if system.spills and _held_share(system, load, hardware) < 1:
        held, disk = held * _held_share(system, load, hardware), total
    host = held + host_index
    needed = host + device if hardware.is_one else host
    lacks = "" if _fits(needed, hardware.host.memory_bytes) else "host"
    if not _fits(device, hardware.device.memory_bytes):
        lacks = "device"
    return Footprint(_fast_bytes(system, load), device, host, disk, lacks)


def _fits(needed: float, room: int) -> bool:
    # What is sized to fill a memory may come out a rounding error above it.
    return needed <= room * (1 + 1e-9)
