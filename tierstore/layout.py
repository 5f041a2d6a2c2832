"""What one block is made of: named parts, their shapes and where their bytes stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from tierstore.errors import ConfigError
from tierstore.identity import fitting

Blocks = Mapping[str, torch.Tensor]
"""Part name to values [n, *part.shape]."""


MOST_TOKENS = 255
"""Tokens that a block may have: its valid count is one byte."""


@dataclass(frozen=True)
class Part:
    """A named piece of a block.

    Attributes
    ----------
    shape: shape of the part in one block; its first axis is the block's tokens.
    dtype: element type.
    rebuild: makes the part from the stored parts of n blocks instead of storing it (low-rank keys,
        say): it gets and returns values with a leading axis n. None for a stored part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rebuild: Callable[[Blocks], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not self.shape or any(extent < 1 for extent in self.shape):
            raise ConfigError(
                f"part {self.name!r} has shape {self.shape}: expected positive extents"
            )

    @property
    def is_stored(self) -> bool:
        """Whether the part has bytes of its own in a block."""
        return self.rebuild is None

    @property
    def nbytes(self) -> int:
        """Bytes of the part in one block; 0 when it is rebuilt."""
        return math.prod(self.shape) * self.dtype.itemsize if self.is_stored else 0


@dataclass(frozen=True)
class BlockLayout:
    """The parts of a block, stored one after the other without headers or padding.

    `tokens` is the number of token places in a block; how many hold a token is the block's valid
    count.
    """

    parts: tuple[Part, ...]
    tokens: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not any(part.is_stored for part in self.parts) or len(set(names)) != len(names):
            raise ConfigError(
                f"parts {names}: expected distinct names and at least one stored part"
            )
        if len({part.shape[0] for part in self.parts}) != 1:
            raise ConfigError(
                f"parts {names}: expected the same number of tokens as first extent of each"
            )
        tokens = self.parts[0].shape[0]
        if tokens > MOST_TOKENS:
            raise ConfigError(f"a block of {tokens} tokens: expected at most {MOST_TOKENS}")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "block_bytes", sum(part.nbytes for part in self.parts))

    @classmethod
    def kv(
        cls, tokens: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> BlockLayout:
        """Keys ``k`` and values ``v`` of `tokens` consecutive tokens of one KV head."""
        value_dim = head_dim if value_dim is None else value_dim
        return cls((Part("k", (tokens, head_dim), dtype), Part("v", (tokens, value_dim), dtype)))

    @property
    def signature(self) -> str:
        """Names, types and shapes of the parts, as a text for identities."""
        return fitting(";".join(f"{part.name}:{part.dtype}:{part.shape}" for part in self.parts))

    def part(self, name: str) -> Part:
        """The part called `name`; ConfigError names the known ones."""
        for part in self.parts:
            if part.name == name:
                return part
        raise ConfigError(
            f"part {name!r} is unknown: expected one of {[p.name for p in self.parts]}"
        )

    def offset(self, name: str) -> int:
        """Byte position of a stored part inside a block."""
        wanted = self.part(name)
        if not wanted.is_stored:
            raise ConfigError(f"part {name!r} is rebuilt from others: it has no bytes in a block")
        return sum(part.nbytes for part in self.parts[: self.parts.index(wanted)])

    def spans(self, names: Iterable[str] | None = None) -> list[tuple[int, int]]:
        """Byte ranges [start, stop) of the stored parts `names`, neighbours joined."""
        if names is None:
            return [(0, self.block_bytes)]
        spans: list[tuple[int, int]] = []
        for start, stop in sorted(
            (self.offset(n), self.offset(n) + self.part(n).nbytes) for n in set(names)
        ):
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, stop))
        return spans

    def pack(self, blocks: Blocks) -> torch.Tensor:
        """Bytes uint8 [..., block_bytes] of the stored parts in `blocks`, each [..., *its shape].

        Each element is copied once, wherever it stands.
        """
        stored = [part for part in self.parts if part.is_stored]
        lead = blocks[stored[0].name].shape[: -len(stored[0].shape)]
        device = blocks[stored[0].name].device
        packed = torch.empty((*lead, self.block_bytes), dtype=torch.uint8, device=device)
        for part in stored:
            start = self.offset(part.name)
            room = packed[..., start : start + part.nbytes]
            source = blocks[part.name]
            if start % part.dtype.itemsize or self.block_bytes % part.dtype.itemsize:
                room.copy_(source.flatten(len(lead)).contiguous().view(torch.uint8))
            else:
                room.view(part.dtype).unflatten(-1, part.shape).copy_(source)
        return packed

    def unpack(self, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        """Values of every part, rebuilt ones included, from bytes uint8 [n, block_bytes]."""
        blocks: dict[str, torch.Tensor] = {}
        for part in (p for p in self.parts if p.is_stored):
            start = self.offset(part.name)
            # A copy begins where any element may; a slice begins at whatever byte it does.
            flat = stored[:, start : start + part.nbytes].clone(
                memory_format=torch.contiguous_format
            )
            blocks[part.name] = flat.reshape(-1).view(part.dtype).reshape(len(stored), *part.shape)
        for part in self.parts:
            if part.rebuild is not None:
                blocks[part.name] = part.rebuild(blocks)
        return blocks
