"""Whose blocks a store holds: what must be equal for stored bytes to mean anything."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields

import xxhash

from tierstore.errors import ConfigError, StoreMismatchError

FORMAT_VERSION = 1
"""Version of the on-disk format that this code reads and writes; see docs/format.md."""

_LONGEST = 255
_MALFORMED = (ValueError, LookupError, TypeError, RecursionError)


def fitting(text: str) -> str:
    """The text itself, or where it is too long for an identity, its beginning and its digest."""
    if len(text) <= _LONGEST:
        return text
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return f"{text[: _LONGEST - len(digest) - 1]}#{digest}"


@dataclass(frozen=True)
class Identity:
    """The identity of a namespace. Stores of different identities never see each other's values.

    model: name or fingerprint of the model. weights: fingerprint of its weights, adapters included.
    dtype: element type of the blocks. layout: name of the block layout. block: shape of a block.
    tenant: whose values they are; also a salt. codec: how values are coded on disk, with all that
    decoding depends on; the store fills it in.

    ConfigError for a field of the wrong type, or text longer than 255 characters.
    """

    model: str = ""
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    block: tuple[int, ...] = ()
    tenant: str = ""
    codec: str = "raw"

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", _shape(self.block))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "block" and not (isinstance(value, str) and len(value) <= _LONGEST):
                raise ConfigError(
                    f"{field.name}={value!r} of an identity: expected a text of at most "
                    f"{_LONGEST} characters"
                )

    @property
    def canonical(self) -> bytes:
        """The bytes that `digest` covers: JSON with sorted keys, the format's version included."""
        return _canonical({"version": FORMAT_VERSION, **asdict(self)})

    @property
    def digest(self) -> bytes:
        """16 bytes: xxh3-128 of `canonical`."""
        return xxhash.xxh3_128_digest(self.canonical)

    @property
    def folder(self) -> str:
        """Name of the namespace's directory: the model's name as far as it can be one, a digest."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-.")[:40] or "store"
        return f"{slug}-{self.digest.hex()}"

    def check(self, found: Identity, where: str) -> None:
        """StoreMismatchError, naming each field with found and expected, unless they are equal."""
        differences = [
            f"{field.name} is {getattr(found, field.name)!r}, expected "
            f"{getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(found, field.name) != getattr(self, field.name)
        ]
        if differences:
            raise StoreMismatchError(
                f"{where} belongs to another store: {'; '.join(differences)}. Choose another "
                "directory, or open it with its own identity"
            )


@dataclass(frozen=True)
class Facts:
    """What the file ``IDENTITY`` of a namespace says.

    epoch: values written under an earlier one are gone. segment_bytes: size of every segment file.
    """

    identity: Identity
    epoch: int
    segment_bytes: int

    def encode(self) -> bytes:
        """JSON lines: the facts, and the xxh3-128 of that line."""
        body = _canonical(
            {
                "format": "tierstore",
                "version": FORMAT_VERSION,
                "identity": asdict(self.identity),
                "epoch": self.epoch,
                "segment_bytes": self.segment_bytes,
            }
        )
        return body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"

    @classmethod
    def decode(cls, text: bytes, where: str) -> Facts | None:
        """The facts; None if the bytes are damaged. StoreMismatchError for another version."""
        body, _, check = text.partition(b"\n")
        if xxhash.xxh3_128_hexdigest(body).encode() != check.strip():
            return None
        try:
            known = json.loads(body)
            name, version = known["format"], known["version"]
        except _MALFORMED:
            return None
        if (name, version) != ("tierstore", FORMAT_VERSION):
            raise StoreMismatchError(
                f"{where} has format {name!r} version {version!r}, expected 'tierstore' version "
                f"{FORMAT_VERSION}: use the release that wrote it, or another directory"
            )
        try:
            facts = cls(Identity(**known["identity"]), known["epoch"], known["segment_bytes"])
        except _MALFORMED:
            return None
        is_possible = _is_count(facts.epoch) and _is_count(facts.segment_bytes)
        return facts if is_possible else None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _shape(block: object) -> tuple[int, ...]:
    if isinstance(block, tuple | list) and all(type(extent) is int for extent in block):
        return tuple(block)
    raise ConfigError(f"block={block!r} of an identity: expected a tuple of ints")
