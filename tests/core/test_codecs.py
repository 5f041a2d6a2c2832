"""The lossless codecs pass the public suite; frames that lie are refused at no cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import zstandard

from tierstore.codecs import CODEC_NAMES, RawCodec, ShuffleZstdCodec, make_codec
from tierstore.errors import ConfigError, CorruptBlockError
from tierstore.layout import BlockLayout
from tierstore.testing import CodecTests

if TYPE_CHECKING:
    from tierstore.interfaces import Bytes


class TestRawCodec(CodecTests):
    def make_codec(self) -> RawCodec:
        return RawCodec()


class TestShuffleZstdCodec(CodecTests):
    dtype = torch.bfloat16

    def make_codec(self) -> ShuffleZstdCodec:
        return ShuffleZstdCodec(2)


class TestShuffleZstdCodecOfSingles(CodecTests):
    def make_codec(self) -> ShuffleZstdCodec:
        return ShuffleZstdCodec(4, least_gain=0)


class TestZstdWithoutPlanes(CodecTests):
    def make_codec(self) -> ShuffleZstdCodec:
        return ShuffleZstdCodec(1, level=3)


SHAPE = (16, 4096)


def noise(shape: tuple[int, ...] = SHAPE) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def normal_numbers() -> Bytes:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(16, 2048))).bfloat16()
    blocks: Bytes = values.view(torch.uint8).numpy()
    return blocks


def under_mark(frame: bytes, mark: int = 2) -> Bytes:
    return np.frombuffer(bytes([mark]) + frame, np.uint8)


def bomb(nbytes: int = 256 << 20) -> bytes:
    """A frame of about 8 KiB in front of very many zeros."""
    return zstandard.ZstdCompressor(level=3).compress(bytes(nbytes))


def test_a_frame_holds_the_planes_of_the_elements() -> None:
    blocks = normal_numbers()

    stored = ShuffleZstdCodec(2).encode(blocks)

    flat = blocks.reshape(-1)
    planes = zstandard.ZstdDecompressor().decompress(stored[1:].tobytes())
    assert stored[0] == 2
    assert planes == flat[0::2].tobytes() + flat[1::2].tobytes()


def test_bytes_beyond_the_last_whole_element_follow_the_planes() -> None:
    blocks = np.zeros((1, 1003), np.uint8)
    blocks[0, 999:] = [1, 2, 3, 4]

    stored = ShuffleZstdCodec(4).encode(blocks)

    planes = zstandard.ZstdDecompressor().decompress(stored[1:].tobytes())
    assert planes[-3:] == bytes([2, 3, 4])
    assert planes[-4] == 1


def test_normal_bfloat16_numbers_shrink_by_a_quarter() -> None:
    blocks = normal_numbers()
    assert ShuffleZstdCodec(2).encode(blocks).nbytes < 0.75 * blocks.nbytes


def test_incompressible_blocks_are_stored_as_they_are() -> None:
    blocks = noise()

    stored = ShuffleZstdCodec(2).encode(blocks)

    assert stored[0] == 0
    assert np.array_equal(stored[1:], blocks.reshape(-1))


def test_a_gain_below_the_least_is_not_worth_a_frame() -> None:
    blocks = normal_numbers()
    assert ShuffleZstdCodec(2, least_gain=0.2).encode(blocks)[0] == 2
    assert ShuffleZstdCodec(2, least_gain=0.5).encode(blocks)[0] == 0


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_a_frame_is_read_whatever_the_reader_was_made_for(element_bytes: int) -> None:
    blocks, out = normal_numbers(), np.zeros(SHAPE, np.uint8)

    ShuffleZstdCodec(8).decode(ShuffleZstdCodec(element_bytes).encode(blocks), out)

    assert np.array_equal(out, blocks)


def a_frame_with_a_dictionary() -> bytes:
    trained = zstandard.train_dictionary(2048, [f"row {i} of {i * 7}".encode() for i in range(999)])
    assert trained.dict_id() != 0
    return zstandard.ZstdCompressor(dict_data=trained).compress(bytes(65536))


def a_frame_that_lies(stated: int) -> bytes:
    """70,000 zeros under a header that states another length."""
    frame = bytearray(zstandard.compress(bytes(70_000)))
    at = frame.index((70_000).to_bytes(4, "little"))
    frame[at : at + 4] = stated.to_bytes(4, "little")
    return bytes(frame)


FRAMES = {
    "a shorter content": zstandard.compress(bytes(65535)),
    "a longer content": zstandard.compress(bytes(65537)),
    "no stated length": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(65536)),
    "nothing": zstandard.compress(b""),
    "two frames": zstandard.compress(bytes(65536)) * 2,
    "something behind": zstandard.compress(bytes(65536)) + b"\0",
    "a skippable frame": b"\x50\x2a\x4d\x18" + (65536).to_bytes(4, "little") + bytes(65536),
    "a content beyond the stated length": a_frame_that_lies(65536),
    "a content short of the stated length": a_frame_that_lies(22 * 4096),
    "a dictionary": a_frame_with_a_dictionary(),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_a_frame_is_corrupt_if_it_has(frame: str) -> None:
    out = np.zeros((22, 4096) if frame.endswith("short of the stated length") else SHAPE, np.uint8)
    with pytest.raises(CorruptBlockError):
        ShuffleZstdCodec(2).decode(under_mark(FRAMES[frame]), out)


def test_a_missing_dictionary_is_named() -> None:
    with pytest.raises(CorruptBlockError, match=r"needs dictionary \d+: expected a frame without"):
        ShuffleZstdCodec(2).decode(under_mark(FRAMES["a dictionary"]), np.zeros(SHAPE, np.uint8))


BOMB = """
import re
import sys
from pathlib import Path

import numpy as np
import test_codecs

from tierstore.codecs import ShuffleZstdCodec
from tierstore.errors import CorruptBlockError


def peak_kib():
    # Unlike getrusage, this does not begin with what the parent process had.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])


codec, out = ShuffleZstdCodec(2), np.ones((16, 65536), np.uint8)
codec.decode(codec.encode(np.zeros_like(out)), out)
frame = bytearray(Path(sys.argv[1]).read_bytes())
if sys.argv[2] == "lying":
    at = frame.index((256 << 20).to_bytes(4, "little"))
    frame[at : at + 4] = out.nbytes.to_bytes(4, "little")
stored = test_codecs.under_mark(bytes(frame))
before = peak_kib()
for _ in range(5):
    try:
        codec.decode(stored, out)
    except CorruptBlockError:
        print("refused")
print(peak_kib() - before)
"""


@pytest.mark.parametrize("header", ["honest", "lying"])
def test_a_decompression_bomb_is_refused_within_two_extents_of_memory(
    header: str, tmp_path: Path
) -> None:
    """The lying frame states the length that is expected and holds 256 MiB all the same."""
    frame = bomb()
    assert len(frame) < 32 << 10
    (tmp_path / "bomb").write_bytes(frame)

    answer = subprocess.run(
        [sys.executable, "-c", BOMB, str(tmp_path / "bomb"), header],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )

    *outcomes, grown_kib = answer.stdout.split()
    assert outcomes == ["refused"] * 5
    assert int(grown_kib) < 2 * 1024


@pytest.mark.parametrize("mark", [3, 16, 255])
def test_an_unknown_first_byte_is_corrupt(mark: int) -> None:
    stored = under_mark(zstandard.compress(bytes(65536)), mark)
    with pytest.raises(CorruptBlockError, match=rf"begins with {mark}: expected one of"):
        ShuffleZstdCodec(2).decode(stored, np.zeros(SHAPE, np.uint8))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"element_bytes": 3}, "element_bytes=3"),
        ({"level": 0}, "level=0"),
        ({"level": 23}, "level=23"),
        ({"least_gain": 1.0}, "least_gain=1.0"),
        ({"least_gain": float("nan")}, "least_gain=nan"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ShuffleZstdCodec(**wrong)


def test_codes_on_disk_never_change() -> None:
    layout = BlockLayout.kv(4, 8, torch.bfloat16)
    codes = {name: make_codec(name, layout).code for name in CODEC_NAMES}
    assert codes == {"raw": 0, "shuffle+zstd": 1, "int8": 2, "int4": 3, "k8v4": 4, "fp8": 5}


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_codec_is_made_by_its_name(name: str) -> None:
    assert make_codec(name, BlockLayout.kv(4, 8, torch.bfloat16)).name == name


def test_planes_follow_the_elements_of_the_layout() -> None:
    blocks = np.zeros((4, 4096), np.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        codec = make_codec("shuffle+zstd", BlockLayout.kv(4, 8, dtype))
        assert codec.encode(blocks)[0] == dtype.itemsize


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match=r"codec 'lz4' is unknown: expected one of \['raw', 'shu"):
        make_codec("lz4")


@pytest.mark.parametrize("name", ["int8", "int4", "k8v4", "fp8"])
def test_a_quantising_codec_without_a_layout_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec '{name}' quantises .* pass the BlockLayout"):
        make_codec(name)
