"""How the bytes of a tier are coded."""

from tierstore.codecs.raw import RawCodec

__all__ = ["RawCodec"]
