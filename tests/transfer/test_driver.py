"""The calls into the driver's library carry the arguments that cuda.h says, as C sees them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvpipe.errors import TransferError
from kvpipe.transfer.device import Copies, Driver

STREAM = 0x7F00_0000_1234
P, N, CODE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
NS = ctypes.POINTER(N)
BATCH = ctypes.CFUNCTYPE(CODE, NS, NS, NS, N, P, NS, N, P, P)


class Library:
    """Stands for libcuda: its functions are called through C, and copy at once."""

    def __init__(self, *, batch: bool = True, code: int = 0, single: int = 0) -> None:  # noqa: C901
        self.seen: list[Any] = []
        self.attributes: tuple[int, ...] = ()
        self.code, self.single = code, single

        def copy(to: int, source: int, size: int, stream: int) -> int:
            self.seen.append(("copy", size, stream))
            if not self.single:
                ctypes.memmove(to, source, size)
            return self.single

        def copy_batch(*args: Any) -> int:
            to, source, sizes, count, attributes, first, attributes_count, fail, stream = args
            self.seen.append(("batch", count, stream))
            if self.code:
                return self.code
            self.attributes = tuple((ctypes.c_uint32 * 6).from_address(attributes))
            assert (first[0], attributes_count) == (0, 1)
            assert fail
            for i in range(count):
                ctypes.memmove(to[i], source[i], sizes[i])
            return 0

        def attribute(answer: int, which: int, device: int) -> int:
            ctypes.c_int.from_address(answer).value = int((which, device) == (91, 3))
            return 0

        def exchange(mode: int) -> int:
            self.seen.append(("mode", ctypes.c_int.from_address(mode).value))
            return 0

        def register(address: int, size: int, flags: int) -> int:
            self.seen.append(("register", address, size, flags))
            return self.single

        def unregister(address: int) -> int:
            self.seen.append(("unregister", address))
            return self.single

        def retain(context: int, device: int) -> int:
            ctypes.c_void_p.from_address(context).value = 0x7000_0000_0000 + device
            return 0

        def make_current(context: int) -> int:
            self.seen.append(("current", context))
            return 0

        self.cuMemHostRegister_v2 = ctypes.CFUNCTYPE(CODE, P, N, ctypes.c_uint)(register)
        self.cuMemHostUnregister = ctypes.CFUNCTYPE(CODE, P)(unregister)
        self.cuDevicePrimaryCtxRetain = ctypes.CFUNCTYPE(CODE, P, CODE)(retain)
        self.cuCtxSetCurrent = ctypes.CFUNCTYPE(CODE, P)(make_current)
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(CODE, P, P, N, P)(copy)
        self.cuDeviceGetAttribute = ctypes.CFUNCTYPE(CODE, P, CODE, CODE)(attribute)
        self.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(CODE, P)(exchange)
        if batch:
            self.cuMemcpyBatchAsync = BATCH(copy_batch)


def make(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Copies]:
    """Return what is copied, where to, and the copies: piece i has 8 * (i + 1) bytes."""
    source = np.random.default_rng(1).integers(0, 256, (count, 64), dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = 8 * (np.arange(count, dtype=np.int64) + 1)
    rows = 64 * np.arange(count, dtype=np.int64)
    return source, target, Copies(target.ctypes.data + rows, source.ctypes.data + rows, sizes)


def right(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> bool:
    """Whether every piece has its bytes, and nothing beyond."""
    wanted = np.zeros_like(source)
    for i in range(len(source)):
        wanted[i, : 8 * (i + 1)] = source[i, : 8 * (i + 1)]
    return bool((wanted == target).all())


def test_a_batch_is_one_call() -> None:
    """Addresses, sizes, one attribute for all from the first on, in stream order; the 64-bit handle of the stream."""
    library = Library()
    source, target, copies = make(5)
    Driver(library).copy_batch(STREAM, copies)
    assert right(source, target)
    assert library.seen == [("batch", 5, STREAM)]
    assert library.attributes == (1, 0, 0, 0, 0, 1), "stream order, no hints, overlap with compute"


def test_one_copy_is_a_plain_one() -> None:
    """A batch of one is not worth a batch."""
    library = Library()
    source, target, copies = make(1)
    Driver(library).copy_batch(STREAM, copies)
    assert right(source, target)
    assert library.seen == [("copy", 8, STREAM)]


@pytest.mark.parametrize("library", [Library(batch=False), Library(code=801), Library(code=1)])
def test_without_batches_copies_go_one_by_one(library: Library) -> None:
    """An old driver, or one that refuses: the same bytes, and a batch is not tried again."""
    driver = Driver(library)
    with capture_logs() as logs:
        for _ in range(2):
            source, target, copies = make(3)
            driver.copy_batch(STREAM, copies)
            assert right(source, target)
    assert [one for one in library.seen if one[0] == "copy"] == 2 * [("copy", 8 * (i + 1), STREAM) for i in range(3)]
    assert [entry["event"] for entry in logs] == ["no_batches"] * (library.code != 0)


def test_a_copy_that_is_refused_raises() -> None:
    """Nothing is believed to be queued that is not."""
    _, _, copies = make(2)
    with pytest.raises(TransferError, match="CUDA error 700"), capture_logs():
        Driver(Library(code=700, single=700)).copy_batch(STREAM, copies)


def test_pinning_and_unpinning() -> None:
    """Pinned memory is portable (1) and mapped (2), so that kernels can use it; a refusal raises."""
    library = Library()
    driver = Driver(library)
    driver.register(1 << 44, 1 << 33)
    driver.unregister(1 << 44)
    assert library.seen == [("register", 1 << 44, 1 << 33, 3), ("unregister", 1 << 44)]
    refusing = Driver(Library(single=2))
    with pytest.raises(TransferError, match="CUDA error 2"):
        refusing.register(4096, 4096)
    with pytest.raises(TransferError, match="CUDA error 2"):
        refusing.unregister(4096)


def test_a_thread_gets_the_primary_context() -> None:
    """The driver's calls need one; the runtime gives it to a thread only when it is first used there."""
    library = Library()
    Driver(library).enter(3)
    assert library.seen == [("current", 0x7000_0000_0003)]


def test_threads_ignore_captures() -> None:
    """The relaxed mode is 2 in cuda.h."""
    library = Library()
    Driver(library).ignore_captures()
    assert library.seen == [("mode", 2)]


def test_host_pointers() -> None:
    """CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 91 in cuda.h."""
    driver = Driver(Library())
    assert driver.host_pointers_are_device_pointers(3)
    assert not driver.host_pointers_are_device_pointers(0)


def test_a_library_without_a_function_is_no_driver() -> None:
    """What every driver has is looked up at once."""
    with pytest.raises(AttributeError, match="cuMemcpyAsync"):
        Driver(SimpleNamespace())
