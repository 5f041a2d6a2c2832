"""What identifies each block of a prompt, and what proves that it is the right one."""

from __future__ import annotations

from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from tierstore.arguments import check_whole
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.interfaces import Bytes

Tokens = npt.NDArray[np.integer[Any]]
TokenIds = npt.NDArray[np.uint32]

DIGEST_BYTES = 16
PROOF_BYTES = 32
MOST_TOKEN = (1 << 32) - 1

_HEAD = Struct("<16s3I")
_TAG = b"tierstore.prefix"


def hash_blocks(
    tokens: Tokens | Sequence[int],
    block_tokens: int,
    parent: bytes | Bytes = b"",
    extra: bytes = b"",
) -> Bytes:
    """Keys of the whole blocks of a prompt, uint8 [len(tokens) // block_tokens, 16].

    tokens: ids from 0 to 2**32 - 1, of any integer type. block_tokens: tokens of a block. parent:
    the key of the block before the first, if there is one; so ``hash_blocks(t[:a * b], b)``
    followed by ``hash_blocks(t[a * b:], b, parent=<its last row>)`` is ``hash_blocks(t, b)``.
    extra: what else the blocks depend on, such as the name of a LoRA or a tenant's salt.

    A key is the xxh3-128 digest, in its canonical byte order, of ``tierstore.prefix``, the sizes of
    `parent` (0 or 16), `block_tokens` and the size of `extra` as little-endian uint32, `parent`,
    the block's tokens as little-endian uint32, and `extra`. ConfigError names an argument that is
    no such thing.
    """
    ids, salt = token_ids(tokens), _as_bytes("extra", extra)
    step = 4 * check_count("block_tokens", block_tokens)
    key = _as_bytes("parent", parent)
    if len(key) not in (0, DIGEST_BYTES):
        raise ConfigError(
            f"parent of {len(key)} bytes: expected the 16 bytes of a key, or none for a first block"
        )
    data, keys = ids.tobytes(), bytearray()
    for at in range(0, ids.nbytes - step + 1, step):
        head = _HEAD.pack(_TAG, len(key), block_tokens, len(salt))
        key = xxh3_128_digest(head + key + data[at : at + step] + salt)
        keys += key
    return np.frombuffer(keys, np.uint8).reshape(-1, DIGEST_BYTES)


def token_ids(tokens: Tokens | Sequence[int]) -> TokenIds:
    """Tokens as little-endian uint32 [n]. ConfigError if they are not ids from 0 to 2**32 - 1."""
    try:
        given = np.asarray(tokens)
    except ValueError as error:
        raise ConfigError("tokens: expected one prompt, found rows of several lengths") from error
    if given.ndim != 1:
        raise ConfigError(f"tokens of shape {given.shape}: expected one prompt, [n]")
    if given.size and given.dtype.kind not in "iu":
        raise ConfigError(f"tokens of type {given.dtype}: expected whole numbers below 2**32")
    bad = np.flatnonzero((given < 0) | (given > MOST_TOKEN))
    if len(bad):
        raise ConfigError(
            f"tokens[{bad[0]}]={given[bad[0]]}: expected ids from 0 to {MOST_TOKEN}: cut padding"
        )
    return np.ascontiguousarray(given, "<u4")


def trailer_bytes(block_tokens: int) -> int:
    """Bytes that prove a block of so many tokens."""
    return 4 * block_tokens + PROOF_BYTES


class Chain:
    """The tokens of a prompt cut into blocks, with what identifies each block and proves it.

    digests: uint8 [n, 16], keys of the whole blocks. trailers: uint8 [n, trailer_bytes], the tokens
    of each and the proof of all before it. proof: 32 bytes, that of all whole blocks. tail_ids,
    tail_trailer: the tokens after them, and the same for these.
    """

    def __init__(self, tokens: Tokens | Sequence[int], block_tokens: int, extra: bytes) -> None:
        self.ids, self.extra = token_ids(tokens), _as_bytes("extra", extra)
        self.digests = hash_blocks(self.ids, block_tokens, extra=self.extra)
        self.trailer_bytes = trailer_bytes(block_tokens)
        end = len(self) * block_tokens
        whole = self.ids[:end].view(np.uint8).reshape(len(self), 4 * block_tokens)
        proofs = _proofs(whole, block_tokens, self.extra)
        self.trailers = np.hstack([whole, proofs[:-1]])
        self.tail_ids = self.ids[end:]
        self.proof: bytes = proofs[-1].tobytes()
        self.tail_trailer: bytes = self.tail_ids.tobytes() + self.proof

    def __len__(self) -> int:
        return len(self.digests)


def _proofs(blocks: Bytes, block_tokens: int, extra: bytes) -> Bytes:
    """SHA-256 chain over all that precedes each block, and over everything: uint8 [n + 1, 32]."""
    proof = sha256(_HEAD.pack(_TAG, 0, block_tokens, len(extra)) + extra).digest()
    proofs = bytearray(proof)
    data, step = blocks.tobytes(), 4 * block_tokens
    for at in range(0, len(data), step):
        proof = sha256(proof + data[at : at + step]).digest()
        proofs += proof
    return np.frombuffer(proofs, np.uint8).reshape(-1, PROOF_BYTES)


def _as_bytes(name: str, value: bytes | Bytes) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not isinstance(value, bytes):
        raise ConfigError(f"{name}={value!r}: expected bytes")
    return value


def check_count(name: str, count: int) -> int:
    """`count` itself; ConfigError if it is not a whole number from 1 to 2**32 - 1."""
    return check_whole(name, count, 1, MOST_TOKEN)
