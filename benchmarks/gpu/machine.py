"""The measurements that `probe` makes of a GPU: the protocol, and the implementation on a real GPU."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from benchmarks.gpu import bare  # noqa: F401  (first: it finds the packages that are missing)
from kvpipe.transfer.device import CudaDevice
from kvpipe.transfer.driver import CopyBatch, Driver
from kvpipe.transfer.pinning import PIECE_BYTES_MAX

PIECE_BYTES, PIECES = PIECE_BYTES_MAX, 4
PINNED_MS_MAX: Final = 15.0
"""The limit in milliseconds on the time to pin a piece, and on the time of a kernel launch while a piece is pinned.

For comparison, a decode
step of a small model takes 2 to 4 ms."""
LAG_US_MAX: Final = 10_000.0
"""The limit on a thread's wake-up delay, in microseconds. Above this limit, the end of copies is noticed late with
every setting of `completions`."""
BATCH_BYTES, COPIES_MAX, REPEATS = 128 << 20, 4096, 5
COPY_BYTES: Final = (8 << 10, 64 << 10, 1 << 20)
HOWS: Final = {
    "stream order, overlap": (1, 1),
    "stream order": (1, 0),
    "any order, overlap": (3, 1),
    "any order": (3, 0),
}
"""``srcAccessOrder`` and ``flags`` of a batch's attributes, as cuda.h numbers them."""
OURS: Final = {False: (1, 1), True: (3, 1)}
"""The access order and the flag that kvpipe uses: for saves (False) and loads (True). `Driver` drops a refused flag."""
CALL_BYTES: Final = 64 << 20  # bytes that are pinned during a capture
TORCH_STREAMS, OWN_STREAMS = 40, 32
SLEEP_CYCLES, HELD_S_MIN = 15_000_000, 0.004  # about 10 ms; a stream that waits longer than 4 ms counts as held up
PRIORITIES: Final = (0, -1)
WAIT_S: Final = 20.0


def first_line(error: Exception) -> str:
    """Return the first line of `error`, because torch's errors add advice below the first line."""
    return (str(error).splitlines() or [repr(error)])[0]


class Batch(NamedTuple):
    """The result of one batch of copies."""

    gb_per_s: float
    host_us: float
    how: str  # as in `Driver.batches`


class Machine(Protocol):
    """The measurements of a GPU."""

    def facts(self) -> dict[str, str]:
        """Return versions and settings."""

    def pin(self) -> float:
        """Pin the next piece, and return the time in milliseconds. Raises `TransferError` if the driver refuses."""

    def pin_across(self) -> None:
        """Pin memory that overlaps two pinned pieces. Raises `TransferError`, because the driver should refuse."""

    def launches(self, *, pinning: bool) -> float:
        """Launch a small kernel repeatedly, and return the longest time in milliseconds.

        `pinning` says whether another thread pins memory meanwhile.
        """

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:
        """Copy scattered pages in one batch. Raises `TransferError` if the driver refuses the batch."""

    def during_capture(self, *, enters: bool) -> list[str]:
        """Capture a graph while a helper thread calls CUDA, and return the calls that failed, with the reasons.

        `enters` says whether the helper thread has called `enter_thread`.
        """

    def blocking_lag_us(self) -> float:
        """Return how many microseconds later a sleeping thread notices an event than a polling thread."""

    def torch_streams(self) -> int:
        """Ask torch for `TORCH_STREAMS` streams, and return the number of different streams that torch returned."""

    def held_up(self, priority: int) -> int:
        """Return how many of `OWN_STREAMS` streams delay the compute stream while they wait for another stream."""


class Real:
    """The measurements on a real CUDA device."""

    def __init__(self) -> None:
        """Map memory as the pool does: private, with huge pages, and not copied to child processes."""
        self._where = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self._where)
        self._driver, self._device = Driver(), CudaDevice(self._where)
        self._pool = self._mapped(PIECE_BYTES * PIECES)
        self._base, self._pinned = self._pool.data_ptr(), 0
        self._there = torch.empty(BATCH_BYTES, dtype=torch.uint8, device=self._where)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @staticmethod
    def _mapped(size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def facts(self) -> dict[str, str]:
        """Return versions and settings."""
        huge = {name: Path("/sys/kernel/mm/transparent_hugepage", name) for name in ("enabled", "defrag")}
        message = {
            f"huge pages {name}": path.read_text("ascii").strip() for name, path in huge.items() if path.exists()
        }
        return message | {
            "gpu": torch.cuda.get_device_name(self._where),
            "cuda": str(torch.version.cuda),
            "kernels": self._device.has_kernels() or "run",
            "kernels use host addresses": str(self._device.reads_pool()),
        }

    def pin(self) -> float:
        """Pin the next piece, and return the time in milliseconds."""
        began = time.perf_counter()
        self._device.register(self._base + self._pinned, PIECE_BYTES)
        self._pinned += PIECE_BYTES
        return (time.perf_counter() - began) * 1e3

    def pin_across(self) -> None:
        """Pin memory that overlaps two pinned pieces."""
        self._device.register(self._base + PIECE_BYTES // 2, PIECE_BYTES)

    def launches(self, *, pinning: bool) -> float:
        """Return the longest time of a small kernel launch, in milliseconds."""
        memory, ended, ones = self._mapped(PIECES * PIECE_BYTES), threading.Event(), torch.ones(1, device=self._where)
        memory[:: mmap.PAGESIZE] = 0

        def pin() -> None:
            self._device.enter_thread()
            try:
                for at in range(memory.data_ptr(), memory.data_ptr() + len(memory), PIECE_BYTES):
                    if pinning:
                        self._device.register(at, PIECE_BYTES)
                        self._device.unregister(at)
                    else:
                        time.sleep(PINNED_MS_MAX / 1e3)
            finally:
                ended.set()

        ones.add_(1)
        torch.cuda.synchronize()
        thread = threading.Thread(target=pin)
        thread.start()
        longest = 0.0
        while not ended.is_set():
            began = time.perf_counter()
            ones.add_(1)
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - began)
        thread.join()
        return longest * 1e3

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:
        """Copy scattered pages in one batch. The best of `REPEATS` runs shows what the device can do."""
        count = min(COPIES_MAX, BATCH_BYTES // copy_bytes)
        places = np.random.default_rng(0).permutation(count).astype(np.int64)
        host, there = self._base + np.arange(count) * copy_bytes, self._there.data_ptr() + places * copy_bytes
        copies = CopyBatch(there, host, np.full(count, copy_bytes)) if loading else CopyBatch(
            host, there, np.full(count, copy_bytes)
        )  # fmt: skip
        driver = Driver()
        driver.suit(self._where.index or 0)
        driver.how[False].source_access_order, driver.how[False].flags = how
        took, queued = [], []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            driver.copy_batch(self._stream.cuda_stream, copies)
            queued.append(time.perf_counter() - began)
            self._stream.synchronize()
            took.append(time.perf_counter() - began)
        return Batch(count * copy_bytes / min(took) / 1e9, min(queued) * 1e6, driver.batches)

    def during_capture(self, *, enters: bool) -> list[str]:
        """Return the CUDA calls that failed during a capture, with the reasons."""
        failed: list[str] = []
        begin, over = threading.Event(), threading.Event()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        torch.cuda.synchronize()
        at = (memory := self._mapped(CALL_BYTES)).data_ptr()

        def tried(what: str, call: Callable[[], object]) -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  (torch's errors and the driver's)
                failed.append(f"{what}: {first_line(error)}")

        def help_out() -> None:
            if enters:
                self._device.enter_thread()
            begin.wait(WAIT_S)
            tried("query", event.query)
            tried("register", lambda: self._device.register(at, CALL_BYTES))
            tried("unregister", lambda: self._device.unregister(at))
            over.set()

        def capture() -> None:
            ones, graph = torch.ones(1 << 20, device=self._where), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = ones * 2
                begin.set()
                over.wait(WAIT_S)
                result = doubled + 1
            graph.replay()
            torch.cuda.synchronize()
            assert float(result[0]) == 3.0, "the graph is wrong"

        helper = threading.Thread(target=help_out)
        helper.start()
        tried("graph", capture)
        begin.set()
        helper.join(WAIT_S)
        del memory
        return failed

    def blocking_lag_us(self) -> float:
        """Return how many microseconds later a sleeping thread notices an event than a polling thread."""
        return self._device.blocking_lag_us()

    def torch_streams(self) -> int:
        """Return how many different streams torch has."""
        made = [torch.cuda.Stream() for _ in range(TORCH_STREAMS)]  # type: ignore[no-untyped-call]
        return len({stream.cuda_stream for stream in made})

    def held_up(self, priority: int) -> int:
        """Return how many waiting streams delay the legacy default stream, on which vLLM's forwards run."""
        wrapped: Any = torch.cuda.ExternalStream
        streams = [wrapped(self._driver.make_stream(priority), self._where) for _ in range(OWN_STREAMS)]
        compute, blocker = torch.cuda.default_stream(), wrapped(self._driver.make_stream(-2), self._where)
        one, waited, computed = (torch.ones(1, device=self._where) for _ in range(3))

        def sleep(cycles: int) -> None:
            with torch.cuda.stream(blocker):
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

        def wait(stream: Any) -> None:
            with torch.cuda.stream(stream):
                torch.add(one, 1, out=waited)

        def work() -> None:
            with torch.cuda.stream(compute):
                torch.mul(one, 1, out=computed)

        count = 0
        for stream in streams:
            sleep(1)
            wait(stream)
            work()  # so that nothing is loaded or allocated during the measurement
            torch.cuda.synchronize()
            sleep(SLEEP_CYCLES)
            stream.wait_event(blocker.record_event())
            wait(stream)
            began = time.perf_counter()
            work()
            compute.synchronize()
            count += time.perf_counter() - began > HELD_S_MIN
        torch.cuda.synchronize()
        return count
