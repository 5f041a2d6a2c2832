"""``tierstore plan``: what a model needs on a machine, and plans of one model's fast tier."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tierstore.adapters.cli import prediction
from tierstore.errors import ConfigError
from tierstore.sizes import check_window, parse_budget
from tierstore.whole_file import check_target, unwritable

if TYPE_CHECKING:
    import argparse

    from tierstore.adapters.cli import Subparsers

_PLAN = """
Predict what each system needs and how fast it decodes, from the rates of a machine, and what to
choose. The actions share the fast tier out between the layers and heads of a model.
"""

_MAKE = """
Make a plan from attention traces of one model, which tierstore trace record writes: windows so that
as little as possible is fetched, at the same total. tierstore generate takes it as --plan.
"""


def add_command(subparsers: Subparsers) -> None:
    """Add ``plan`` to the `tierstore` command."""
    parser = subparsers.add_parser(
        "plan", help="predict memory and speed; share the fast tier out", description=_PLAN
    )
    parser.set_defaults(run=prediction.run)
    prediction.add_options(parser)
    actions = parser.add_subparsers(title="actions", metavar="action")
    make = actions.add_parser("make", help="make a plan from traces", description=_MAKE)
    make.set_defaults(run=_make)
    make.add_argument("plan", metavar="PLAN", help="file to write")
    make.add_argument(
        "--trace", action="append", required=True, metavar="FILE", help="may be given repeatedly"
    )
    make.add_argument(
        "--window", type=float, default=2.0, metavar="X", help="mean, in budgets; default: 2"
    )
    make.add_argument(
        "--budget", help="share of the context (6.25%%) or tokens; the first trace's by default"
    )
    make.add_argument(
        "--per-head-budgets",
        action="store_true",
        help="share the budget out, too, by the attention that heads would miss",
    )
    show = actions.add_parser("show", help="show a plan", description="Show what a plan says.")
    show.set_defaults(run=_show)
    show.add_argument("plan", metavar="PLAN")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("--plot", metavar="FILE", help="draw it to a file, such as plan.png")


def _check_alone(options: argparse.Namespace) -> None:
    """ConfigError where an action is given what only a prediction takes."""
    given = [name for name in prediction.OPTIONS if getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: only tierstore plan without an action takes that; leave it out"
        )


def _make(options: argparse.Namespace) -> None:
    _check_alone(options)
    budget = None if options.budget is None else parse_budget(options.budget)
    check_target(options.plan, "plan")
    check_window(options.window)
    from tierstore.adapters.cli.trace_file import read_attention
    from tierstore.policies.planning import plan_of
    from tierstore.policies.run_facts import MODEL

    needed = (*MODEL, "selectable") if options.per_head_budgets else MODEL
    traces = [read_attention(name, needed=needed, steps=1) for name in options.trace]
    if budget is None:
        recorded = traces[0].facts.get("budget")
        if recorded is None:
            raise ConfigError(f"{options.trace[0]}: says nothing of a budget; pass --budget")
        budget = parse_budget(recorded)
    plan = plan_of(
        traces, window=options.window, budget=budget, per_head_budgets=options.per_head_budgets
    )
    try:
        plan.save(options.plan)
    except OSError as error:
        raise unwritable(options.plan, "plan", error) from error
    print(f"{options.plan}: {len(plan.windows)} layers, windows of {plan.window:.2f} budgets")


def _show(options: argparse.Namespace) -> None:
    _check_alone(options)
    from tierstore.adapters.cli.plan_picture import draw, table
    from tierstore.policies.plan import Plan

    plan = Plan.load(options.plan)
    if options.plot is not None:
        draw(plan, options.plot)
    if options.json:
        print(json.dumps(plan.to_dict(), allow_nan=False))
        return
    from rich.console import Console

    # Names of models and documents may look like markup.
    Console(markup=False).print(table(plan))
