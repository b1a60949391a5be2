"""The operations of CUDA that the CUDA engine uses: streams, events, copies, one kernel and pinning.

`CudaDevice` implements these operations with torch, Triton and the driver's library (`driver.py`). Tests use a
simulated device, which orders operations in all ways that CUDA allows.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import numpy.typing as npt
import torch

from kvpipe.machine.cores import CPUS_AT_START, parse_cpus
from kvpipe.transfer.driver import CopyBatch, Driver

Pair = tuple[torch.Tensor, torch.Tensor]

STAGED_PROGRAMS_MAX: Final = 512  # a gather takes only microseconds, so it may use the whole device
DIRECT_PROGRAMS: Final = 16  # 16 loads of 16 KiB in flight use the whole bus, and leave multiprocessors to the forward
WORDS_MAX: Final = 2048  # words of 8 bytes, per program and iteration
WORD_BYTES: Final = 8
WARPS: Final = 8
VECTOR_BYTES: Final = 16
LAG_BYTES, LAG_PASSES, LAG_REPEATS = 64 << 20, 10, 9  # 0.2 to 0.6 ms of work, long enough that a waiting thread sleeps


class DeviceEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Return whether all work before the event is done. This method never blocks."""

    def synchronize(self) -> None:
        """Block the host until all work before the event is done."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Any:  # noqa: ANN401  (a `DeviceEvent`: torch's stubs know only torch's type)
        """Return an event that fires after the work that is queued now."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401
        """Delay the work that is queued from now on until `event` has fired."""

    def synchronize(self) -> None:
        """Block the host until the stream's queue is empty."""


class Launch(NamedTuple):
    """The arguments of one launch of `kernels.copy_pages`. `bay` is an address, or None to copy to or from slots."""

    table: Any
    places: Any
    bay: int | None
    pool: int
    slot_bytes: int
    stride: int
    page_bytes: int
    first: int
    rows: int
    layer: int
    layers: int
    saving: bool
    align: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The kernel's positional arguments."""
        # the pool's address instead of 0, because Triton would give a small integer another type
        bay = self.pool if self.bay is None else self.bay
        return (
            self.table, self.places, bay, self.pool, self.slot_bytes, self.stride, self.page_bytes // self.align,
            self.first, self.rows, self.layer, self.layers,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time constants."""
        return _constants(self.page_bytes, self.align, staged=self.bay is not None, saving=self.saving)

    @property
    def programs(self) -> int:
        """The number of programs of the launch, which is the size of the grid."""
        if self.bay is None:
            return DIRECT_PROGRAMS
        turn = _words(self.page_bytes) * WORD_BYTES
        return max(1, min(STAGED_PROGRAMS_MAX, self.layers * self.rows * -(-self.page_bytes // turn)))


def _words(page_bytes: int) -> int:
    """Return the number of words that a program copies per iteration: a page's words, rounded up to a power of two.

    The number is at most `WORDS_MAX`.
    """
    return min(WORDS_MAX, 1 << (page_bytes // WORD_BYTES - 1).bit_length())


@functools.cache
def _constants(page_bytes: int, align: int, *, staged: bool, saving: bool) -> dict[str, Any]:
    return {"STAGED": staged, "SAVE": saving, "WORDS": _words(page_bytes), "ALIGN": align}


class Device(Protocol):
    """The operations of CUDA that the transfer engine uses."""

    def stream(self, name: str) -> Stream:
        """Return the stream of this name.

        Only the caller uses the stream. The stream does not synchronize with other streams.
        """

    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is not vLLM's thread, to use the device."""

    def cpus(self) -> frozenset[int]:
        """Return the cores near the device that this process may use. The set is empty if the cores are unknown."""

    def capability(self) -> tuple[int, int]:
        """Return the device's compute capability, for example (9, 0) for sm_90."""

    def copy(self, stream: Any, pairs: Iterable[Pair]) -> None:  # noqa: ANN401
        """Queue a copy of each pair's second tensor into the pair's first tensor. Host memory need not be pinned."""

    def copy_batch(self, stream: Any, copies: CopyBatch, *, settled: bool) -> None:  # noqa: ANN401
        """Queue a batch of copies. Host memory must be pinned. Raises `TransferError`.

        `settled` says that the sources have their final bytes now and keep these bytes until the copies are done. In
        this case the device may read the sources at any time from now on.
        """

    def upload(self, stream: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
        """Queue a copy of `array` to the device. Returns a handle that is valid in launches on `stream`."""

    def launch(self, stream: Any, launch: Launch) -> None:  # noqa: ANN401
        """Queue one launch of the kernel. Exceptions of Triton are passed on."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of device memory as a uint8 tensor."""

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return `size` bytes of pinned host memory as a uint8 tensor."""

    def blocking_lag_us(self) -> float:
        """Return how many microseconds later a sleeping thread notices an event than a polling thread."""

    def has_kernels(self) -> str:
        """Return why no kernel can be launched. Return "" if kernels can be launched."""

    def reads_pool(self) -> bool:
        """Return whether kernels can use the host's addresses of pinned host memory."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory. Raises `TransferError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""


class OwnStream(torch.cuda.ExternalStream):
    """A stream that the driver has created, wrapped for torch."""

    def record_event(self, event: Any = None) -> Any:  # noqa: ANN401
        """Record an event after the work queued now. A host thread that waits for it sleeps instead of polling."""
        made = torch.cuda.Event(blocking=True) if event is None else event  # type: ignore[no-untyped-call]
        return super().record_event(made)


_streams: dict[tuple[int, str], Stream] = {}
"""The process's streams by device and name. They are never deleted, because torch's allocators may refer to them."""


def outside(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call `make` in a new thread and return the result of `make`.

    The reason is `enable_cumem_allocator`: while vLLM registers the caches, all allocations of vLLM's thread come from
    a memory pool that vLLM may release later. Allocations of other threads do not come from that pool.
    """
    with ThreadPoolExecutor(1, "kvpipe-allocate") as alone:
        return alone.submit(make).result()


class CudaDevice:
    """The implementation of `Device` with torch.cuda."""

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        """`device` must have an index, because a new thread's current device need not be the engine's."""
        self._device, self._index = device, device.index or 0
        self._driver = driver or Driver()
        self._driver.suit(self._index)

    def stream(self, name: str) -> Stream:
        """Return the stream of this name. It is not from torch's pool, because vLLM also uses the pool's 32 streams."""
        key = self._index, name
        if key not in _streams:
            with torch.cuda.device(self._device):
                _streams[key] = OwnStream(self._driver.make_stream(), self._device)  # type: ignore[no-untyped-call]
        return _streams[key]

    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""
        return torch.cuda.current_stream(self._device)

    def enter_thread(self) -> None:
        """Prepare the calling thread to use the device.

        vLLM may capture a CUDA graph while this thread runs. In CUDA's default mode, queries and registrations of this
        thread would fail during a capture, and would make the capture fail. So the thread is set to ignore captures.
        """
        torch.cuda.set_device(self._device)
        self._driver.enter(self._index)
        self._driver.ignore_captures()

    def cpus(self) -> frozenset[int]:
        """Return the cores near the device that this process may use, or an empty set if they are unknown."""
        place = Path("/sys/bus/pci/devices") / self._driver.bus_id(self._index) / "local_cpulist"
        return parse_cpus(place.read_text("ascii")) & CPUS_AT_START

    def capability(self) -> tuple[int, int]:
        """Return the device's compute capability."""
        return torch.cuda.get_device_capability(self._device)

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[Pair]) -> None:
        """Queue a copy of each pair's second tensor into the first tensor.

        vLLM's caches may be inference tensors, which are read-only outside of inference mode.
        """
        with torch.inference_mode(), torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def copy_batch(self, stream: torch.cuda.Stream, copies: CopyBatch, *, settled: bool) -> None:
        """Queue a batch of copies with the driver."""
        self._driver.copy_batch(stream.cuda_stream, copies, settled=settled)

    def upload(self, stream: torch.cuda.Stream, array: npt.NDArray[Any]) -> torch.Tensor:
        """Queue a copy of `array` to the device, and return the device's tensor.

        torch's caching allocators keep source and target until the stream has copied.
        """
        host = torch.from_numpy(array).pin_memory()

        def send() -> torch.Tensor:
            with torch.cuda.stream(stream):
                return host.to(self._device, non_blocking=True)

        return outside(send)

    def launch(self, stream: torch.cuda.Stream, launch: Launch) -> None:
        """Queue one launch of the kernel."""
        from kvpipe.transfer.kernels import copy_pages  # noqa: PLC0415  (only where there is Triton)

        with torch.cuda.stream(stream):
            copy_pages[(launch.programs,)](*launch.arguments, **launch.constants, num_warps=WARPS)

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of device memory."""
        return outside(lambda: torch.empty(size, dtype=torch.uint8, device=self._device))

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return `size` bytes of pinned host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def blocking_lag_us(self) -> float:
        """Return how many microseconds later a sleeping thread notices an event than a polling thread."""
        memory, took = self.allocate(LAG_BYTES), {True: list[float](), False: list[float]()}
        for _, blocking in itertools.product(range(LAG_REPEATS), took):
            for _ in range(LAG_PASSES):
                memory.zero_()
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            began = time.perf_counter()
            while not blocking and not event.query():  # type: ignore[no-untyped-call]
                pass
            event.synchronize()
            took[blocking].append(time.perf_counter() - began)
        return (median(took[True]) - median(took[False])) * 1e6

    def has_kernels(self) -> str:
        """Return why no kernel can be launched, or "" if kernels can be launched."""
        try:
            import kvpipe.transfer.kernels  # noqa: F401, PLC0415
        except Exception as error:  # noqa: BLE001  (a broken install raises many things)
            return repr(error)
        return ""

    def reads_pool(self) -> bool:
        """Return whether kernels can use the host's addresses of pinned memory."""
        return self._driver.host_pointers_are_device_pointers(self._index)

    def register(self, address: int, size: int) -> None:
        """Pin host memory. Raises `TransferError`.

        The driver is called instead of CUDA's runtime, because after a failure in the runtime the next launch would
        also fail.
        """
        self._driver.register(address, size)

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""
        self._driver.unregister(address)
