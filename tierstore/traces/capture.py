"""What attention saw of a text: keys, values and queries of every layer, in one .npz file.

The file is one of `tierstore.traces.file`: NumPy alone reads it. ``np.load(path)`` has the arrays
that `Capture` names, and ``header``, which is JSON as bytes. 16-bit floats are stored as bits:
uint16 for bfloat16 and int16 for float16, as the fact ``dtype`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.errors import TraceError
from tierstore.kernels.element import to_tensor
from tierstore.traces.file import read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from tierstore.kernels.element import Array

KIND = "keys and queries"
_NUMBERS = (
    "layers", "kv_heads", "query_heads", "head_dim", "value_size", "prompt_tokens", "steps",
    "window",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Capture:
    """Keys, values and queries of a prompt of P tokens and T steps after it.

    Rotary positions are applied to keys and queries. Query head ``h * G + g`` is ``[h, g]`` here.

    Attributes
    ----------
    keys, values: [layers, H, P + T, d] and [.., e], the KV heads' own.
    queries: [layers, H, G, T, d], one for each step.
    last_queries: [layers, H, G, w, d], those of the last w tokens of the prompt.
    hidden: [layers, T, width], what went into each layer at each step; None where left out.
    scale: factor of the logits.
    facts: what JSON can hold: the sizes, ``model``, ``dtype`` and ``document``.
    """

    keys: Array
    values: Array
    queries: Array
    last_queries: Array
    scale: float
    facts: Mapping[str, Any]
    hidden: Array | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys.shape[2]) - self.steps

    @property
    def steps(self) -> int:
        """Steps after the prompt."""
        return int(self.queries.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return to_tensor(self.keys).dtype

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. OSError of the file system passes through."""
        arrays = {
            "keys": self.keys,
            "values": self.values,
            "queries": self.queries,
            "last_queries": self.last_queries,
        }
        if self.hidden is not None:
            arrays["hidden"] = self.hidden
        write_trace(path, KIND, {**self.facts, "scale": self.scale}, arrays)

    @classmethod
    def load(cls, path: Path) -> Capture:
        """Read a file that `save` wrote. TraceError if it is not one."""
        facts, arrays = read_trace(path, KIND)
        scale = facts.pop("scale", None)
        shapes = _shapes(facts)
        found = {name: array.shape for name, array in arrays.items() if name != "hidden"}
        if found != shapes or not isinstance(scale, float):
            raise TraceError(
                f"{path}: expected arrays {shapes} and a scale, found {found}, {scale}"
            )
        if {str(array.dtype) for array in arrays.values()} != {_stored(facts.get("dtype"))}:
            raise TraceError(f"{path}: expected elements of {facts.get('dtype')} in every array")
        return cls(**arrays, scale=scale, facts=facts)


def _shapes(facts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays, by what the facts say; none where they say nothing."""
    sizes = [facts.get(name) for name in _NUMBERS]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return {}
    layers, heads, query_heads, dim, value_size, prompt, steps, window = map(int, sizes)  # type: ignore[arg-type]
    group = query_heads // heads
    return {
        "keys": (layers, heads, prompt + steps, dim),
        "values": (layers, heads, prompt + steps, value_size),
        "queries": (layers, heads, group, steps, dim),
        "last_queries": (layers, heads, group, window, dim),
    }


def _stored(dtype: object) -> str | None:
    return {"bfloat16": "uint16", "float16": "int16", "float32": "float32"}.get(str(dtype))
