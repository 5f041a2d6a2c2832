"""``tierstore bench``: the benchmarks by name."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.cli.json_file import write_json
from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.sizes import MOST
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from tierstore.adapters.cli import Subparsers
    from tierstore.benchmarks.findings import Findings


class Benchmark(NamedTuple):
    """What a benchmark measures, and which options it takes.

    Its module, ``tierstore.benchmarks.NAME``, has a function ``run(say, **options)`` that returns
    `Findings`; `say` is told about progress.
    """

    summary: str
    options: frozenset[str]


BENCHMARKS = {
    "decode": Benchmark(
        "decode and prefill of the demo model against transformers' DynamicCache",
        frozenset({"repeat", "tokens", "disk"}),
    ),
    "attention": Benchmark(
        "a step of sparse attention at Llama-3-8B sizes against full attention",
        frozenset({"repeat", "tokens", "layers"}),
    ),
    "quality": Benchmark(
        "how far sparse attention is from full attention, and whether it finds planted facts",
        frozenset({"tokens"}),
    ),
    "index": Benchmark(
        "every index at four budgets: attention found, KL, planted numbers, bytes and time",
        frozenset(
            {"tokens", "steps", "parts", "indexes", "documents", "captures", "model", "plot"}
        ),
    ),
    "replay": Benchmark(
        "a skewed trace through queue policies, and through libCacheSim where it is installed",
        frozenset({"repeat"}),
    ),
    "hysteresis": Benchmark(
        "bytes saved by fetching only what is better than the last block selected, and its cost",
        frozenset({"tokens"}),
    ),
    "windows": Benchmark(
        "bytes saved by sharing window and budget out between heads, on text never seen before",
        frozenset({"tokens", "traces"}),
    ),
    "store": Benchmark(
        "the keyed store against lmdb, diskcache, rocksdict and plain files, and fio",
        frozenset({"repeat", "disk", "parts", "records"}),
    ),
    "kernels": Benchmark(
        "every CPU kernel against plain torch and what the machine could reach, and index upkeep",
        frozenset({"repeat", "parts"}),
    ),
    "predict": Benchmark(
        "what the cost model predicts for this machine beside what is measured on it",
        frozenset({"repeat", "tokens", "layers", "disk"}),
    ),
    "prefix": Benchmark(
        "loading a prompt that was computed before, against its prefill and the disk",
        frozenset({"repeat", "tokens", "disk"}),
    ),
    "pipeline": Benchmark(
        "steps of a batch with its blocks on disk, under each schedule of the stages",
        frozenset({"repeat", "tokens", "layers", "disk"}),
    ),
    "guesses": Benchmark(
        "how much of what a layer selects had been guessed in the layer before, or a step before",
        frozenset({"tokens"}),
    ),
    "placement": Benchmark(
        "where a prompt's blocks should start: critical blocks covered by each ranking",
        frozenset({"tokens", "captures"}),
    ),
    "layout": Benchmark(
        "bytes read from disk for bytes wanted, blocks in order of time or packed by cluster",
        frozenset({"traces"}),
    ),
    "ladder": Benchmark(
        "fetch time per layer of the four ways from disk, and with warm-up",
        frozenset({"repeat", "tokens", "layers", "captures", "disk"}),
    ),
    "policies": Benchmark(
        "eviction policies on recorded attention traces, against LRU and Belady, and their cost",
        frozenset({"repeat", "traces"}),
    ),
    "batching": Benchmark(
        "requests that join and leave the demo model's batch: tokens as alone, and their rate",
        frozenset({"repeat", "tokens"}),
    ),
    "endurance": Benchmark(
        "ten thousand steps of sequences that come and go: memory, its accountant, and the output",
        frozenset({"steps", "disk"}),
    ),
}
_OPTIONS = (
    "repeat", "tokens", "layers", "disk", "parts", "records", "traces", "indexes", "documents",
    "captures", "model", "plot", "steps",
)  # fmt: skip


def add_command(subparsers: Subparsers) -> None:
    """Add ``bench`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure against named baselines on this machine",
        description="Run one benchmark, or without a name list them. They take minutes and want an "
        "otherwise idle machine.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, metavar="NAME", help="which one")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was measured to a file"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="paired rounds")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of context")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model")
    parser.add_argument(
        "--disk", metavar="DIR", help="where files lie; by default with temporary files"
    )
    parser.add_argument(
        "--parts",
        metavar="LIST",
        help="what to measure of get,put,cold,open (store), of mass,kl,numbers (index), or of "
        "large,demo,append,build (kernels)",
    )
    parser.add_argument(
        "--traces",
        metavar="DIR",
        help="attention traces (policies and layout, which need them; windows)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="decoding steps (endurance, index)")
    parser.add_argument("--records", type=int, metavar="N", help="records of the store to open")
    _add_index_options(parser)


def _add_index_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--indexes", metavar="LIST", help="which ones (index)")
    parser.add_argument("--documents", metavar="LIST", help="text files to read (index)")
    parser.add_argument(
        "--captures", metavar="LIST", help="files of tierstore capture, instead of a model"
    )
    parser.add_argument("--model", metavar="smollm2|DIR|FILE.gguf", help="the model (index)")
    parser.add_argument("--plot", metavar="FILE", help="draw what was found (index)")


def run(arguments: argparse.Namespace) -> None:
    """Check the arguments; then run the benchmark and report."""
    if arguments.name is None:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:<11}{benchmark.summary}")
        return
    options = _checked_options(arguments)
    if arguments.json is not None:
        check_target(arguments.json, "json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    measure: Callable[..., Findings] = _module_run(arguments.name)
    findings = measure(_say, **options)
    findings.print()
    if arguments.json is not None:
        write_json(arguments.json, findings.to_dict())


def _checked_options(arguments: argparse.Namespace) -> dict[str, object]:
    """The options that were given; ConfigError where one is wrong or means nothing."""
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in BENCHMARKS[arguments.name].options:
            able = ", ".join(key for key, each in BENCHMARKS.items() if name in each.options)
            raise ConfigError(f"--{name}: means nothing to {arguments.name}, only to {able}")
        if isinstance(value, int):
            check_whole(name, value, 1, MOST)
    return given


def _module_run(name: str) -> Callable[..., Findings]:
    function: Callable[..., Findings] = importlib.import_module(f"{__package__}.{name}").run
    return function


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)
