"""The shipped codecs pass the public suite."""

from tierstore.codecs import RawCodec
from tierstore.testing import CodecTests


class TestRawCodec(CodecTests):
    def make_codec(self) -> RawCodec:
        return RawCodec()
