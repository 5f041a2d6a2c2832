"""How many bytes of a capacity go to segment files, and how many to the directory."""

from __future__ import annotations

from tierstore.errors import ConfigError
from tierstore.volume.format import PAGE

_LEAST_DIRECTORY_BYTES = 1 << 16
_MANY, _LEAST_OF_MANY = 400, 1 << 17
_SEGMENT_BYTES = (1 << 20, 1 << 34)


def segments_in(capacity_bytes: int, segment_bytes: int) -> int:
    """Segments that a capacity has room for, beside the directory. ConfigError if there is none."""
    most = (capacity_bytes - directory_bytes(capacity_bytes)) // segment_bytes
    if most < 1:
        raise ConfigError(
            f"disk={capacity_bytes}: expected room for a segment of {segment_bytes} bytes beside "
            f"{directory_bytes(capacity_bytes)} of directory"
        )
    return most


def directory_bytes(capacity_bytes: int) -> int:
    """Most bytes that a volume of a capacity keeps for its directory."""
    return max(_LEAST_DIRECTORY_BYTES, capacity_bytes // 512)


def capacity_of(segments: int, segment_bytes: int) -> int:
    """The capacity that has room for so many segments and no more."""
    nbytes = segments * segment_bytes
    return nbytes + max(_LEAST_DIRECTORY_BYTES, -(-nbytes // 511))


def segment_size(capacity_bytes: int, asked: int | None) -> int:
    """Bytes of the segment files of a new volume, as asked for or by default. ConfigError."""
    if asked is not None:
        if asked % PAGE or asked < 4 * PAGE:
            raise ConfigError(
                f"segment={asked}: expected a multiple of {PAGE} bytes, at least {4 * PAGE}"
            )
        if asked < _LEAST_OF_MANY and capacity_bytes // asked > _MANY:
            raise ConfigError(
                f"segment={asked}, disk={capacity_bytes}: expected segments of at least "
                f"{_LEAST_OF_MANY} bytes where there are more than {_MANY}, for which the "
                "directory has room"
            )
        return asked
    least, most = _SEGMENT_BYTES
    return min(max(capacity_bytes // 64 // PAGE * PAGE, least), most)
