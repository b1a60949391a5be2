"""Digests of LoRA adapters' files: KV depends on their bytes, and vLLM's block hashes cover only name and path.

A digest is used again while the stat fields of every file (device, inode, size, mtime, ctime) are unchanged and older
than `SETTLED_S`; otherwise the files are read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import xxhash

from kvpipe.loop import LoopThread

FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files that vLLM reads from an adapter's folder."""
BYTES_MAX: Final = 64 << 30
"""Largest adapter, in bytes; a larger one counts as unreadable."""
SETTLED_S: Final = 2.0
"""A file that changed less than this long ago may change again without a new mtime: file systems' clocks are coarse."""
KNOWN_MAX: Final = 4096
"""How many adapters are remembered."""
READINGS_MAX: Final = 3
STOP_S_MAX: Final = 1.0
_PIECE_BYTES: Final = 8 << 20
_NS: Final = 1_000_000_000

Signature = tuple[tuple[str, int, int, int, int, int], ...]
"""One row per file: name, device, inode, bytes, time of modification, time of change (the times in nanoseconds)."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Reading(NamedTuple):
    """Signature and digest of an adapter's files. `settled`: any later change alters the signature."""

    signature: Signature
    digest: bytes
    settled: bool


class AdapterFiles:
    """Digests adapters; reads one again only when its files may have changed. Not thread-safe."""

    def __init__(self) -> None:
        """Begin with nothing read. `readings` counts how often an adapter was read."""
        self._known: OrderedDict[str, Reading] = OrderedDict()
        self.readings = 0

    def read(self, folder: str) -> Reading:
        """Return signature and digest of the adapter in `folder`, read again only if they may have changed.

        Raises:
            OSError: no file is there; one is not regular, too large or unreadable; or they change while they are read.
            ValueError: `folder` is not a valid path.

        """
        known = self._known.get(folder)
        for _ in range(READINGS_MAX):
            began_ns, signature = time.time_ns(), signature_of(folder)
            if known is not None and known.settled and known.signature == signature:
                return known
            self.readings += 1
            digest = digest_of(folder, signature)
            if signature_of(folder) == signature:
                youngest_ns = max(max(modified, changed) for *_, modified, changed in signature)
                known = Reading(signature, digest, settled=began_ns - youngest_ns > SETTLED_S * _NS)
                remember(self._known, folder, known, KNOWN_MAX)
                return known
        msg = f"{folder!r} changes while it is read"
        raise OSError(msg)


def signature_of(folder: str) -> Signature:
    """Return the stat fields of the adapter's files: they change when a file does. Raises as `AdapterFiles.read`."""
    out = []
    for name in FILES:
        try:
            at = Path(folder, name).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(at.st_mode):
            msg = f"{name} in {folder!r} is no regular file"
            raise OSError(msg)
        out.append((name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    if not out:
        msg = f"{folder!r} has none of {', '.join(FILES)}"
        raise FileNotFoundError(msg)
    if sum(one[3] for one in out) > BYTES_MAX:
        msg = f"the adapter in {folder!r} has more than {BYTES_MAX} bytes"
        raise OSError(msg)
    return tuple(out)


def digest_of(folder: str, signature: Signature) -> bytes:
    """Return the xxh3-128 digest (16 bytes) of the files in `signature`. It is not cryptographic.

    A file is read up to its size in `signature`. Raises OSError if one cannot be read or is not regular any more; a
    pipe that has taken its place does not block.
    """
    digest = xxhash.xxh3_128(b"kvpipe adapter")
    for name, _, _, size, *_ in signature:
        digest.update(f"{name}:{size}:".encode())
        with os.fdopen(os.open(Path(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                msg = f"{name} in {folder!r} is no regular file"
                raise OSError(msg)
            left = size
            while left and (data := file.read(min(left, _PIECE_BYTES))):
                digest.update(data)
                left -= len(data)
    return digest.digest()


def read_as(digest: bytes, *, fused: bool) -> bytes:
    """Return the digest of files that the engine takes for an adapter with `fused` experts, or without. b"" stays."""
    return xxhash.xxh3_128_digest(b"fused experts" + digest) if fused and digest else digest


def folder_of(path: str) -> str:
    """Return the folder that vLLM would read the adapter `path` from: itself, or one in the local cache of the hub.

    Raises:
        OSError: there is no such folder, and nothing in the cache.
        ValueError: `path` is neither a valid path nor a valid name on the hub.

    """
    expanded = os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111  (as vLLM does it)
    if os.path.isabs(expanded) or Path(expanded).exists():  # noqa: PTH117  (keeps what is no valid text)
        return os.path.abspath(expanded)  # noqa: PTH100  (does not resolve links)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (comes with vLLM)

    return str(snapshot_download(path, local_files_only=True))


class AdapterReader:
    """Reads adapters' files in a thread of its own. Requests that wait for the same adapter share one reading."""

    def __init__(self, fault: Callable[[str, str], object]) -> None:
        """`fault(path, why)` is called when an adapter cannot be read; not again for the same reason."""
        self._fault, self._files = fault, AdapterFiles()
        self._loop: LoopThread | None = None
        self._due: set[str] = set()  # paths whose reading has not begun
        self._known: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._blamed: OrderedDict[str, str] = OrderedDict()

    @property
    def readings(self) -> int:
        """How often an adapter's files were read."""
        return self._files.readings

    def digest(self, path: str, since_s: float) -> bytes | None:
        """Return the digest of the adapter's files as of `since_s` (of `time.monotonic`) or later. Never blocks.

        b"" if they cannot be read; None while they are being read: call again.
        """
        read_s, digest = self._known.get(path, (0.0, b""))
        if read_s >= since_s:
            return digest
        if path not in self._due:
            if self._loop is None:
                self._loop = LoopThread("kvpipe-adapters", self._read)
            self._due.add(path)
            if not self._loop.put(path):
                return b""
        return None

    def stop(self) -> None:
        """End the thread. Idempotent."""
        if self._loop is not None:
            self._loop.stop(STOP_S_MAX)

    def _read(self, path: str) -> None:
        self._due.discard(path)  # first: who asks from now on wants it read once more
        read_s, digest = time.monotonic(), b""
        try:
            digest = self._files.read(folder_of(path)).digest
            self._blamed.pop(path, None)
        except Exception as error:  # noqa: BLE001  (whatever a path and a hub's cache may raise: others are read)
            if self._blamed.get(path) != repr(error):
                remember(self._blamed, path, repr(error), KNOWN_MAX)
                self._fault(path, repr(error))
        remember(self._known, path, (read_s, digest), KNOWN_MAX)


def remember(table: OrderedDict[_Key, _Value], key: _Key, value: _Value, entries_max: int) -> None:
    """Store `value` as the youngest entry; drop the oldest entries beyond `entries_max`."""
    table[key] = value  # never missing meanwhile: other threads read it
    table.move_to_end(key)
    while len(table) > entries_max:
        table.popitem(last=False)
