"""This module digests LoRA adapters' files.

A request's KV depends on the files' bytes, but vLLM's block hashes have only name and path.

A digest is used again while the stat fields of every file (device, inode, size, mtime, ctime) are unchanged and older
than `SETTLED_S` seconds. Otherwise the files are read again.
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

from kvpipe.threads.loop import LoopThread

FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files that vLLM reads from an adapter's folder."""
BYTES_MAX: Final = 64 << 30
"""The largest size of an adapter in bytes. A larger adapter counts as unreadable."""
SETTLED_S: Final = 2.0
"""Within this time in seconds, a file may change again without a new mtime, because its clock is coarse."""
KNOWN_MAX: Final = 4096
"""The largest number of adapters whose digests are remembered."""
READINGS_MAX: Final = 3
STOP_S_MAX: Final = 1.0
_PIECE_BYTES: Final = 8 << 20
_NS: Final = 1_000_000_000

Signature = tuple[tuple[str, int, int, int, int, int], ...]
"""One row per file: name, device, inode, bytes, time of modification, time of change. The times are in nanoseconds."""
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


class Reading(NamedTuple):
    """The signature and the digest of an adapter's files. If `settled`, any later change alters the signature."""

    signature: Signature
    digest: bytes
    settled: bool


class AdapterFiles:
    """The digests of adapters. An adapter is read again only if its files may have changed. Not thread-safe."""

    def __init__(self) -> None:
        """Start without digests. `readings` counts how often an adapter was read."""
        self._known: OrderedDict[str, Reading] = OrderedDict()
        self.readings = 0

    def read(self, folder: str) -> Reading:
        """Return signature and digest of the adapter in `folder`.

        The adapter's files are read only if they may have changed.

        Raises:
            OSError: the folder has no file of an adapter, or a file is not regular or cannot be read. Also raised if
                the adapter is too large, or if its files change while they are read.
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
    """Return the stat fields of the adapter's files, which change with the files. Raises as `AdapterFiles.read`."""
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
    """Return the xxh3-128 digest (16 bytes) of the files in `signature`. The digest is not cryptographic.

    A file is read up to its size in `signature`. Raises OSError if a file cannot be read or is not regular any more. If
    a pipe has replaced a file, the call does not block.
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
    """Return an adapter's digest, which also depends on whether the engine reads experts as `fused`. b"" stays b""."""
    return xxhash.xxh3_128_digest(b"fused experts" + digest) if fused and digest else digest


def folder_of(path: str) -> str:
    """Return the folder from which vLLM reads the adapter `path`: `path` itself, or a folder in the hub's local cache.

    Raises:
        OSError: the folder does not exist, and the hub's cache does not have the adapter.
        ValueError: `path` is neither a valid path nor a valid name on the hub.

    """
    expanded = os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111  (as vLLM does it)
    if os.path.isabs(expanded) or Path(expanded).exists():  # noqa: PTH117  (works for paths that are not valid text)
        return os.path.abspath(expanded)  # noqa: PTH100  (does not resolve links)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (comes with vLLM)

    return str(snapshot_download(path, local_files_only=True))


class AdapterReader:
    """A reader of adapters' files with its own thread. Requests that wait for the same adapter share one reading."""

    def __init__(self, fault: Callable[[str, str], object]) -> None:
        """If an adapter cannot be read, `fault(path, why)` is called, once for each new reason."""
        self._fault, self._files = fault, AdapterFiles()
        self._loop: LoopThread | None = None
        self._due: set[str] = set()  # paths whose reading has not begun
        self._known: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._blamed: OrderedDict[str, str] = OrderedDict()

    @property
    def readings(self) -> int:
        """The number of times that the files of any adapter were read."""
        return self._files.readings

    def digest(self, path: str, since_s: float) -> bytes | None:
        """Return the digest of the adapter's files as of `since_s` (of `time.monotonic`) or later. Never blocks.

        Returns b"" if the files cannot be read. Returns None while the files are being read. Then call again.
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
        """End the reader's thread. Idempotent."""
        if self._loop is not None:
            self._loop.stop(STOP_S_MAX)

    def _read(self, path: str) -> None:
        self._due.discard(path)  # before the read, because a request that comes during the read needs a new reading
        read_s, digest = time.monotonic(), b""
        try:
            digest = self._files.read(folder_of(path)).digest
            self._blamed.pop(path, None)
        except Exception as error:  # noqa: BLE001  (after any error other adapters can still be read)
            if self._blamed.get(path) != repr(error):
                remember(self._blamed, path, repr(error), KNOWN_MAX)
                self._fault(path, repr(error))
        remember(self._known, path, (read_s, digest), KNOWN_MAX)


def remember(table: OrderedDict[_KeyT, _ValueT], key: _KeyT, value: _ValueT, entries_max: int) -> None:
    """Store `value` as the youngest entry. Drop the oldest entries beyond `entries_max`."""
    table[key] = value  # set before the move, because other threads read `table` and must always find `key`
    table.move_to_end(key)
    while len(table) > entries_max:
        table.popitem(last=False)
