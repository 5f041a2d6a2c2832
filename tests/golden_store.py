"""The store that pins the on-disk format: `make` writes it anew, the same bytes every time.

``python tests/golden_store.py`` replaces the archive. That is a change of the format: it needs a
new version, or the reason why what old releases wrote is still read.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path

from tierstore.codecs import ShuffleZstdCodec
from tierstore.identity import Identity
from tierstore.keyed import KeyedStore
from tierstore.volume.capacity import capacity_of

ARCHIVE = Path(__file__).parent / "keyed" / "golden" / "format-v1.zip"
IDENTITY = Identity(
    model="meta-llama/Llama-3-8B",
    weights="sha256:0f1e2d3c",
    dtype="bfloat16",
    layout="kv",
    block=(2, 8, 128),
    tenant="zoë",
)
SEGMENT = 1 << 17
_THEN = (1980, 1, 1, 0, 0, 0)


def noise(seed: str, nbytes: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(nbytes)


VALUES = {
    b"short": noise("short", 100),
    b"nothing": b"",
    b"\x00\xff with NUL\x00": noise("nul", 4096),
    b"k" * 48: noise("48", 4097),
    b"l" * 49: noise("49", 200),
    b"m" * 511: noise("511", 8192 - 511),
    b"overwritten": b"second",
    b"large": b"tierstore\n" * 4200,
    b"after the sync": noise("after", 300),
}
"""What the store holds in the end."""

CODED = {b"planes": bytes(range(64)) * 128, b"kept raw": noise("raw", 1000)}
"""What the store with a codec holds."""


def make(folder: Path) -> None:
    """Write both namespaces into a folder that exists."""
    with KeyedStore(
        folder / "kv", IDENTITY, disk=capacity_of(6, SEGMENT), segment=SEGMENT
    ) as store:
        store.put_many([b"of an earlier epoch", b"another"], [noise("old", 5000), b"old"])
        store.sync()
        store.clear()
        store.put_many([b"overwritten", b"deleted"], [b"first", noise("deleted", 60)])
        first = {key: value for key, value in VALUES.items() if key != b"after the sync"}
        assert store.put_many(list(first), list(first.values())).all()
        assert store.delete(b"deleted")
        store.sync()
        assert store.put(b"after the sync", VALUES[b"after the sync"])
    with KeyedStore(
        folder / "kv", IDENTITY, disk=capacity_of(1, SEGMENT), segment=SEGMENT,
        codec=ShuffleZstdCodec(),
    ) as store:  # fmt: skip
        assert store.put_many(list(CODED), list(CODED.values())).all()


def files(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def unpack(folder: Path) -> Path:
    """The committed store, written into a folder, modes as they should be; its directory."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    root = folder / "kv"
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return root


def _pack() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        make(Path(folder))
        for name, content in files(Path(folder)).items():
            if not name.endswith(("LOCK", "lock.mdb")):
                archive.writestr(zipfile.ZipInfo(name, _THEN), content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    _pack()
