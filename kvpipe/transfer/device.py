"""The operations of CUDA that the CUDA engine uses: streams, events, copies, one kernel, pinning.

`CudaDevice` implements them with torch, Triton and the driver's library (`driver.py`). Tests use a simulated device
that may do whatever CUDA may legally do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.cores import CPUS_AT_START, parse_cpus
from kvpipe.transfer.driver import Driver

Ints = npt.NDArray[np.int64]
Pair = tuple[torch.Tensor, torch.Tensor]

STAGED_PROGRAMS_MAX: Final = 512  # a gather in the device's own memory is over in microseconds: let it use everything
DIRECT_PROGRAMS: Final = 16  # enough loads under way to fill a bus (16 of 16 KiB), few enough to leave compute alone
WORDS_MAX: Final = 2048  # of 8 bytes, per program and turn
WORD_BYTES: Final = 8
WARPS: Final = 8
VECTOR_BYTES: Final = 16


class DeviceEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done. Never blocks."""

    def synchronize(self) -> None:
        """Block the host until everything before it is done."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Any:  # noqa: ANN401  (an `DeviceEvent`: torch's stubs know only their own)
        """Mark the point after what was queued so far."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401
        """Hold back what is queued from now on until `event` has fired."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class CopyBatch(NamedTuple):
    """n copies in any order: `sizes[i]` bytes from address `sources[i]` to `targets[i]`. Each int64, shape (n,)."""

    targets: Ints
    sources: Ints
    sizes: Ints


class Launch(NamedTuple):
    """The arguments of one launch of `kernels.copy_pages`. `bay`: its address; None: copy directly to or from slots."""

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
        bay = self.pool if self.bay is None else self.bay  # never 0: a small integer would be another type
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
        """The number of programs: the size of the grid."""
        if self.bay is None:
            return DIRECT_PROGRAMS
        turn = _words(self.page_bytes) * WORD_BYTES
        return max(1, min(STAGED_PROGRAMS_MAX, self.layers * self.rows * -(-self.page_bytes // turn)))


def _words(page_bytes: int) -> int:
    """Return how many words a program copies per iteration: a power of two; a whole page, up to `WORDS_MAX`."""
    return min(WORDS_MAX, 1 << (page_bytes // WORD_BYTES - 1).bit_length())


@functools.cache
def _constants(page_bytes: int, align: int, *, staged: bool, saving: bool) -> dict[str, Any]:
    return {"STAGED": staged, "SAVE": saving, "WORDS": _words(page_bytes), "ALIGN": align}


class Device(Protocol):
    """The operations of CUDA that the transfer engine uses."""

    def stream(self, name: str) -> Stream:
        """Return the stream of this name. Nobody else queues on it, and it does not synchronize with other streams."""

    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is not vLLM's, to use the device."""

    def cpus(self) -> frozenset[int]:
        """Return the cores near the device that this process may use; empty if unknown."""

    def copy(self, stream: Any, pairs: Iterable[Pair]) -> None:  # noqa: ANN401
        """Queue a copy of each pair's second tensor to its first. Host memory need not be pinned."""

    def copy_batch(self, stream: Any, copies: CopyBatch) -> None:  # noqa: ANN401
        """Queue a batch of copies. Host memory must be pinned. Raises `TransferError`."""

    def upload(self, stream: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
        """Queue a copy of `array` to the device. Returns a handle, valid in launches on `stream`."""

    def launch(self, stream: Any, launch: Launch) -> None:  # noqa: ANN401
        """Queue the kernel. Raises whatever Triton raises."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of device memory, uint8."""

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return `size` bytes of pinned host memory, uint8."""

    def has_kernels(self) -> str:
        """Return why no kernel can be launched; "" if kernels can be."""

    def reads_pool(self) -> bool:
        """Whether kernels can use the addresses of pinned host memory."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory. Raises `TransferError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""


class OwnStream(torch.cuda.ExternalStream):
    """A stream of the driver's, wrapped for torch."""

    def record_event(self, event: Any = None) -> Any:  # noqa: ANN401
        """See torch.cuda.Stream. A host thread that waits for the event sleeps instead of polling."""
        made = torch.cuda.Event(blocking=True) if event is None else event  # type: ignore[no-untyped-call]
        return super().record_event(made)


_streams: dict[tuple[int, str], Stream] = {}
"""By device and name, one per process: torch's allocators may refer to a stream for longer than an engine lives."""


class CudaDevice:
    """`Device` over torch.cuda."""

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        """`device` must have an index, because a new thread's current device need not be the engine's."""
        self._device, self._index = device, device.index or 0
        self._driver = driver or Driver()

    def stream(self, name: str) -> Stream:
        """See `Device.stream`. Not one of torch's pool: it has 32 streams, and shares them with vLLM."""
        key = self._index, name
        if key not in _streams:
            with torch.cuda.device(self._device):
                _streams[key] = OwnStream(self._driver.make_stream(), self._device)  # type: ignore[no-untyped-call]
        return _streams[key]

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return torch.cuda.current_stream(self._device)

    def enter_thread(self) -> None:
        """See `Device.enter_thread`.

        A thread that may be at work while vLLM captures a CUDA graph must not be bound by the capture: in CUDA's
        default mode its queries and registrations would fail, and make the capture fail.
        """
        torch.cuda.set_device(self._device)
        self._driver.enter(self._index)
        self._driver.ignore_captures()

    def cpus(self) -> frozenset[int]:
        """See `Device.cpus`."""
        place = Path("/sys/bus/pci/devices") / self._driver.bus_id(self._index) / "local_cpulist"
        return parse_cpus(place.read_text("ascii")) & CPUS_AT_START

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[Pair]) -> None:
        """See `Device.copy`. Inference mode: vLLM's caches may be inference tensors, read-only outside of it."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def copy_batch(self, stream: torch.cuda.Stream, copies: CopyBatch) -> None:
        """See `Device.copy_batch`."""
        self._driver.copy_batch(stream.cuda_stream, copies)

    def upload(self, stream: torch.cuda.Stream, array: npt.NDArray[Any]) -> torch.Tensor:
        """See `Device.upload`. torch's caching allocators keep both ends until the stream has got there."""
        with torch.cuda.stream(stream):
            return torch.from_numpy(array).pin_memory().to(self._device, non_blocking=True)

    def launch(self, stream: torch.cuda.Stream, launch: Launch) -> None:
        """See `Device.launch`."""
        from kvpipe.transfer.kernels import copy_pages  # noqa: PLC0415  (only where there is Triton)

        with torch.cuda.stream(stream):
            copy_pages[(launch.programs,)](*launch.arguments, **launch.constants, num_warps=WARPS)

    def allocate(self, size: int) -> torch.Tensor:
        """See `Device.allocate`."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """See `Device.allocate_pinned`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def has_kernels(self) -> str:
        """See `Device.has_kernels`."""
        try:
            import kvpipe.transfer.kernels  # noqa: F401, PLC0415
        except Exception as error:  # noqa: BLE001  (a broken install raises many things)
            return repr(error)
        return ""

    def reads_pool(self) -> bool:
        """See `Device.reads_pool`."""
        return self._driver.host_pointers_are_device_pointers(self._index)

    def register(self, address: int, size: int) -> None:
        """See `Device.register`. Not through the runtime: a failure would be the next launch's, too."""
        self._driver.register(address, size)

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        self._driver.unregister(address)
