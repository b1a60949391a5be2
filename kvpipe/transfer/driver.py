"""Calls of the CUDA driver's library that torch does not offer. The library's entry points are stable.

Numbers and structures in this module are copied from cuda.h.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.errors import TransferError, UnsupportedError
from kvpipe.trace.log import log

Ints = npt.NDArray[np.int64]

LIBRARY: Final = "libcuda.so.1"
BATCHES_SINCE: Final = 12080  # CUDA 12.8; in CUDA 13 the function has another signature under the same name
NON_BLOCKING: Final = 1  # the flag of a stream that does not wait for the legacy default stream
STREAM_PRIORITY: Final = -1
"""The streams of copies have this priority, which is higher than compute's priority 0.

Streams of equal priority share hardware queues. In such a queue, a waiting stream blocks the work behind it.
"""
BUS_ID_BYTES: Final = 16

_HOST_REGISTER_PORTABLE, _HOST_REGISTER_MAPPED = 1, 2
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: Final = 91
_RELAXED: Final = 2
_ORDER_STREAM: Final = 1
_ORDER_ANY: Final = 3
"""The device may read the source before the stream reaches the copy. So the source must not change after the call."""
_PREFER_OVERLAP: Final = 1
_INVALID_VALUE, _NOT_SUPPORTED = 1, 801
_REFUSALS: Final = frozenset({_INVALID_VALUE, _NOT_SUPPORTED})
"""The errors by which the driver refuses a call.

After a refusal, the copies are queued in another way. Other errors raise.
"""

_POINTER, _SIZE, _CODE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_BATCH = ctypes.CFUNCTYPE(
    _CODE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)  # targets, sources, sizes, count, attributes, first copy of each, their count, failed copy, stream


class CopyBatch(NamedTuple):
    """A batch of n copies in any order. Copy i copies `sizes[i]` bytes from address `sources[i]` to `targets[i]`."""

    targets: Ints
    sources: Ints
    sizes: Ints


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """The structure ``CUmemcpyAttributes`` of cuda.h."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The driver's library, which every CUDA process has loaded."""

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401  (a `ctypes.CDLL`, or a fake of one in tests)
        """Find the symbols of `library`. Without ``cuMemcpyBatchAsync``, copies are queued one by one.

        Raises:
            UnsupportedError: the driver's library cannot be loaded.

        """
        library = library or _load()

        def find(name: str, *types: Any) -> Any:  # noqa: ANN401
            call = getattr(library, name)
            call.argtypes, call.restype = types, _CODE
            return call

        self._copy = find("cuMemcpyAsync", _POINTER, _POINTER, _SIZE, _POINTER)
        self._attribute = find("cuDeviceGetAttribute", _POINTER, _CODE, _CODE)
        self._bus_id = find("cuDeviceGetPCIBusId", _POINTER, _CODE, _CODE)
        self._stream = find("cuStreamCreateWithPriority", _POINTER, ctypes.c_uint, _CODE)
        self._register = find("cuMemHostRegister_v2", _POINTER, _SIZE, ctypes.c_uint)
        self._unregister = find("cuMemHostUnregister", _POINTER)
        self._retain = find("cuDevicePrimaryCtxRetain", _POINTER, _CODE)
        self._make_current = find("cuCtxSetCurrent", _POINTER)
        self._exchange = find("cuThreadExchangeStreamCaptureMode", _POINTER)
        self._batch = _find_batch(library)
        self.how = {
            settled: Attributes(order, _Location(), _Location(), _PREFER_OVERLAP)
            for settled, order in ((False, _ORDER_STREAM), (True, _ORDER_ANY))
        }
        self._from_first = ctypes.c_size_t(0)
        self.batches = "taken"  # "taken" if one call queues a batch, otherwise why copies are queued one by one
        if self._batch is None:
            self._report("one by one: the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8")

    def suit(self, device: int) -> None:
        """Queue copies one by one on a device that has other addresses for registered memory (WSL2, Tegra).

        On such a device, a batch with the host's addresses would be an illegal access, which destroys the context. A
        single copy with the host's addresses is legal.
        """
        if self._batch is not None and not self.host_pointers_are_device_pointers(device):
            self._batch = None
            self._report("one by one: registered memory has other addresses on the device (as with WSL2 and Tegra)")

    def copy_batch(self, stream: int, copies: CopyBatch, *, settled: bool = False) -> None:
        """Queue a batch of copies. `Device.copy_batch` describes `settled`. Raises `TransferError`."""
        targets, sources, sizes = copies
        if self._batch is not None and len(sizes) > 1 and self._take(stream, copies, self.how[settled]):
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _check(self._copy(target, source, size, stream))

    def _take(self, stream: int, copies: CopyBatch, how: Attributes) -> bool:
        """Queue a batch with one call. Returns False if the driver refused the call.

        After a refusal the caller may queue all copies of the batch again, even if some were queued.
        """
        code = self._call(stream, copies, how)
        if code in _REFUSALS and how.flags:
            asked, how.flags = how.flags, 0  # try again without the flags, because they are only hints
            why, code = code, self._call(stream, copies, how)
            if code == 0:
                self._report(f"taken without overlap: CUDA error {why} with it")
            else:
                how.flags = asked
        if code in _REFUSALS:
            self._report(f"one by one: CUDA error {code}")
            if code == _NOT_SUPPORTED:
                self._batch = None
            return False
        _check(code)
        return True

    def _call(self, stream: int, copies: CopyBatch, how: Attributes) -> int:
        targets, sources, sizes = copies
        failed = ctypes.c_size_t(0)
        code: int = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(how), ctypes.addressof(self._from_first), 1, ctypes.addressof(failed), stream,
        )  # fmt: skip
        return code

    def _report(self, how: str) -> None:
        if self.batches != how:
            self.batches = how
            log.warning("no_batches", how=how, effect="queueing copies takes longer")

    def make_stream(self, priority: int = STREAM_PRIORITY) -> int:
        """Return the handle of a new stream in the calling thread's context. Raises `TransferError`."""
        made = ctypes.c_void_p()
        _check(self._stream(ctypes.byref(made), NON_BLOCKING, priority))
        return made.value or 0

    def register(self, address: int, size: int) -> None:
        """Pin host memory for all contexts, and map this memory into the device. Raises `TransferError`."""
        _check(self._register(address, size, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED))

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""
        _check(self._unregister(address))

    def enter(self, device: int) -> None:
        """Make the device's primary context, as torch uses it, current in this thread. Raises `TransferError`."""
        context = ctypes.c_void_p()
        _check(self._retain(ctypes.byref(context), device))
        _check(self._make_current(context))

    def ignore_captures(self) -> None:
        """Allow the calling thread all calls while another thread captures a graph. Raises `TransferError`."""
        _check(self._exchange(ctypes.byref(ctypes.c_int(_RELAXED))))

    def host_pointers_are_device_pointers(self, device: int) -> bool:
        """Return whether kernels can use registered host memory at the host's own addresses."""
        answer = ctypes.c_int(0)
        code = self._attribute(ctypes.byref(answer), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device)
        return code == 0 and answer.value == 1

    def bus_id(self, device: int) -> str:
        """Return the device's PCI bus id in the form that the Linux kernel uses. Raises `TransferError`."""
        answer = ctypes.create_string_buffer(BUS_ID_BYTES)
        _check(self._bus_id(answer, BUS_ID_BYTES, device))
        return answer.value.decode("ascii").lower()


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        hip = getattr(torch.version, "hip", None)
        cause = f"torch is built for ROCm {hip}" if hip else "NVIDIA's driver is not installed, or not for this process"
        msg = (
            f"kvpipe: the CUDA driver's library cannot be loaded ({error}): {cause}; KV caches are supported on "
            "NVIDIA GPUs and CPUs: install the driver (in a container, start it with the GPU), or use vLLM's CPU build"
        )
        raise UnsupportedError(msg) from error


def _find_batch(library: Any) -> Any:  # noqa: ANN401
    """Return ``cuMemcpyBatchAsync`` with the signature of CUDA 12.8, or None."""
    ask = getattr(library, "cuGetProcAddress_v2", None)
    if ask is not None:
        ask.argtypes = (ctypes.c_char_p, _POINTER, _CODE, ctypes.c_uint64, _POINTER)
        ask.restype = _CODE
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = ask(b"cuMemcpyBatchAsync", ctypes.byref(found), BATCHES_SINCE, 0, ctypes.byref(status))
        if code == 0 and found.value:
            return _BATCH(found.value)
    # the symbol without a version suffix has the signature of CUDA 12.8
    plain = getattr(library, "cuMemcpyBatchAsync", None)
    return None if plain is None else _BATCH(ctypes.cast(plain, _POINTER).value or 0)


def _check(code: int) -> None:
    if code != 0:
        raise TransferError(f"CUDA error {code}")
