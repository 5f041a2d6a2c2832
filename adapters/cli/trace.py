"""``tierstore trace``: record what a model uses, and replay it through policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.cli import trace_record

if TYPE_CHECKING:
    from tierstore.adapters.cli import Subparsers


def add_command(subparsers: Subparsers) -> None:
    """Add ``trace`` to the `tierstore` command."""
    summary = "record what a model uses, and replay it through policies"
    parser = subparsers.add_parser("trace", help=summary, description=summary.capitalize() + ".")
    actions = parser.add_subparsers(title="actions", metavar="action", required=True)
    trace_record.add_action(actions)
