"""Plans as tables and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from tierstore.adapters.cli.pictures import new_figure, save_figure
from tierstore.adapters.cli.text import visible

if TYPE_CHECKING:
    from tierstore.policies.plan import Plan
    from tierstore.policies.profile import Amounts


def table(plan: Plan) -> Table:
    """Windows, and budgets if heads differ in them, layer by layer."""
    heads = plan.windows.shape[1]
    shown = Table(
        title=visible(f"plan for {plan.facts.get('model') or 'a model'}: ")
        + f"windows of {plan.window:.2f} budgets in the mean",
        title_justify="left",
    )
    shown.add_column("layer", justify="right")
    for head in range(heads):
        shown.add_column(f"head {head}", justify="right")
    for layer, (windows, budgets) in enumerate(zip(plan.windows, plan.shares, strict=True)):
        cells = [f"{window:.2f}" for window in windows]
        if plan.budgets is not None:
            cells = [f"{cell} for {share:.2f}" for cell, share in zip(cells, budgets, strict=True)]
        shown.add_row(str(layer), *cells)
    shown.caption = visible("; ".join(f"{name}: {value}" for name, value in plan.facts.items()))
    shown.caption_justify = "left"
    return shown


def draw(plan: Plan, path: str) -> None:
    """Draw windows, and budgets if heads differ in them, to a picture file.

    MissingExtraError without matplotlib, ConfigError if the file cannot be written.
    """
    pictures: dict[str, Amounts] = {"window, mean budgets": plan.windows}
    if plan.budgets is not None:
        pictures["budget, mean budgets"] = plan.budgets
    figure = new_figure(8, 2.2 * len(pictures), path)
    axes = figure.subplots(len(pictures), squeeze=False)[:, 0]
    for axis, (name, values) in zip(axes, pictures.items(), strict=True):
        image = axis.imshow(values.T, aspect="auto", interpolation="nearest")
        axis.set(xlabel="layer", ylabel="KV head", yticks=range(values.shape[1]))
        figure.colorbar(image, ax=axis, label=name)
    save_figure(figure, path)
