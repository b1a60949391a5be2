"""The calls to the driver's library pass the arguments that cuda.h defines.

The tests see the arguments that C receives.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvpipe.errors import TransferError, UnsupportedError
from kvpipe.machine.cores import parse_cpus
from kvpipe.testing.logged import capture_logs
from kvpipe.transfer import device
from kvpipe.transfer import driver as driver_module
from kvpipe.transfer.device import CudaDevice
from kvpipe.transfer.driver import CopyBatch, Driver

STREAM = 0x7F00_0000_1234
P, N, CODE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
NS = ctypes.POINTER(N)
BATCH = ctypes.CFUNCTYPE(CODE, NS, NS, NS, N, P, NS, N, P, P)


class Library:
    """A fake libcuda. Its functions are called through C and copy at once."""

    FUNCTIONS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cuMemHostRegister_v2": ("register", P, N, ctypes.c_uint),
        "cuMemHostUnregister": ("unregister", P),
        "cuDevicePrimaryCtxRetain": ("retain", P, CODE),
        "cuCtxSetCurrent": ("make_current", P),
        "cuMemcpyAsync": ("copy", P, P, N, P),
        "cuDeviceGetAttribute": ("attribute", P, CODE, CODE),
        "cuThreadExchangeStreamCaptureMode": ("exchange", P),
        "cuStreamCreateWithPriority": ("make_stream", P, ctypes.c_uint, CODE),
        "cuDeviceGetPCIBusId": ("bus_id", P, CODE, CODE),
        "cuGetProcAddress_v2": ("find", ctypes.c_char_p, P, CODE, ctypes.c_uint64, P),
    }
    """For each function name: the method of this class, and the types of the arguments in cuda.h."""

    def __init__(
        self, *, exported: bool = True, known: bool = False, code: int = 0, flagged: int = 0, single: int = 0
    ) -> None:
        """`exported`: the batch call is in the symbol table. `known`: the driver returns the address of the batch call.

        `code`, `single` and `flagged` are the results of batches, of single copies, and of batches with the flag for
        overlap.
        """
        self.seen: list[Any] = []
        self.attributes: tuple[int, ...] = ()
        self.known, self.code, self.flagged, self.single = known, code, flagged, single
        for name, (method, *arguments) in self.FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(CODE, *arguments)(getattr(self, f"_{method}")))
        self._batch = BATCH(self._copy_batch)
        if exported:
            self.cuMemcpyBatchAsync = self._batch

    def _copy(self, to: int, source: int, size: int, stream: int) -> int:
        self.seen.append(("copy", size, stream))
        if not self.single:
            ctypes.memmove(to, source, size)
        return self.single

    def _copy_batch(self, *args: Any) -> int:
        to, source, sizes, count, attributes, first, attributes_count, fail, stream = args
        self.seen.append(("batch", count, stream))
        self.attributes = tuple((ctypes.c_uint32 * 6).from_address(attributes))
        if self.code or (self.flagged and self.attributes[-1]):
            return self.code or self.flagged
        assert (first[0], attributes_count) == (0, 1)
        assert fail
        for i in range(count):
            ctypes.memmove(to[i], source[i], sizes[i])
        return 0

    def _attribute(self, answer: int, which: int, device: int) -> int:
        ctypes.c_int.from_address(answer).value = int((which, device) == (91, 3))
        return 0

    def _exchange(self, mode: int) -> int:
        self.seen.append(("mode", ctypes.c_int.from_address(mode).value))
        return 0

    def _register(self, address: int, size: int, flags: int) -> int:
        self.seen.append(("register", address, size, flags))
        return self.single

    def _unregister(self, address: int) -> int:
        self.seen.append(("unregister", address))
        return self.single

    def _make_stream(self, answer: int, flags: int, priority: int) -> int:
        self.seen.append(("stream", flags, priority))
        ctypes.c_void_p.from_address(answer).value = 0x5000_0000_0000 + 8 * len(self.seen)
        return self.single

    def _bus_id(self, answer: int, size: int, device: int) -> int:
        text = b"0000:3B:00.%d\0" % device
        assert len(text) <= size
        ctypes.memmove(answer, text, len(text))
        return 0

    def _find(self, name: bytes, answer: int, version: int, flags: int, status: int) -> int:
        assert status
        asked = (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        found = ctypes.cast(self._batch, P).value if asked and self.known else 0
        ctypes.c_void_p.from_address(answer).value = found
        return 0 if self.known else 500

    def _retain(self, context: int, device: int) -> int:
        ctypes.c_void_p.from_address(context).value = 0x7000_0000_0000 + device
        return 0

    def _make_current(self, context: int) -> int:
        self.seen.append(("current", context))
        return 0


def make(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], CopyBatch]:
    """Return source, target, and `count` copies. Copy i has 8 * (i + 1) bytes."""
    source = np.random.default_rng(1).integers(0, 256, (count, 64), dtype=np.uint8)
    target = np.zeros_like(source)
    sizes = 8 * (np.arange(count, dtype=np.int64) + 1)
    rows = 64 * np.arange(count, dtype=np.int64)
    return source, target, CopyBatch(target.ctypes.data + rows, source.ctypes.data + rows, sizes)


def right(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes of every copy were copied, and no other byte."""
    wanted = np.zeros_like(source)
    for i in range(len(source)):
        wanted[i, : 8 * (i + 1)] = source[i, : 8 * (i + 1)]
    return bool((wanted == target).all())


def test_a_batch_is_one_call() -> None:
    """The call gets addresses, sizes, one attribute (stream order) for all copies, and the stream's 64-bit handle."""
    library = Library()
    source, target, copies = make(5)
    Driver(library).copy_batch(STREAM, copies)
    assert right(source, target)
    assert library.seen == [("batch", 5, STREAM)]
    assert library.attributes == (1, 0, 0, 0, 0, 1), "stream order, no hints, overlap with compute"


def test_settled_sources_may_be_read_in_any_order() -> None:
    """Settled sources use CU_MEMCPY_SRC_ACCESS_ORDER_ANY (3 in cuda.h), as vLLM's loads do.

    A refused flag is dropped.
    """
    library = Library(flagged=1)
    source, target, copies = make(5)
    driver = Driver(library)
    driver.copy_batch(STREAM, copies, settled=True)
    assert right(source, target)
    assert library.attributes == (3, 0, 0, 0, 0, 0)
    library.flagged = 0
    driver.copy_batch(STREAM, copies, settled=False)
    assert library.attributes == (1, 0, 0, 0, 0, 1)


def test_one_copy_is_a_plain_one() -> None:
    """For a batch of one copy, the driver's call for a single copy is used."""
    library = Library()
    source, target, copies = make(1)
    Driver(library).copy_batch(STREAM, copies)
    assert right(source, target)
    assert library.seen == [("copy", 8, STREAM)]


def copied(driver: Driver, times: int = 2) -> list[str]:
    """Make three copies, `times` times. Return the lines of the log."""
    with capture_logs() as logs:
        for _ in range(times):
            source, target, copies = make(3)
            driver.copy_batch(STREAM, copies)
            assert right(source, target)
    return [entry["how"] for entry in logs if entry["event"] == "no_batches"]


@pytest.mark.parametrize(("exported", "known"), [(True, True), (False, True), (True, False)])
def test_the_driver_is_asked_for_batches(exported: bool, known: bool) -> None:
    """The batch call of CUDA 12.8 is looked up through the driver, and otherwise as a symbol of the library."""
    library = Library(exported=exported, known=known)
    assert copied(Driver(library)) == []
    assert library.seen == 2 * [("batch", 3, STREAM)]


ONE_BY_ONE = [("copy", 8 * (i + 1), STREAM) for i in range(3)]


def test_an_old_driver_reports_it_once() -> None:
    """Without batches the same bytes are copied one by one, and this is logged once."""
    library = Library(exported=False)
    with capture_logs() as logs:
        driver = Driver(library)
    assert [entry["event"] for entry in logs] == ["no_batches"]
    assert "CUDA 12.8" in logs[0]["how"]
    assert copied(driver) == []
    assert library.seen == 2 * ONE_BY_ONE


def test_a_driver_without_the_flag_gets_batches_without_it() -> None:
    """After a refusal of the flag for overlap, batches are made without the flag."""
    library = Library(flagged=1)
    driver = Driver(library)
    assert copied(driver, 3) == ["taken without overlap: CUDA error 1 with it"]
    assert library.seen == 4 * [("batch", 3, STREAM)]
    assert driver.batches.startswith("taken")


@pytest.mark.parametrize(("code", "batches"), [(801, 2), (1, 4)])
def test_copies_of_a_refused_batch_are_made_one_by_one(code: int, batches: int) -> None:
    """The copies of a refused batch are made one by one.

    After error 801 (not supported) batches are not tried again. After error 1 batches are tried again.
    """
    library = Library(code=code)
    driver = Driver(library)
    assert copied(driver) == [f"one by one: CUDA error {code}"], "said once"
    assert [one for one in library.seen if one[0] == "copy"] == 2 * ONE_BY_ONE
    assert sum(one[0] == "batch" for one in library.seen) == batches
    library.code = 0
    library.seen.clear()
    assert copied(driver, 1) == []
    assert library.seen == ([("batch", 3, STREAM)] if code == 1 else ONE_BY_ONE)


@pytest.mark.parametrize(("index", "batches"), [(3, True), (0, False)])
def test_no_batch_has_host_addresses_that_the_device_cannot_use(index: int, batches: bool) -> None:
    """If host addresses are not valid on the device (WSL2), a batch would destroy the context.

    So each copy is a call of its own.
    """
    library = Library(known=True)
    with capture_logs() as logs:
        cuda = CudaDevice(torch.device("cuda", index), Driver(library))
    source, target, copies = make(3)
    cuda.copy_batch(SimpleNamespace(cuda_stream=STREAM), copies, settled=True)  # type: ignore[arg-type]
    assert right(source, target)
    assert library.seen == ([("batch", 3, STREAM)] if batches else ONE_BY_ONE)
    assert cuda.reads_pool() is batches, "the mover `direct` is closed there, too"
    assert [entry["event"] for entry in logs] == ([] if batches else ["no_batches"])


@pytest.mark.parametrize("code", [2, 700, 719])
def test_an_error_that_may_stick_is_not_answered_with_more_calls(code: int) -> None:
    """After an error that may persist, no copy counts as queued, and the copies are not queued in another way."""
    library = Library(code=code)
    driver = Driver(library)
    with pytest.raises(TransferError, match=f"CUDA error {code}"):
        copied(driver)
    assert library.seen == [("batch", 3, STREAM)]
    library.code = 0
    assert copied(driver, 1) == []


def test_a_copy_that_is_refused_raises() -> None:
    """A refused copy raises an error, also when copies are made one by one after a refused batch."""
    with pytest.raises(TransferError, match="CUDA error 700"):
        copied(Driver(Library(code=801, single=700)))


def test_pinning_and_unpinning() -> None:
    """Pinned memory is portable (1) and mapped (2), so that kernels can use it.

    If the driver refuses, the call raises an error.
    """
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
    """The primary context becomes current. The driver's calls need a current context, and a new thread has none."""
    library = Library()
    Driver(library).enter(3)
    assert library.seen == [("current", 0x7000_0000_0003)]


def test_threads_ignore_captures() -> None:
    """The capture mode of the calling thread becomes the relaxed mode, which is 2 in cuda.h."""
    library = Library()
    Driver(library).ignore_captures()
    assert library.seen == [("mode", 2)]


def test_use_of_host_addresses_is_queried_by_its_attribute() -> None:
    """The queried attribute is 91, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM in cuda.h."""
    driver = Driver(Library())
    assert driver.host_pointers_are_device_pointers(3)
    assert not driver.host_pointers_are_device_pointers(0)


def test_streams_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver makes the streams: non-blocking (1), with higher priority, and one per name.

    So torch never hands out one of these streams to other code.
    """
    pool = itertools.cycle([SimpleNamespace(cuda_stream=0x100 + i) for i in range(32)])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: next(pool))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(device, "OwnStream", lambda handle, _: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(device, "_streams", {})
    library = Library()
    compute = next(pool)
    cuda = CudaDevice(torch.device("cuda", 0), Driver(library))
    lanes: list[Any] = [cuda.stream(name) for name in ("save-bus", "save-kernel", "load-bus", "load-kernel")]
    others = list(itertools.islice(pool, 64))
    handles = {one.cuda_stream for one in lanes}
    assert len(handles) == len(lanes)
    assert handles.isdisjoint(one.cuda_stream for one in (compute, *others))
    assert library.seen == 4 * [("stream", 1, -1)]
    again = CudaDevice(torch.device("cuda", 0), Driver(library))
    assert again.stream("save-bus") is lanes[0], "torch may remember it for longer than an engine lives"
    assert CudaDevice(torch.device("cuda", 1), Driver(library)).stream("save-bus") is not lanes[0]


def test_device_memory_is_not_of_the_callers_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is allocated in a new thread, because vLLM may release the memory pool of the calling thread."""
    pooled = threading.local()
    pooled.here = True
    made: list[bool] = []

    def allocate(*_: object, **__: object) -> torch.Tensor:
        made.append(getattr(pooled, "here", False))
        return torch.zeros(8)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch, "from_numpy", lambda _: SimpleNamespace(pin_memory=lambda: SimpleNamespace(to=allocate)))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    cuda = CudaDevice(torch.device("cuda", 3), Driver(Library()))
    cuda.allocate(8)
    cuda.upload(SimpleNamespace(), np.zeros(1))  # type: ignore[arg-type]
    assert made == [False, False]


def test_the_bus_id_is_written_as_the_kernel_writes_it() -> None:
    """The PCI bus id has the form that the folders in /sys have."""
    assert Driver(Library()).bus_id(1) == "0000:3b:00.1"


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_cores_are_parsed(text: str, cpus: set[int]) -> None:
    """Lists of cores are parsed in the format of the Linux kernel's files."""
    assert parse_cpus(text) == cpus


def test_a_library_without_a_function_is_no_driver() -> None:
    """`Driver` looks up a function that every driver has when it is made.

    A library without this function is refused.
    """
    with pytest.raises(AttributeError, match="cuMemcpyAsync"):
        Driver(SimpleNamespace())


@pytest.mark.parametrize(
    ("hip", "cause"), [(None, "NVIDIA's driver is not installed, or not for this process"), ("7.2", "ROCm 7.2")]
)
def test_device_without_a_driver_library_is_unsupported(
    hip: str | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing driver is refused. A ROCm build of torch is named, because its devices are also called "cuda"."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(driver_module, "LIBRARY", "libkvpipe-none.so.1")
    with pytest.raises(UnsupportedError, match=cause) as raised:
        CudaDevice(torch.device("cuda", 0))
    assert "libkvpipe-none.so.1: cannot open shared object file" in str(raised.value)
