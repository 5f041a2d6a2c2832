"""``tierstore trace``: record what a model uses, and replay it through policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.cli import trace_record

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

_REPLAY = """
Replay a trace through policies and print what each would have kept. Reads traces of tierstore,
Mooncake's JSON lines (.jsonl) and libCacheSim's oracleGeneral (.bin, .oracleGeneral, also .zst).
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``trace`` to the `tierstore` command."""
    summary = "record what a model uses, and replay it through policies"
    parser = subparsers.add_parser("trace", help=summary, description=summary.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", metavar="action", required=True)
    trace_record.add_action(actions)
    _add_replay(actions)


def _add_replay(actions: Subparsers) -> None:
    replay = actions.add_parser(
        "replay", help="hit ratios of policies at some capacities", description=_REPLAY
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("trace", metavar="TRACE", help="file with a trace")
    replay.add_argument(
        "--policies", default="all", metavar="LIST", help="names with commas between; default: all"
    )
    replay.add_argument(
        "--capacity",
        metavar="LIST",
        help="of requests: shares of the footprint, or blocks, bytes where the trace has sizes; "
        "default: 1%%,5%%,10%%. Of attention: budgets, shares of a segment's blocks, or blocks; "
        "default: x1.5,x2,x3",
    )
    replay.add_argument(
        "--budget", help="of attention: what a step selects, a share of the context or tokens"
    )
    replay.add_argument("--plot", metavar="FILE", help="draw hit ratio over capacity")
    replay.add_argument("--json", metavar="FILE", help="write the numbers to a file")


def _replay(options: argparse.Namespace) -> None:
    from tierstore.adapters.cli import trace_replay

    trace_replay.run(options)
