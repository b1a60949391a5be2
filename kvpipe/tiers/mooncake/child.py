"""The program of the process that runs Mooncake's client for `tier.py`.

The program is started by its path and imports no module of kvpipe. Its arguments are the descriptors of the shared
memory, of the control socket, and of one socket per lane. The parent sends the settings over the control socket, and
receives ``ready`` or the reason for a failure. Each lane has a thread that answers one question after the other. A
question is ``[operation, argument …]``, and its answer is ``[error or "", answer]``. The values of a lane are in the
lane's range of the shared memory, one after the other. The process ends when the control socket closes or the parent
ends.

The process can also map the slots that the engines of a node share (`join`), and read values into slots (`fill`). In
this case, only the beginning of each value is in the lane's memory. The client may abandon a transfer without stopping
the transfer. So the parent revokes a fill that was not answered. After the revocation, no transfer of this fill can
write into slots any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any
from urllib.request import ProxyHandler, build_opener

import msgspec

MESSAGE_BYTES_MAX = 1 << 20
CLOSE_S_MAX = 10.0
PAGE_KEYS, NAME_CHARS_MAX = 500, 190
"""The number of keys per page of a listing, and the longest name of a key. A page must fit into one message."""
LINE_BYTES_MAX, METRICS_LINES_MAX = 64 << 10, 100_000
WINDOWS_MAX = 8192
"""The largest number of slots that are mapped at once. Each slot needs two of a process's 65,530 mappings."""
LOST_MAX = 20_000
"""The largest number of windows that abandoned transfers may still use. If there are more, the process ends."""
NOTHING_BEGUN = frozenset({-600, -703, -704})
"""The codes of reads that have begun no transfer: wrong size, not written yet, not found."""
SPINNER_NICE = 10
"""The niceness of threads that poll for transfers. Threads that move bytes or run a model have a higher priority."""

MAP_FIXED = 0x10
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def address_to(host: str, port: int) -> str:
    """Return the local address of the route to `host`. No packet is sent to `host`."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


class Windows:
    """Windows onto the slots of a shared memory, for reads. A window has some pages of its own, then a slot's pages.

    So a value is contiguous for the client, although the value's header is not in the slot. Slots are not registered
    with the client: the network may access registered memory, and transfers over TCP need no registered memory.
    """

    def __init__(self, fd: int, offset: int) -> None:
        """Map slots that begin at `offset` of file `fd`."""
        self._fd, self._offset, self._lock = fd, offset, threading.Lock()
        # windows without a fill: addresses by (pages before the slot, place, bytes)
        self._free: dict[tuple[int, int, int], int] = {}
        self._busy: dict[int, list[tuple[tuple[int, int, int], int]]] = {}  # windows in use, by number of the fill
        self._revoked: set[int] = set()
        self._lost, self._waste, self._waste_bytes = 0, os.memfd_create("kvpipe-late-writes"), 0

    def open(self, fill: int, wanted: list[tuple[int, int, int]]) -> list[int]:
        """Return the address of each window for fill number `fill`. Raises RuntimeError if the fill was revoked."""
        with self._lock:
            if fill in self._revoked:
                self._revoked.remove(fill)
                msg = "the read was given up before it began"
                raise RuntimeError(msg)
            opened = self._busy[fill] = []
            for key in wanted:
                opened.append((key, self._free.pop(key, 0) or self._map(*key)))  # noqa: PERF401  (if this raises, `close` has the others)
            return [at for _, at in opened]

    def close(self, fill: int, doubtful: list[bool]) -> None:
        """End a fill. For each window, `doubtful` says whether a transfer may still write to the window."""
        with self._lock:
            for (key, at), lost in zip(self._busy.pop(fill, []), doubtful, strict=False):
                if lost:
                    self._lose(key, at)
                else:
                    self._free[key] = at
            while len(self._free) > WINDOWS_MAX:
                head, place, size = next(iter(self._free))
                LIBC.munmap(self._free.pop((head, place, size)), head + size)

    def revoke(self, fill: int) -> None:
        """Prevent all further writes of fill number `fill` into slots, whether the fill runs or has not begun."""
        with self._lock:
            opened = self._busy.pop(fill, None)
            if opened is None:
                self._revoked.add(fill)
            for key, at in opened or []:
                self._lose(key, at)

    def _map(self, head: int, place: int, size: int) -> int:
        anonymous, fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, MAP_FIXED | mmap.MAP_SHARED | mmap.MAP_POPULATE
        at = _mapped(0, head + size, anonymous, -1, 0)
        try:
            return _mapped(at + head, size, fixed, self._fd, self._offset + place) - head
        except OSError:
            LIBC.munmap(at, head + size)
            raise

    def _lose(self, key: tuple[int, int, int], at: int) -> None:
        """Replace the slot in a window by memory that all lost windows share. Later writes do not reach the slot.

        The window's addresses are never used again.
        """
        head, _, size = key
        self._lost += 1
        try:
            if size > self._waste_bytes:
                os.ftruncate(self._waste, size)
                self._waste_bytes = size
            _mapped(at + head, size, MAP_FIXED | mmap.MAP_SHARED, self._waste, 0)
        except OSError:
            os._exit(1)
        if self._lost > LOST_MAX:
            os._exit(1)


def _mapped(at: int, size: int, flags: int, fd: int, offset: int) -> int:
    found = LIBC.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "a slot cannot be mapped")
    return int(found)


class Worker:
    """The client and its operations. Codes below zero are error codes of Mooncake's client."""

    def __init__(self, given: dict[str, Any], memory: mmap.mmap, lanes: int) -> None:
        """Connect to the master and lend memory to the cluster. Raises RuntimeError with the reason of a failure."""
        # The import is not at the top of the file, so that its failure can be reported to the parent.
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # type: ignore[import-untyped] # noqa: PLC0415

        self._given, self._lane_bytes = given, len(memory) // lanes
        self.lends = given["segment_bytes"] > 0
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._registered: set[int] = set()
        # Each direction has only one transfer at a time, because each thread that waits for a transfer keeps a core
        # busy.
        self._turns = {"read": threading.Lock(), "write": threading.Lock()}
        self._replicate = ReplicateConfig()
        self._replicate.replica_num = given["replicas"]
        self._pages: Iterator[list[str]] = iter(())
        self._windows: Windows | None = None
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            given["local_host"] or address_to(given["host"], given["port"]),
            given["metadata_server"],
            given["segment_bytes"],
            1 << 20,  # memory for values that are passed as Python's bytes; kvpipe passes no such values
            given["protocol"],
            given["device"],
            given["master"],
        )
        if code:
            msg = f"setup of the client failed with code {code}"
            raise RuntimeError(msg)

    def answer(self, lane: int, question: list[Any]) -> Any:  # noqa: ANN401
        """Return the answer to a question from the lane with the number `lane`."""
        operation, *arguments = question
        if operation in {"read", "write", "fill"}:
            with self._turns["write" if operation == "write" else "read"]:
                return getattr(self, operation)(*arguments, lane)
        return getattr(self, operation)(*arguments)

    def exists(self, keys: list[str]) -> list[int]:
        """Return 1 for each key whose value the cluster has, and 0 for each other key."""
        return self.store.batch_is_exist(keys)  # type: ignore[no-any-return]

    def read(self, keys: list[str], sizes: list[int], lane: int) -> list[int]:
        """Read values into the lane's memory. Return the length of each value in bytes, or a negative code."""
        return self.store.batch_get_into(keys, self._places(lane, sizes), sizes)  # type: ignore[no-any-return]

    def join(self, holder: str, hello: bytes, offset: int) -> None:
        """Become a process of the engine for the holder of the node's memory, and map the memory's slots."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            wire.settimeout(self._given["timeout_s"])
            wire.connect(holder)
            wire.send(hello)
            answer, fds, _, _ = socket.recv_fds(wire, MESSAGE_BYTES_MAX, 1)
        if not fds:
            msg = f"the holder of the node's memory refuses this process: {answer[:200]!r}"
            raise RuntimeError(msg)
        self._windows = Windows(fds[0], offset)

    def fill(self, keys: list[str], sizes: list[int], head: int, places: list[int], fill: int, lane: int) -> list[int]:
        """Read values into slots. The first `head` bytes of each value are read into the lane's memory instead.

        `places` has the destination of the rest of each value, in bytes from the beginning of the slots. The result has
        the form of the result of `read`.
        """
        assert self._windows is not None  # noqa: S101  (the parent has joined)
        wanted = [(head, place, size - head) for place, size in zip(places, sizes, strict=True)]
        doubtful, heads = [True] * len(keys), self._places(lane, [head] * len(keys))
        try:
            windows = self._windows.open(fill, wanted)
            codes: list[int] = self.store.batch_get_into(keys, windows, sizes)
            doubtful = [code < 0 and code not in NOTHING_BEGUN for code in codes]
            for into, window in zip(heads, windows, strict=True):
                ctypes.memmove(into, window, head)
            return codes
        finally:
            self._windows.close(fill, doubtful)

    def revoke(self, fill: int) -> None:
        """See `Windows.revoke`."""
        assert self._windows is not None  # noqa: S101  (the parent has joined)
        self._windows.revoke(fill)

    def write(self, keys: list[str], sizes: list[int], lane: int) -> list[int]:
        """Write values from the lane's memory. Return 0 for each written value, and 1 if the cluster had the value."""
        places, codes = self._places(lane, sizes), self.exists(keys)
        new = [at for at, code in enumerate(codes) if code == 0]
        if new:
            put = self.store.batch_put_from(
                [keys[at] for at in new], [places[at] for at in new], [sizes[at] for at in new], self._replicate
            )
            for at, code in zip(new, put, strict=True):
                codes[at] = code
        return codes

    def delete(self, keys: list[str]) -> list[int]:
        """Delete values, even leased values. A client that is reading such a value detects the loss by the checksum."""
        return self.store.batch_remove(keys, True)  # type: ignore[no-any-return]  # noqa: FBT003  (positional only)

    def sizes(self, keys: list[str]) -> list[int]:
        """Return the length of each value in bytes, or -1 if the value does not exist any more."""
        found = self.store.batch_get_replica_desc(keys)
        return [_size(found.get(key, ())) for key in keys]

    def begin_scan(self) -> None:
        """Begin a new listing."""
        self._pages = self._listing()

    def scan(self) -> list[str] | None:
        """Return the next keys of the listing, or None if the listing has ended."""
        return next(self._pages, None)

    def _listing(self) -> Iterator[list[str]]:
        with self._open("get_all_keys") as answer:
            lines = (line.decode("utf-8", "replace").strip() for line in _lines(answer))
            while page := list(islice(lines, PAGE_KEYS)):
                yield [line for line in page if len(line) <= NAME_CHARS_MAX and line.isascii()]

    def capacity(self) -> list[int]:
        """Return three numbers of the cluster: values, used bytes and lent bytes."""
        with self._open("metrics") as answer:
            names = ("master_key_count", "master_allocated_bytes", "master_total_capacity_bytes")
            lines = (line.decode("utf-8", "replace").split() for line in islice(_lines(answer), METRICS_LINES_MAX))
            reported = {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in names}  # noqa: PLR2004
        return [int(float(reported[name])) for name in names]

    def _open(self, what: str) -> Any:  # noqa: ANN401
        opener = build_opener(ProxyHandler({}))
        return opener.open(f"http://{self._given['metrics']}/{what}", timeout=self._given["timeout_s"])

    def _places(self, lane: int, sizes: list[int]) -> list[int]:
        begin = self._base + lane * self._lane_bytes
        if lane not in self._registered:  # registered on first use, because the transport may pin registered memory
            self.store.register_buffer(begin, self._lane_bytes)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SPINNER_NICE)
            self._registered.add(lane)
        return [begin + at for at in accumulate(sizes[:-1], initial=0)]


def _lines(answer: Any) -> Iterator[bytes]:  # noqa: ANN401
    """Yield the lines of an answer. Raises ValueError for a line of `LINE_BYTES_MAX` bytes or more."""
    while line := answer.readline(LINE_BYTES_MAX):
        if len(line) == LINE_BYTES_MAX:
            msg = "a line without an end"
            raise ValueError(msg)
        yield line


def _size(replicas: Any) -> int:  # noqa: ANN401
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return -1


def serve(worker: Worker, lane: int, wire: socket.socket) -> None:
    """Answer the questions of one lane until the parent closes the lane. Any unexpected error ends the process.

    If the process did not end, the parent would wait on a lane that no thread serves. The parent restarts the process.
    """
    try:
        _serve(worker, lane, wire)
    except ConnectionError:
        return  # the parent has closed the lane or has ended
    except BaseException:  # noqa: BLE001  (any error must end the process)
        os._exit(1)


def _serve(worker: Worker, lane: int, wire: socket.socket) -> None:
    while message := wire.recv(MESSAGE_BYTES_MAX):
        try:
            reply = ["", worker.answer(lane, _decode(message))]
        except Exception as error:  # noqa: BLE001  (reported to the parent; later questions may succeed)
            reply = [f"{type(error).__name__}: {error}", None]
        try:
            wire.send(_encode(reply))
        except OSError:
            wire.send(_encode(["the client's answer cannot be sent", None]))


def main(memory_fd: int, control_fd: int, *lane_fds: int) -> None:
    """Start the client and serve all lanes. End the process when the parent ends or closes the control socket."""
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    lanes = [socket.socket(fileno=fd) for fd in lane_fds]
    memory = mmap.mmap(memory_fd, 0)
    try:
        worker = Worker(_decode(control.recv(MESSAGE_BYTES_MAX)), memory, len(lanes))
    except Exception as error:  # noqa: BLE001  (reported to the parent)
        control.send(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    for lane, wire in enumerate(lanes):
        threading.Thread(target=serve, args=(worker, lane, wire), daemon=True).start()
    control.send(b"ready")
    hung_up = select.poll()
    hung_up.register(control, select.POLLIN)
    # the parent's pid is checked, too, because a fork of the parent may keep the socket open
    while not hung_up.poll(1000) and os.getppid() == parent:
        pass
    if worker.lends:
        threading.Timer(CLOSE_S_MAX, os._exit, (1,)).start()
        worker.store.close()  # tells the master at once that the lent memory is lost
    os._exit(0)  # ends the process without the library's clean-up


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
