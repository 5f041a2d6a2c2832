"""``tierstore profile``: windows, the pinned split and tuning of one model on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tierstore.adapters.cli.generate import (
    add_model_options,
    add_text_options,
    check_dtype,
    prepare_libraries,
)
from tierstore.adapters.cli.json_file import write_json
from tierstore.adapters.documents import read_document
from tierstore.arguments import check_whole
from tierstore.ephemeral import PrivateDirectory
from tierstore.errors import ConfigError
from tierstore.sizes import MOST, check_window, parse_budget, parse_size
from tierstore.whole_file import check_target, unwritable

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from tierstore.adapters.cli import Subparsers
    from tierstore.adapters.planner.tuning import Tuned

_DESCRIPTION = """
Let a model read a document, then choose for this machine, in about a minute: the index's centroids,
the window of the fast tier, micro-batches, and how windows and page-locked memory are shared out
between layers and heads. It writes a plan, which tierstore generate takes as --plan.
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``profile`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "profile", help="make a plan for a model on this machine", description=_DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument("plan", metavar="PLAN", help="file to write")
    add_text_options(parser, steps=64)
    parser.add_argument(
        "--budget", help="share of the context (6.25%%) or tokens; the preset's by default"
    )
    parser.add_argument("--preset", default="kvdrive", help="which system; default: %(default)s")
    parser.add_argument(
        "--batch", type=int, default=8, metavar="N", help="sequences; default: %(default)s"
    )
    parser.add_argument(
        "--window", type=float, metavar="X", help="mean window in budgets, instead of tuning it"
    )
    parser.add_argument(
        "--dram", metavar="SIZE", help="page-locked memory to share out between heads"
    )
    parser.add_argument(
        "--disk", metavar="DIR", help="tune for a fast tier over this disk instead of DRAM"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was tried to a file")
    add_model_options(parser)


def run(options: argparse.Namespace) -> None:
    """Check what can be checked without a model, then profile."""
    for name in ("tokens", "steps", "batch"):
        check_whole(name, getattr(options, name), 1, MOST)
    if options.steps < 16:
        raise ConfigError(f"steps={options.steps}: expected at least 16 to learn from")
    check_dtype(options.dtype)
    if options.budget is not None:
        parse_budget(options.budget)
    if options.window is not None:
        check_window(options.window)
    if options.dram is not None:
        parse_size(options.dram, "dram")
    if options.disk is not None:
        PrivateDirectory(options.disk).close()
    for target, what in ((options.plan, "plan"), (options.json, "json")):
        if target is not None:
            check_target(target, what)
    document = read_document(options.document)
    prepare_libraries()
    from tierstore.adapters.cli.profiling import profile

    plan, tuned = profile(options, document, _say)
    try:
        plan.save(options.plan)
    except OSError as error:
        raise unwritable(options.plan, "plan", error) from error
    if options.json is not None:
        write_json(options.json, content(tuned))
    from rich.console import Console

    console = Console(width=100, highlight=False, markup=False)
    for name in tuned.trials:
        console.print(table(name, tuned))
    print(
        f"{options.plan}: {len(plan.windows)} layers, windows of {plan.window:.2f} budgets, "
        f"micro-batches of {tuned.micro_batch}"
    )


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def content(tuned: Tuned) -> dict[str, object]:
    """Plain data for JSON."""
    return {
        "schema": 1,
        "tokens_per_centroid": tuned.tokens_per_centroid,
        "window": tuned.window,
        "micro_batch": tuned.micro_batch,
        "trials": {
            name: [
                {
                    "setting": trial.setting,
                    "seconds": trial.seconds,
                    "found": trial.found,
                    "stages": dict(vars(trial.times)),
                }
                for trial in trials
            ]
            for name, trials in tuned.trials.items()
        },
    }


def table(name: str, tuned: Tuned) -> Table:
    """What was tried of one setting; times of one layer, in µs."""
    from rich.table import Table

    chosen = {
        "tokens per centroid": tuned.tokens_per_centroid,
        "window": tuned.window,
        "micro-batch": tuned.micro_batch,
    }
    shown = Table(title=name, title_justify="left")
    for heading in ("", "select", "judge", "fetch", "attend", "missed", "found", "together", ""):
        shown.add_column(heading, justify="right")
    for trial in tuned.trials[name]:
        times = trial.times
        stages = (times.select, times.judge, times.fetch, times.attend)
        shown.add_row(
            f"{trial.setting:g}",
            *(f"{1e6 * seconds:.0f}" for seconds in stages),
            f"{times.missed:.1%}",
            "" if trial.found is None else f"{trial.found:.3f}",
            f"{1e6 * trial.seconds:.0f}",
            "chosen" if trial.setting == chosen[name] else "",
        )
    return shown
