"""Calls of the CUDA driver's library that torch does not offer. Its entry points are stable between releases.

Numbers and structures are those of cuda.h.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from kvpipe.errors import TransferError
from kvpipe.trace.log import log

if TYPE_CHECKING:
    from kvpipe.transfer.device import CopyBatch


BATCHES_SINCE: Final = 12080  # CUDA 12.8; CUDA 13 has another signature under the same name
NON_BLOCKING: Final = 1  # of a stream: it does not wait for the legacy default stream
STREAM_PRIORITY: Final = -1
"""Before compute's, which is 0: streams of one priority share hardware queues, in which a wait blocks all behind it."""
BUS_ID_BYTES: Final = 16

_HOST_REGISTER_PORTABLE, _HOST_REGISTER_MAPPED = 1, 2
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: Final = 91
_RELAXED: Final = 2
_ORDER_STREAM: Final = 1
_PREFER_OVERLAP: Final = 1
_INVALID_VALUE, _NOT_SUPPORTED = 1, 801
_REFUSALS: Final = frozenset({_INVALID_VALUE, _NOT_SUPPORTED})
"""Errors of the call itself. After any other error, which may be the context's, nothing is tried again."""

_POINTER, _SIZE, _CODE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_BATCH = ctypes.CFUNCTYPE(
    _CODE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)  # targets, sources, sizes, count, attributes, where each begins, their count, where it failed, stream


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The driver's library, which every CUDA process has loaded."""

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401  (a `ctypes.CDLL`, or what stands for one)
        """Look the symbols up. Without ``cuMemcpyBatchAsync`` copies are queued one by one."""
        library = library or ctypes.CDLL("libcuda.so.1")

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
        self.how = Attributes(_ORDER_STREAM, _Location(), _Location(), _PREFER_OVERLAP)
        self._how_at, self._from_first = ctypes.addressof(self.how), ctypes.c_size_t(0)
        self.batches = "taken"  # or how batches are queued instead, and why
        if self._batch is None:
            self._report("one by one: the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8")

    def copy_batch(self, stream: int, copies: CopyBatch) -> None:
        """Queue a batch of copies. Raises `TransferError`."""
        targets, sources, sizes = copies
        if self._batch is not None and len(sizes) > 1 and self._take(stream, copies):
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _check(self._copy(target, source, size, stream))

    def _take(self, stream: int, copies: CopyBatch) -> bool:
        """Queue a batch as one call. Returns False if it was refused; copies of it that were queued can be repeated."""
        code = self._call(stream, copies)
        if code in _REFUSALS and self.how.flags:
            asked, self.how.flags = self.how.flags, 0  # a hint only
            why, code = code, self._call(stream, copies)
            if code == 0:
                self._report(f"taken without overlap: CUDA error {why} with it")
            else:
                self.how.flags = asked
        if code in _REFUSALS:
            self._report(f"one by one: CUDA error {code}")
            if code == _NOT_SUPPORTED:
                self._batch = None
            return False
        _check(code)
        return True

    def _call(self, stream: int, copies: CopyBatch) -> int:
        targets, sources, sizes = copies
        failed = ctypes.c_size_t(0)
        code: int = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            self._how_at, ctypes.addressof(self._from_first), 1, ctypes.addressof(failed), stream,
        )  # fmt: skip
        return code

    def _report(self, how: str) -> None:
        if self.batches != how:
            self.batches = how
            log.warning("no_batches", how=how, effect="queueing copies takes longer")

    def make_stream(self, priority: int = STREAM_PRIORITY) -> int:
        """Return the handle of a new stream of the calling thread's context. Raises `TransferError`."""
        made = ctypes.c_void_p()
        _check(self._stream(ctypes.byref(made), NON_BLOCKING, priority))
        return made.value or 0

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
        """Allow the calling thread all calls while another thread captures a graph. Raises `TransferError`."""
        _check(self._exchange(ctypes.byref(ctypes.c_int(_RELAXED))))

    def host_pointers_are_device_pointers(self, device: int) -> bool:
        """Whether kernels can use registered host memory at the host's own addresses."""
        answer = ctypes.c_int(0)
        code = self._attribute(ctypes.byref(answer), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device)
        return code == 0 and answer.value == 1

    def bus_id(self, device: int) -> str:
        """Return the device's place on the PCI bus, as the kernel writes it. Raises `TransferError`."""
        answer = ctypes.create_string_buffer(BUS_ID_BYTES)
        _check(self._bus_id(answer, BUS_ID_BYTES, device))
        return answer.value.decode("ascii").lower()


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
    plain = getattr(library, "cuMemcpyBatchAsync", None)  # where it is exported, it is that of 12.8
    return None if plain is None else _BATCH(ctypes.cast(plain, _POINTER).value or 0)


def _check(code: int) -> None:
    if code != 0:
        raise TransferError(f"CUDA error {code}")
