"""``tierstore store``: look into stores on disk, check them, repair them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

_DESCRIPTION = """
Look into a store that no process has open: a directory that was given to KeyedStore, or one of the
namespaces in it. Exit code 0: all is well; 1: something was found that is not as it should be; 2:
the command could not be carried out, for example because the store is open.
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``store`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "store", help="look into, check and repair stores on disk", description=_DESCRIPTION
    )
    actions = parser.add_subparsers(title="actions", metavar="action", required=True)
    stat = _add(actions, "stat", "whose values a store holds, how many, and in what sizes")
    stat.add_argument("--json", action="store_true", help="print JSON")
    listing = _add(actions, "ls", "the keys in a store, in hexadecimal, in no particular order")
    listing.add_argument("--prefix", default="", metavar="HEX", help="only keys that begin so")
    listing.add_argument(
        "--long",
        action="store_true",
        help="with bytes, bytes on disk, sequence, codec",
    )
    listing.add_argument("--limit", type=int, metavar="N", help="at most so many")
    check = _add(actions, "check", "compare files, tables, directory and payloads with each other")
    check.add_argument(
        "--fix", action="store_true", help="drop what is damaged and repair all else"
    )
    _add(actions, "verify", "read every payload and compare it with its checksum")
    gc = _add(actions, "gc", "remove from disk what was cleared, evicted or left unfinished")
    gc.add_argument("--namespace", metavar="NAME", help="remove that namespace, with all in it")
    gc.add_argument("--yes", action="store_true", help="do so; else it is only named")


def _add(actions: Subparsers, name: str, summary: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=summary.capitalize() + ".")
    parser.add_argument("path", metavar="PATH", help="directory of a store, or of a namespace")
    parser.set_defaults(run=_run, action=name)
    return parser


def _run(options: argparse.Namespace) -> int:
    from tierstore.adapters.cli.store_actions import ACTIONS

    return ACTIONS[options.action](options)
