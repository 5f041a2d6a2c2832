"""The systems whose quality is compared, all attached to one model at once."""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.attention import SparseAttention
from tierstore.adapters.presets import Preset
from tierstore.benchmarks.alternatives import Alternatives
from tierstore.benchmarks.language import kv_bytes
from tierstore.benchmarks.random_blocks import RandomBlocks
from tierstore.policies import LRU

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

    from tierstore.adapters.transformers import TierCache


class System(NamedTuple):
    """A preset with everything in DRAM, or with a fast tier of its window's size before that."""

    says: str
    preset: str | Preset
    has_window: bool = False


SYSTEMS = {
    "full": System("full attention", "full"),
    "kvdrive": System(
        "preset kvdrive: attends to all that is in a fast tier of two budgets", "kvdrive", True
    ),
    "kvdrive-dram": System("preset kvdrive in DRAM: attends to what is selected", "kvdrive"),
    "exact": System("preset exact: blocks chosen by all their keys", "exact"),
    "chunk-mean": System("preset chunk-mean: blocks chosen by their mean keys", "chunk-mean"),
    "random": System("random blocks: the floor", Preset("random-blocks", RandomBlocks, LRU)),
}
SPARSE = tuple(name for name in SYSTEMS if name != "full")


def named(system: str, budget: float) -> str:
    """Name of a system at a budget."""
    return f"{system} {100 * budget:.4g}%"


@contextmanager
def attached(
    model: PreTrainedModel,
    tokens: int,
    wanted: Iterable[tuple[str, float]],
    systems: Mapping[str, System] = SYSTEMS,
) -> Iterator[tuple[TierCache, Alternatives]]:
    """`model` with an engine for each wanted system and budget, with room for `tokens` and more."""
    from tierstore.adapters.transformers import attach_engine, geometry_of

    geometry, ample = geometry_of(model), 2 * kv_bytes(model, tokens) + (64 << 20)
    with ExitStack() as stack:
        engines = {}
        for name, budget in wanted:
            system = systems[name]
            fast = ample if system.has_window else None
            engine = SparseAttention(
                geometry, preset=system.preset, budget=budget, fast=fast, dram=ample
            )
            engines[named(name, budget)] = stack.enter_context(closing(engine))
        alternatives = Alternatives(engines)
        yield stack.enter_context(attach_engine(model, alternatives)), alternatives
