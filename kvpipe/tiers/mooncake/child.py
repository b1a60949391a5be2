"""The process that runs Mooncake's client for `tier.py`. Started by its path: it imports nothing of kvpipe.

Arguments: the descriptors of the shared memory, of the control socket, and of one socket per lane. The parent sends the
settings over the control socket and receives how the start went. Then every lane has a thread that answers one question
after the other, ``[operation, argument …]`` with ``[why not, answer]``; a lane's values lie in its own stretch of the
shared memory, one after the other. The process ends when the control socket does, or its parent.
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
"""Keys per page of a listing, and the longest name of a key: so a page fits into one message of a local socket."""
LINE_BYTES_MAX, METRICS_LINES_MAX = 64 << 10, 100_000
SPINNER_NICE = 10
"""Niceness of the threads that poll for transfers: threads that move bytes, or run a model, go first."""

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def address_to(host: str, port: int) -> str:
    """Return this machine's address as seen from `host`; nothing is sent."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


class Worker:
    """The client, and what it can be asked. Codes below zero are the client's own."""

    def __init__(self, given: dict[str, Any], memory: mmap.mmap, lanes: int) -> None:
        """Connect to the master and lend it memory. Raises RuntimeError with the reason."""
        # here, so that what hinders it can be reported
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # type: ignore[import-untyped] # noqa: PLC0415

        self._given, self._lane_bytes = given, len(memory) // lanes
        self.lends = given["segment_bytes"] > 0
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._registered: set[int] = set()
        # one transfer each way at a time: a thread that waits for one spins
        self._turns = {"read": threading.Lock(), "write": threading.Lock()}
        self._replicate = ReplicateConfig()
        self._replicate.replica_num = given["replicas"]
        self._pages: Iterator[list[str]] = iter(())
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            given["local_host"] or address_to(given["host"], given["port"]),
            given["metadata_server"],
            given["segment_bytes"],
            1 << 20,  # for values that are passed as Python's bytes: there are none
            given["protocol"],
            given["device"],
            given["master"],
        )
        if code:
            msg = f"setup of the client failed with code {code}"
            raise RuntimeError(msg)

    def answer(self, lane: int, question: list[Any]) -> Any:  # noqa: ANN401
        """Return what is asked for."""
        operation, *arguments = question
        if operation in {"read", "write"}:
            with self._turns[operation]:
                return getattr(self, operation)(*arguments, lane)
        return getattr(self, operation)(*arguments)

    def exists(self, keys: list[str]) -> list[int]:
        """Return 1 for each that is there and 0 for each that is not."""
        return self.store.batch_is_exist(keys)  # type: ignore[no-any-return]

    def read(self, keys: list[str], sizes: list[int], lane: int) -> list[int]:
        """Fill the lane's memory; return how long each value is."""
        return self.store.batch_get_into(keys, self._places(lane, sizes), sizes)  # type: ignore[no-any-return]

    def write(self, keys: list[str], sizes: list[int], lane: int) -> list[int]:
        """Write from the lane's memory; return 0 for each that was written and 1 for each that is there already."""
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
        """Drop values, leased or not: who is reading one at this moment finds other bytes under its checksum."""
        return self.store.batch_remove(keys, True)  # type: ignore[no-any-return]  # noqa: FBT003  (its name is not taken)

    def sizes(self, keys: list[str]) -> list[int]:
        """Return how long each value is; -1: it is gone."""
        found = self.store.batch_get_replica_desc(keys)
        return [_size(found.get(key, ())) for key in keys]

    def begin_scan(self) -> None:
        """List from the beginning."""
        self._pages = self._listing()

    def scan(self) -> list[str] | None:
        """Return the next keys of the listing; None: it has ended."""
        return next(self._pages, None)

    def _listing(self) -> Iterator[list[str]]:
        with self._open("get_all_keys") as answer:
            lines = (line.decode("utf-8", "replace").strip() for line in _lines(answer))
            while page := list(islice(lines, PAGE_KEYS)):
                yield [line for line in page if len(line) <= NAME_CHARS_MAX and line.isascii()]

    def capacity(self) -> list[int]:
        """Return the cluster's values, bytes used and bytes lent."""
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
        if lane not in self._registered:  # only what is used is pinned, where the transport pins it
            self.store.register_buffer(begin, self._lane_bytes)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SPINNER_NICE)
            self._registered.add(lane)
        return [begin + at for at in accumulate(sizes[:-1], initial=0)]


def _lines(answer: Any) -> Iterator[bytes]:  # noqa: ANN401
    """Yield the lines of an answer. Raises ValueError where one has no end."""
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
    """Answer the questions of one lane until the parent closes it. What hinders that ends the process.

    The parent would wait on a lane that nobody serves; it starts another process instead.
    """
    try:
        _serve(worker, lane, wire)
    except ConnectionError:
        return  # the parent has ended
    except BaseException:  # noqa: BLE001  (whatever it is)
        os._exit(1)


def _serve(worker: Worker, lane: int, wire: socket.socket) -> None:
    while message := wire.recv(MESSAGE_BYTES_MAX):
        try:
            reply = ["", worker.answer(lane, _decode(message))]
        except Exception as error:  # noqa: BLE001  (it is reported; the next question may fare better)
            reply = [f"{type(error).__name__}: {error}", None]
        try:
            wire.send(_encode(reply))
        except OSError:
            wire.send(_encode(["the client's answer cannot be sent", None]))


def main(memory_fd: int, control_fd: int, *lane_fds: int) -> None:
    """Start, serve, and end with the parent."""
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    lanes = [socket.socket(fileno=fd) for fd in lane_fds]
    memory = mmap.mmap(memory_fd, 0)
    try:
        worker = Worker(_decode(control.recv(MESSAGE_BYTES_MAX)), memory, len(lanes))
    except Exception as error:  # noqa: BLE001  (it is reported)
        control.send(f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    for lane, wire in enumerate(lanes):
        threading.Thread(target=serve, args=(worker, lane, wire), daemon=True).start()
    control.send(b"ready")
    hung_up = select.poll()
    hung_up.register(control, select.POLLIN)
    while not hung_up.poll(1000) and os.getppid() == parent:  # a fork of the parent may keep the socket open
        pass
    if worker.lends:
        threading.Timer(CLOSE_S_MAX, os._exit, (1,)).start()
        worker.store.close()  # the master is notified at once that the memory is gone
    os._exit(0)  # the library's own end, and that of its threads, is not waited for


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
