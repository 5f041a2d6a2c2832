"""How the bytes of a tier are coded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.codecs.quantised import (
    Fp8Codec,
    Int4Codec,
    Int8Codec,
    K8V4Codec,
    QuantisedCodec,
)
from tierstore.codecs.raw import RawCodec
from tierstore.codecs.shuffle import ShuffleZstdCodec
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.interfaces import Codec
    from tierstore.layout import BlockLayout

__all__ = [
    "CODEC_NAMES",
    "Fp8Codec",
    "Int4Codec",
    "Int8Codec",
    "K8V4Codec",
    "QuantisedCodec",
    "RawCodec",
    "ShuffleZstdCodec",
    "check_codec_name",
    "make_codec",
]

_QUANTISED: tuple[type[QuantisedCodec], ...] = (Int8Codec, Int4Codec, K8V4Codec, Fp8Codec)

CODEC_NAMES = (
    RawCodec.name, ShuffleZstdCodec.name, *(kind.name for kind in _QUANTISED)
)  # fmt: skip
"""What `make_codec` knows."""


def make_codec(name: str, layout: BlockLayout | None = None) -> Codec:
    """The codec called `name` for blocks of `layout`, with its default settings.

    Without a layout, ``shuffle+zstd`` takes elements of 2 bytes. ConfigError: the name is unknown,
    or a quantising codec has no layout.
    """
    if name == RawCodec.name:
        return RawCodec()
    if name == ShuffleZstdCodec.name:
        return ShuffleZstdCodec() if layout is None else ShuffleZstdCodec(_element_bytes(layout))
    for kind in _QUANTISED:
        if name == kind.name:
            if layout is None:
                raise ConfigError(
                    f"codec {name!r} quantises the parts of a block, and layout is None: pass the"
                    f" BlockLayout, or choose one of {[RawCodec.name, ShuffleZstdCodec.name]}"
                )
            return kind(layout)
    check_codec_name(name)
    raise AssertionError(f"{name} is listed, but nothing makes it")


def check_codec_name(name: str) -> None:
    """ConfigError unless `make_codec` knows that name."""
    if name not in CODEC_NAMES:
        raise ConfigError(f"codec {name!r} is unknown: expected one of {list(CODEC_NAMES)}")


def _element_bytes(layout: BlockLayout) -> int:
    """Size of the elements that fill most of a block."""
    largest = max(layout.parts, key=lambda part: part.nbytes)
    return min(largest.dtype.itemsize, 8)
