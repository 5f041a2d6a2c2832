"""Compile every GPU kernel ahead of time, without a GPU, and note registers, spills and memory.

``python -m tierstore.benchmarks.gpu_compile [JSON]`` prints the table of ``docs/gpu.md`` and writes
the report.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tierstore.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TARGETS = (80, 90)
DIMS = (64, 128, 256)


class Kernel(Protocol):
    """A function that Triton compiles."""

    arg_names: list[str]
    __name__: str
    __module__: str


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of one kernel on one target.

    registers: of a thread. spill_bytes: stored and loaded by a thread. shared_bytes: of a program.
    """

    kernel: str
    shape: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int


Case: TypeAlias = "tuple[Kernel, str, Mapping[str, str], Mapping[str, object]]"
"""A kernel, what it is compiled for, the types of its pointers, and its constants."""


def _kernels() -> Iterator[Case]:
    """Kernels with the types of their pointers and the constants of a Llama-3-8B geometry."""
    ints = dict.fromkeys(
        ("counts", "costs", "unit_ptr", "unit_blocks", "budgets", "ids", "unit_of", "blocks",
         "slots", "strip_length", "chunks", "blocks_of", "segments", "slot_of", "handles",
         "tally"), "*i32",
    )  # fmt: skip
    bytes_ = dict.fromkeys(("valid", "valid_of", "kept", "codes"), "*u8")
    wide = dict.fromkeys(("row_ptr", "cuts", "found", "labels", "packed", "last_used"), "*i64")
    types = ints | bytes_ | wide
    for element in ("bf16", "fp32"):
        kv = dict.fromkeys(
            ("query", "units", "high", "low", "pool", "strip_key", "strip_value", "keys", "rows",
             "out"), f"*{element}",
        )  # fmt: skip
        for dim in DIMS:
            yield from _attention(types | kv, element, dim)
        yield from _blocks(types | kv, element)
        yield from _codecs(types | kv, element)
    yield from _of_any_element(types)


def _attention(types: Mapping[str, str], element: str, dim: int) -> Iterator[Case]:
    """Scores and attention over elements of a type."""
    from tierstore.kernels.triton import attend, logits
    from tierstore.kernels.triton.launch import tile_of

    heads = {"GROUP": 4, "HEADS": 16}
    name = f"G4 d{dim} {element}"
    tile = tile_of(dim, 2 if element == "bf16" else 4)
    scored = {**heads, "DIM": dim, "WIDTH": dim, "TILE": tile}
    kv_logits = {**types, "out": "*fp32"}
    yield logits.dot_kernel, name, kv_logits, scored
    yield logits.box_kernel, name, kv_logits, scored
    yield attend.attend_kernel, f"{name} P4", types, {
        **heads, "TOKENS": 4, "KEY": dim, "VALUE": dim, "OFFSET": 4 * dim,
        "KEY_WIDTH": dim, "VALUE_WIDTH": dim, "TILE": tile,
    }  # fmt: skip
    yield attend.merge_kernel, f"{name} S64", types, {
        "GROUP": 4, "VALUE": dim, "VALUE_WIDTH": dim, "ROOM": 64, "MERGE": True,
    }  # fmt: skip


def _blocks(types: Mapping[str, str], element: str) -> Iterator[Case]:
    """What is made of blocks, and their copies."""
    from tierstore.kernels.triton import gather, represent

    yield represent.page_kernel, f"P16 d128 {element}", types, {
        "TOKENS": 16, "DIM": 128, "ROOM": 16, "WIDTH": 128, "MEAN": True,
    }  # fmt: skip
    yield represent.page_kernel, f"P16 d128 {element} bounds", {
        **types, "first": f"*{element}", "second": f"*{element}"
    }, {"TOKENS": 16, "DIM": 128, "ROOM": 16, "WIDTH": 128, "MEAN": False}  # fmt: skip
    yield gather.gather_kernel, element, types, {"TILE": gather.TILE}


def _codecs(types: Mapping[str, str], element: str) -> Iterator[Case]:
    from tierstore.kernels.triton import quantise

    for bits in (4, 8):
        codec = {"TOKENS": 4, "CHANNELS": 128, "LINES": quantise.LINES}
        byte = {"BITS": bits, "BYTES": 16 * bits, "GROUP": 64}
        floats = {**types, "low": "*fp32", "high": "*fp32", "scale": "*fp32"}
        coded = f"{bits} bits {element}"
        yield quantise.encode_kernel, coded, floats, {**codec, **byte, "ROOM": 16 * bits}
        yield quantise.decode_kernel, coded, floats, {**codec, **byte, "ROOM": 128}
    for group, room in ((1, 128), (64, 64)):
        ends = {**types, "low": "*i32", "high": "*i32"}
        yield quantise.ranges_kernel, f"groups of {group} {element}", ends, {
            **codec, "GROUP": group, "ROOM": room,
        }  # fmt: skip


def _of_any_element(types: Mapping[str, str]) -> Iterator[Case]:
    """Kernels that see no elements of keys or values."""
    from tierstore.kernels import tables
    from tierstore.kernels.triton import clustering, combine, directory, pq, select

    tile = combine.TILE
    yield combine.normaliser_kernel, "sized", types, {"SIZED": True, "TILE": tile}
    for rule in ("sum", "max", "mean_group"):
        yield combine.combine_kernel, f"G4 {rule}", types, {
            "GROUP": 4, "HEADS": 4, "AGGREGATE": rule, "SOFTMAX": True, "SIZED": True, "TILE": tile,
        }  # fmt: skip
    yield combine.pool_kernel, "4 pages", types, {
        "PAGES": 4, "ROOM": 4, "COARSE": True, "SOFTMAX": True, "TILE": tile // 4,
    }  # fmt: skip
    yield combine.keep_kernel, "", types, {"TILE": tile}
    yield select.cut_kernel, "", types, {"TILE": select.TILE}
    yield select.write_kernel, "", types, {"TILE": select.TILE}
    for dim in (16, *DIMS):
        spread = {"DIM": dim, "WIDTH": dim, "TILE": clustering.TILE}
        yield clustering.nearest_kernel, f"d{dim}", types, spread
        yield clustering.sums_kernel, f"d{dim}", {**types, "sizes": "*i64"}, spread
    coded = {"BITS": 6, "LANES": pq.LANES}
    yield pq.pack_kernel, "6 bits", types, {**coded, "ROOM": 8}
    yield pq.scan_kernel, "G4 8 x 6 bits", types, {
        **coded, "GROUP": 4, "PARTS": 8, "HEADS": 4,
    }  # fmt: skip
    yield directory.judge_kernel, "", types, {"CHUNK": tables.CHUNK, "TILE": directory.TILE}


_SCALARS = {"scale": "fp32", "unit_tokens": "fp32", "log_group": "fp32", "step": "i64"}
_ARRAYS = frozenset(
    [
        "out",
        "logits",
        "sizes",
        "norms",
        "scores",
        "out_scores",
        "parts",
        "part_lse",
        "lse",
        "points",
        "centroids",
        "offsets",
        "sums",
        "tables",
        "first",
        "second",
    ]
)


def _signature(
    kernel: Kernel, types: Mapping[str, str], constants: Mapping[str, object]
) -> dict[str, str]:
    """The type of each argument: a pointer as `types` says, else to float32; or a number."""
    found = {}
    for name in kernel.arg_names:
        is_offset = name == "first" and kernel.arg_names[0] in {"rows", "codes"}
        if name in constants:
            found[name] = "constexpr"
        elif name in types:
            found[name] = types[name]
        elif name in _ARRAYS and not is_offset:
            found[name] = "*fp32"
        else:
            found[name] = _SCALARS.get(name, "i64" if name.endswith(("stride", "row")) else "i32")
    return found


def compile_triton() -> Iterator[Compiled]:
    """Every Triton kernel for every target."""
    try:
        import triton
    except ImportError as error:
        raise MissingExtraError("triton", "cuda", "compiling GPU kernels") from error
    from triton.backends.compiler import GPUTarget

    for kernel, shape, types, constants in _kernels():
        signature = _signature(kernel, types, constants)
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        for target in TARGETS:
            made = triton.compile(
                source, target=GPUTarget("cuda", target, 32), options={"enable_fp_fusion": False}
            )
            name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
            registers, spilled = resources(made.asm["cubin"])
            yield Compiled(name, shape, f"sm_{target}", registers, spilled, made.metadata.shared)


def compile_cuda() -> Iterator[Compiled]:
    """The CUDA C++ source for every target, by NVRTC."""
    from tierstore.kernels.cuda import source

    for target in TARGETS:
        registers, spilled = resources(nvrtc(source(), f"sm_{target}"))
        yield Compiled("gather.cu gather_blocks", "", f"sm_{target}", registers, spilled, 0)


def nvrtc(source: str, architecture: str) -> bytes:
    """A cubin; MissingExtraError without NVRTC, RuntimeError with the compiler's log."""
    try:
        library = next(
            metadata.distribution("nvidia-cuda-nvrtc").locate_file(file)
            for file in metadata.files("nvidia-cuda-nvrtc") or ()
            if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)
        )
    except (metadata.PackageNotFoundError, StopIteration) as error:
        raise MissingExtraError("nvidia-cuda-nvrtc", "test", "compiling CUDA C++") from error
    call = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    call.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gather.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    if call.nvrtcCompileProgram(program, 1, options):
        call.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC for {architecture}: {log.value.decode()}")
    call.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    call.nvrtcGetCUBIN(program, cubin)
    call.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, to which registers spill.

    By the ``cuobjdump`` that Triton's wheel has.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", answer)
    assert found is not None, answer
    return int(found[1]), int(found[2])


def table(rows: Iterable[Compiled]) -> Iterator[str]:
    """Lines of Markdown, one for each kernel, with what each target needs."""
    yield "| kernel | shape | registers sm_80 / sm_90 | spilled bytes | shared memory, bytes |"
    yield "|---|---|---|---|---|"
    for _, of_targets in groupby(rows, key=lambda row: (row.kernel, row.shape)):
        made = list(of_targets)
        needs = (
            " / ".join(str(getattr(row, name)) for row in made)
            for name in ("registers", "spill_bytes", "shared_bytes")
        )
        yield f"| `{made[0].kernel}` | {made[0].shape} | {' | '.join(needs)} |"


def main(target: str | None = None) -> None:
    """Compile, print a Markdown table, and write JSON where a file is named."""
    rows = []

    def compiled() -> Iterator[Compiled]:
        for row in chain(compile_cuda(), compile_triton()):
            rows.append(row)
            yield row

    for line in table(compiled()):
        print(line, flush=True)
    if target is not None:
        versions = {name: metadata.version(name) for name in ("triton", "nvidia-cuda-nvrtc")}
        report = {"versions": versions, "kernels": [asdict(row) for row in rows]}
        Path(target).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
