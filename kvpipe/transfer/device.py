"""What the CUDA engine asks of CUDA, and nothing more: streams, events, copies, one kernel, pinning.

`CudaDevice` answers with torch, Triton and, for batches of copies, the driver's own library, whose entry points are
stable between releases. Tests answer with a simulated device that may do whatever CUDA may legally do.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from kvpipe.errors import TransferError

log = structlog.get_logger("kvpipe.transfer")

Ints = npt.NDArray[np.int64]
Pair = tuple[torch.Tensor, torch.Tensor]

STAGED_PROGRAMS_MAX: Final = 512  # a gather in the device's own memory is over in microseconds: let it use everything
DIRECT_PROGRAMS: Final = 16  # enough loads under way to fill a bus (16 of 16 KiB), few enough to leave compute alone
WORDS_MAX: Final = 2048  # of 8 bytes, per program and turn
WORD_BYTES: Final = 8
WARPS: Final = 8
VECTOR_BYTES: Final = 16

_HOST_REGISTER_PORTABLE, _HOST_REGISTER_MAPPED = 1, 2
_RELAXED: Final = 2
_ORDER_STREAM: Final = 1
_PREFER_OVERLAP: Final = 1


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Any:  # noqa: ANN401  (an `Event`: torch's stubs know only their own)
        """Mark the point after what was queued so far."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401
        """Hold back what is queued from now on until `event` has fired."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class Copies(NamedTuple):
    """A batch of copies between addresses: `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order."""

    targets: Ints
    sources: Ints
    sizes: Ints


class Launch(NamedTuple):
    """One launch of `kernels.copy_pages`, whose arguments these are. `bay` is None to go straight to the slots."""

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
        """The positional ones, as the kernel takes them."""
        bay = self.pool if self.bay is None else self.bay  # never 0: a small integer would be another type
        return (
            self.table, self.places, bay, self.pool, self.slot_bytes, self.stride, self.page_bytes // self.align,
            self.first, self.rows, self.layer, self.layers,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        """The ones that it is compiled for."""
        return _constants(self.page_bytes, self.align, staged=self.bay is not None, saving=self.saving)

    @property
    def programs(self) -> int:
        """How many of them run."""
        if self.bay is None:
            return DIRECT_PROGRAMS
        turn = _words(self.page_bytes) * WORD_BYTES
        return max(1, min(STAGED_PROGRAMS_MAX, self.layers * self.rows * -(-self.page_bytes // turn)))


def _words(page_bytes: int) -> int:
    """Words of a program's turn: a power of two, and a page where that is not more than `WORDS_MAX`."""
    return min(WORDS_MAX, 1 << (page_bytes // WORD_BYTES - 1).bit_length())


@functools.cache
def _constants(page_bytes: int, align: int, *, staged: bool, saving: bool) -> dict[str, Any]:
    return {"STAGED": staged, "SAVE": saving, "WORDS": _words(page_bytes), "ALIGN": align}


class Device(Protocol):
    """The few things that the engine asks of CUDA."""

    def stream(self, name: str) -> Stream:
        """Make a stream."""

    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""

    def enter_thread(self) -> None:
        """Make the calling thread, which is not the engine's, fit to use the device."""

    def copy(self, stream: Any, pairs: Iterator[Pair]) -> None:  # noqa: ANN401
        """Queue copies to each first from each second tensor. Host memory need not be pinned."""

    def copy_batch(self, stream: Any, copies: Copies) -> None:  # noqa: ANN401
        """Queue a batch. Host memory must be pinned. Raises `TransferError`."""

    def upload(self, stream: Any, array: npt.NDArray[Any]) -> Any:  # noqa: ANN401
        """Queue a copy of `array` to the device; the handle is good for launches on `stream`."""

    def launch(self, stream: Any, launch: Launch) -> None:  # noqa: ANN401
        """Queue the kernel. Raises whatever Triton raises."""

    def allocate(self, size: int) -> torch.Tensor:
        """Return `size` bytes of device memory, uint8."""

    def has_kernels(self) -> str:
        """Return why no kernel can be launched, or nothing."""

    def reads_pool(self) -> bool:
        """Whether kernels can use the addresses of pinned host memory."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory. Raises `TransferError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""


class CudaDevice:
    """`Device` over torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index: a new thread's current device is not the engine's."""
        self._device = device
        self._driver = Driver()

    def stream(self, name: str) -> Stream:  # noqa: ARG002
        """See `Device.stream`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return torch.cuda.current_stream(self._device)

    def enter_thread(self) -> None:
        """See `Device.enter_thread`.

        A thread that may be at work while vLLM captures a CUDA graph must not be bound by the capture: in CUDA's
        default mode its queries and registrations would fail, and make the capture fail.
        """
        torch.cuda.set_device(self._device)
        self._driver.enter(self._device.index or 0)
        self._driver.ignore_captures()

    def copy(self, stream: torch.cuda.Stream, pairs: Iterator[Pair]) -> None:
        """See `Device.copy`. Inference mode: vLLM's caches may be inference tensors, read-only outside of it."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def copy_batch(self, stream: torch.cuda.Stream, copies: Copies) -> None:
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

    def has_kernels(self) -> str:
        """See `Device.has_kernels`."""
        try:
            import kvpipe.transfer.kernels  # noqa: F401, PLC0415
        except Exception as error:  # noqa: BLE001  (a broken install raises many things)
            return repr(error)
        return ""

    def reads_pool(self) -> bool:
        """See `Device.reads_pool`."""
        return self._driver.host_pointers_are_device_pointers(self._device.index or 0)

    def register(self, address: int, size: int) -> None:
        """See `Device.register`. Not through the runtime: a failure would be the next launch's, too."""
        self._driver.register(address, size)

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        self._driver.unregister(address)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of cuda.h, 12.8 and later."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The calls that torch does not offer, from the driver's library, which every CUDA process has loaded."""

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401  (a `ctypes.CDLL`, or what stands for one)
        """Look the symbols up. ``cuMemcpyBatchAsync`` came with CUDA 12.8; without it copies are queued one by one."""
        library = library or ctypes.CDLL("libcuda.so.1")
        address, size, code = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._copy = library.cuMemcpyAsync
        self._copy.argtypes, self._copy.restype = (address, address, size, address), code
        self._batch = getattr(library, "cuMemcpyBatchAsync", None)
        if self._batch is not None:
            self._batch.argtypes = (address, address, address, size, address, address, size, address, address)
            self._batch.restype = code
        self._attribute = library.cuDeviceGetAttribute
        self._attribute.argtypes, self._attribute.restype = (address, code, code), code
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes, self._register.restype = (address, size, ctypes.c_uint), code
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes, self._unregister.restype = (address,), code
        self._retain = library.cuDevicePrimaryCtxRetain
        self._retain.argtypes, self._retain.restype = (address, code), code
        self._make_current = library.cuCtxSetCurrent
        self._make_current.argtypes, self._make_current.restype = (address,), code
        self._exchange = library.cuThreadExchangeStreamCaptureMode
        self._exchange.argtypes, self._exchange.restype = (address,), code
        self._how = _Attributes(_ORDER_STREAM, _Location(), _Location(), _PREFER_OVERLAP)
        self._how_at, self._from_first = ctypes.addressof(self._how), ctypes.c_size_t(0)

    def copy_batch(self, stream: int, copies: Copies) -> None:
        """Queue a batch of copies. Raises `TransferError`."""
        targets, sources, sizes = copies
        if self._batch is not None and len(sizes) > 1:
            failed = ctypes.c_size_t(0)
            code = self._batch(
                targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
                self._how_at, ctypes.addressof(self._from_first), 1, ctypes.addressof(failed), stream,
            )  # fmt: skip
            if code == 0:
                return
            self._batch = None  # one by one from now on; copies that were queued before are made again
            log.warning("no_batches", why=f"CUDA error {code}", effect="queueing copies takes longer")
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _check(self._copy(target, source, size, stream))

    def register(self, address: int, size: int) -> None:
        """Pin host memory for all contexts, and map it. Raises `TransferError`."""
        _check(self._register(address, size, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED))

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""
        _check(self._unregister(address))

    def enter(self, device: int) -> None:
        """Make the device's primary context, which torch uses, the calling thread's. Raises `TransferError`."""
        context = ctypes.c_void_p()
        _check(self._retain(ctypes.byref(context), device))
        _check(self._make_current(context))

    def ignore_captures(self) -> None:
        """Let the calling thread work while another captures a graph. Raises `TransferError`."""
        _check(self._exchange(ctypes.byref(ctypes.c_int(_RELAXED))))

    def host_pointers_are_device_pointers(self, device: int) -> bool:
        """Whether kernels can use registered host memory at the host's own addresses."""
        attribute_of_registered_memory, answer = 91, ctypes.c_int(0)
        return self._attribute(ctypes.byref(answer), attribute_of_registered_memory, device) == 0 and answer.value == 1


def _check(code: int) -> None:
    if code != 0:
        raise TransferError(f"CUDA error {code}")
