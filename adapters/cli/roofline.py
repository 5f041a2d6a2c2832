"""``tierstore roofline``: what this machine can do, and what attention can attain on it."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from tierstore.adapters.cli.json_file import write_json
from tierstore.adapters.cli.prediction import hardware_for
from tierstore.whole_file import check_target

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from tierstore.adapters.cli import Subparsers
    from tierstore.hardware import Hardware

_DESCRIPTION = """
Measure this machine, in about half a minute: arithmetic, memory, blocks into the fast tier, and
reads from disk. Then tell what attention can attain with none, 80 and 90 % of its blocks in the
fast tier, and below which intensity P it is better done where the blocks lie. It wants an otherwise
idle machine.
"""
SCHEMA = 1


def add_command(subparsers: Subparsers) -> None:
    """Add ``roofline`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "roofline", help="measure this machine and draw its roofline", description=_DESCRIPTION
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--disk",
        metavar="DIR",
        help="directory on the disk to measure; default: that for temporary files",
    )
    parser.add_argument(
        "--gpu", metavar="NAME|FILE", help="show that machine instead of measuring this one"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write it to a file, which tierstore plan --gpu takes"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it to a file, such as roofline.png")


def run(options: argparse.Namespace) -> None:
    """Measure, or look up; then show."""
    if options.json is not None:
        check_target(options.json, "json")
    if options.plot is not None:
        from tierstore.adapters.cli.pictures import new_figure

        new_figure(1, 1, options.plot)
    hardware = _measured(options.disk) if options.gpu is None else hardware_for(options.gpu)
    from rich.console import Console

    console = Console(width=100, highlight=False, markup=False)
    console.print(rates(hardware))
    console.print(attained(hardware))
    if options.json is not None:
        write_json(options.json, content(hardware))
    if options.plot is not None:
        from tierstore.adapters.cli.roofline_picture import draw

        draw(hardware, options.plot)


def _measured(disk: str | None) -> Hardware:
    from tierstore.adapters.cli.screen import waiting
    from tierstore.adapters.planner.measuring import measure

    with waiting("measuring this machine"):
        return measure(disk or tempfile.gettempdir(), lambda _: None)


def content(hardware: Hardware) -> dict[str, object]:
    """Plain data for JSON: the rates, and what follows from them."""
    from tierstore.roofline import HITS, crossing, roofs

    return {
        "schema": SCHEMA,
        "hardware": hardware.to_dict(),
        "roofs": [
            {
                "name": roof.name,
                "flops": roof.flops,
                "bandwidth": roof.bandwidth,
                "ridge": roof.ridge,
            }
            for roof in roofs(hardware)
        ],
        "crossing": {f"{hits:.0%}": _finite(crossing(hardware, hits)) for hits in HITS},
    }


def _finite(number: float) -> float | None:
    """None for infinite, which JSON has no word for."""
    return None if number == float("inf") else number


def rates(hardware: Hardware) -> Table:
    """What was measured, or stands in a data sheet."""
    from rich.table import Table

    shown = Table(title=f"{hardware.name}: {hardware.source}", title_justify="left")
    shown.add_column("")
    shown.add_column("device", justify="right")
    shown.add_column("host", justify="right")
    device, host = hardware.device, hardware.host
    for name, one, other, unit, scale in (
        ("matrix products, 16 bit", device.matmul, host.matmul, "TFLOP/s", 1e12),
        ("attention and scoring", device.vector, host.vector, "TFLOP/s", 1e12),
        ("memory", device.memory, host.memory, "GB/s", 1e9),
    ):
        shown.add_row(f"{name}, {unit}", f"{one / scale:.3g}", f"{other / scale:.3g}")
    shown.add_row(
        "a stage beside its work, µs", f"{1e6 * device.launch:.3g}", f"{1e6 * host.launch:.3g}"
    )
    shown.add_section()
    shown.add_row("blocks into the fast tier, GB/s", f"{hardware.link / 1e9:.3g}", "")
    shown.add_row("judging, ns for each block", "", f"{1e9 * hardware.judge:.3g}")
    shown.add_row("fetching beside the copy, ns for each block", "", f"{1e9 * hardware.admit:.3g}")
    for size, rate in hardware.disk:
        shown.add_row(f"disk, reads of {size >> 10} KiB, GB/s", "", f"{rate / 1e9:.3g}")
    return shown


def attained(hardware: Hardware) -> Table:
    """Attainable FLOP/s at the intensities of models, roof by roof; and the crossing points."""
    from rich.table import Table

    from tierstore.roofline import HITS, crossing, roofs

    shown = Table(title="attainable GFLOP/s, by query heads for each KV head", title_justify="left")
    shown.add_column("")
    for group in (1, 3, 4, 5, 8):
        shown.add_column(str(group), justify="right")
    shown.add_column("ridge, FLOP/byte", justify="right")
    for roof in roofs(hardware):
        # In 16 bits, each byte of keys and values meets each query head in one operation.
        cells = [f"{roof.attainable(group) / 1e9:.3g}" for group in (1, 3, 4, 5, 8)]
        shown.add_row(roof.name, *cells, f"{roof.ridge:.3g}")
    points = ", ".join(f"{hits:.0%} hits {crossing(hardware, hits):.3g}" for hits in HITS)
    shown.caption = f"the host in place wins below P, FLOP/byte: {points}"
    shown.caption_justify = "left"
    return shown
