"""Which bytes a LoRA adapter has: its KV was computed from them, and vLLM's block hashes know only its name and path.

An adapter is the files that vLLM reads of it, and of each what a system changes when the file changes: device, inode,
size, times. While those stay, and have for a while, its bytes are not read again.
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
"""What vLLM reads of an adapter's folder."""
BYTES_MAX: Final = 64 << 30
"""Of one adapter; a larger one is shared with nobody."""
SETTLED_S: Final = 2.0
"""A file that was changed within so long may change once more without showing it: file systems' clocks are coarse."""
KNOWN_MAX: Final = 4096
"""Adapters that are remembered."""
READINGS_MAX: Final = 3
STOP_S_MAX: Final = 1.0
_PIECE_BYTES: Final = 8 << 20
_NS: Final = 1_000_000_000

Signature = tuple[tuple[str, int, int, int, int, int], ...]
"""Of each file: name, device, inode, bytes, time of modification, time of change."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Reading(NamedTuple):
    """What an adapter's files were, and what all of their bytes come to. `settled`: any change of them would show."""

    signature: Signature
    digest: bytes
    settled: bool


class AdapterFiles:
    """Reads adapters, and each again only when its files may have changed. For one thread."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._known: OrderedDict[str, Reading] = OrderedDict()
        self.readings = 0

    def read(self, folder: str) -> Reading:
        """Identify the bytes of the adapter in `folder`.

        Raises:
            OSError: a file is missing, no regular file, too large, or not to be read.
            ValueError: the path is none.

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
    """Return what tells the adapter's files from what they were, as far as a system shows it. Raises like `read`."""
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
    """Return what the bytes of the files of `signature` come to (xxh3-128: tells adapters apart, resists no forgery).

    What is no regular file any more is never waited for, and of a file that grows no more is read than it had.
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


def folder_of(path: str) -> str:
    """Return the folder that vLLM would read the adapter `path` from, without asking a hub.

    Raises:
        OSError: there is none here.
        ValueError: the path is none.

    """
    expanded = os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111  (as vLLM does it)
    if os.path.isabs(expanded) or Path(expanded).exists():  # noqa: PTH117  (keeps what is no valid text)
        return os.path.abspath(expanded)  # noqa: PTH100  (does not resolve links)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (comes with vLLM)

    return str(snapshot_download(path, local_files_only=True))


class AdapterReader:
    """Reads adapters' files beside the scheduler's thread: once for all who wait for the same."""

    def __init__(self, fault: Callable[[str, str], object]) -> None:
        """`fault(path, why)` is called for an adapter that cannot be read, once."""
        self._fault, self._files = fault, AdapterFiles()
        self._loop: LoopThread | None = None
        self._due: set[str] = set()  # paths whose reading has not begun
        self._known: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._blamed: OrderedDict[str, str] = OrderedDict()

    @property
    def readings(self) -> int:
        """How often files were read."""
        return self._files.readings

    def digest(self, path: str, since_s: float) -> bytes | None:
        """Return what the adapter's bytes come to, as they were at `since_s` (monotonic) or later. Never blocks.

        Empty: they cannot be read. None: they are being read, ask again.
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
    """Note `value` as the youngest; forget the oldest beyond `entries_max`."""
    table[key] = value  # never missing meanwhile: other threads read it
    table.move_to_end(key)
    while len(table) > entries_max:
        table.popitem(last=False)
