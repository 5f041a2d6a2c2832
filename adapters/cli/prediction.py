"""``tierstore plan`` without an action: what each system needs and how fast it is, predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.adapters.cli.json_file import write_json
from tierstore.arguments import check_whole
from tierstore.errors import ConfigError
from tierstore.sizes import MOST, format_size, parse_budget, parse_size
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from tierstore.adapters.planner.prediction import Load, Prediction
    from tierstore.hardware import Hardware

OPTIONS = (
    "model",
    "gpu",
    "dram",
    "device_memory",
    "context",
    "batch",
    "step_budget",
    "json_file",
)
_TOKENS = re.compile(r"(\d+)([kKmM]?)")
_RECOMMENDED = ("kvdrive", "best")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `run` needs; all None where they are not given."""
    load = parser.add_argument_group("predict, on a machine that need not be here")
    load.add_argument("--model", metavar="NAME", help="llama3-8b, qwen3-8b, qwen3-14b, …")
    load.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="l20, h20, rtx4090, h200, a100, or what tierstore roofline --json wrote",
    )
    load.add_argument("--dram", metavar="SIZE", help="host memory; default: the machine's")
    load.add_argument(
        "--device-memory", metavar="SIZE", help="memory of the device; default: the machine's"
    )
    load.add_argument("--context", metavar="TOKENS", help="such as 122k; default: 120k")
    load.add_argument("--batch", type=int, metavar="N", help="sequences; default: 1")
    load.add_argument(
        "--budget",
        dest="step_budget",
        metavar="BUDGET",
        help="share of the context (1.5625%%, the default) or tokens that a step selects",
    )
    load.add_argument("--json", dest="json_file", metavar="FILE", help="write everything to a file")


def parse_tokens(text: str, what: str = "context") -> int:
    """A number of tokens: ``"122k"`` is 122 times 1,024. ConfigError for anything else."""
    match = _TOKENS.fullmatch(text.strip())
    factor = {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    tokens = int(match[1]) * factor if match and len(match[1]) < 12 else 0
    if not 1 <= tokens <= MOST:
        raise ConfigError(
            f"{what}={text!r:.40}: expected tokens from 1 to {MOST}, for example 122k or 8192"
        )
    return tokens


def hardware_for(name: str) -> Hardware:
    """The machine called so, or the one in that file."""
    from tierstore.hardware import PRESETS, Hardware

    if name in PRESETS:
        return PRESETS[name]
    try:
        content = json.loads(Path(name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"gpu={name!r}: expected one of {', '.join(PRESETS)}, or a file that tierstore "
            f"roofline --json wrote ({error})"
        ) from error
    return Hardware.from_dict(content.get("hardware") if isinstance(content, dict) else content)


def run(options: argparse.Namespace) -> None:
    """Predict and show."""
    if options.model is None or options.gpu is None:
        raise ConfigError(
            "plan: expected --model and --gpu, for example --model llama3-8b --gpu l20, or one of "
            "the actions make and show"
        )
    from tierstore.adapters.planner.models import model_named
    from tierstore.adapters.planner.prediction import Load, predict_all

    if options.json_file is not None:
        check_target(options.json_file, "json")
    batch = 1 if options.batch is None else options.batch
    check_whole("batch", batch, 1, 1 << 16)
    load = Load(
        model_named(options.model),
        parse_tokens(options.context or "120k"),
        batch,
        parse_budget(options.step_budget or "1.5625%"),
    )
    sizes = [
        None if text is None else parse_size(text, name)
        for text, name in ((options.device_memory, "device-memory"), (options.dram, "dram"))
    ]
    hardware = hardware_for(options.gpu).with_memory(*sizes)
    predictions = predict_all(load, hardware)
    _show(predictions, load, hardware)
    if options.json_file is not None:
        write_json(options.json_file, _content(predictions, load, hardware))


def _content(predictions: list[Prediction], load: Load, hardware: Hardware) -> dict[str, object]:
    asked = {"model": load.model.name, "context": load.context, "batch": load.batch}
    return {
        "schema": 1,
        "load": asked | {"selected_tokens": load.selected},
        "hardware": hardware.to_dict(),
        "predictions": [each.to_dict() for each in predictions],
    }


def _show(predictions: list[Prediction], load: Load, hardware: Hardware) -> None:
    from rich.console import Console

    console = Console(width=130, highlight=False, markup=False)
    console.print(table(predictions, load, hardware))
    for name in _RECOMMENDED:
        prediction = next(each for each in predictions if each.system == name)
        console.print(recommendation(prediction))
    console.print(f"{hardware.name}: {hardware.source}", soft_wrap=True)


def table(predictions: list[Prediction], load: Load, hardware: Hardware) -> Table:
    """One row for each system; stages in ms of a step, as if none overlapped."""
    from rich.table import Table

    shown = Table(
        title=f"{load.model.name} on {hardware.name}: {load.batch} x {load.context:,} tokens, "
        f"{load.selected:,} selected; stages in ms of a step, as if none overlapped",
        title_justify="left",
    )
    shown.add_column("system")
    for heading in ("device", "host", "disk", "select", "judge", "fetch", "attend", "rest"):
        shown.add_column(heading, justify="right")
    for heading in ("step, ms", "tokens/s"):
        shown.add_column(heading, justify="right")
    for each in predictions:
        footprint = each.footprint
        sizes = (footprint.device, footprint.host, footprint.disk)
        times = [f"{1e3 * seconds:.1f}" for seconds in each.stages.values()]
        step, speed = f"{1e3 * each.step_seconds:.1f}", f"{each.tokens_per_second:.1f}"
        if not each.fits:
            step, speed = "out of", f"{footprint.lacks} memory"
        sizes_shown = (format_size(size) for size in sizes)
        shown.add_row(each.system, *sizes_shown, *times, step, speed)
    return shown


def recommendation(prediction: Prediction) -> str:
    """What to run one of our presets with, in words."""
    if not prediction.fits:
        return (
            f"{prediction.system}: out of {prediction.footprint.lacks} memory; pass fewer "
            "sequences or tokens"
        )
    footprint = prediction.footprint
    disk = " --disk DIR" if footprint.disk else ""
    return (
        f"{prediction.system}: window of {prediction.window:g} budgets, "
        f"{prediction.micro_batches} micro-batches; --fast {_option(footprint.fast)} "
        f"--dram {_option(footprint.host)}{disk}"
    )


def _option(size: float) -> str:
    """A size as the options take it."""
    return format_size(size).replace(" ", "")
