"""`Driver` is tested with a library that is compiled from the prototypes of cuda.h.

The library checks every argument.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import triton

from kvpipe.testing.logged import capture_logs
from kvpipe.transfer import driver
from kvpipe.transfer.driver import Attributes, CopyBatch, Driver

HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
STREAM = "0x7f1234567890"
BATCH = f"batch of 50, order {{order}}, hints 0 0 0 0, attributes 1 from 0, on {STREAM}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library. If cuda.h declares a function in another way, the compiler reports an error."""
    made = tmp_path_factory.mktemp("fakecuda") / "libfakecuda.so"
    source = Path(__file__).with_name("fakecuda.c")
    command = ["gcc", "-shared", "-fPIC", "-Werror", f"-I{HEADERS}", str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return made


def called(library: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Make every call of `Driver`.

    Return the kinds of batches that were queued, and the arguments that arrived in the library.
    """
    monkeypatch.setenv("FAKE_LOG", str(log))
    made = Driver(ctypes.CDLL(str(library)))
    stream = made.make_stream()
    source = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    rows = np.arange(50) * 200
    for settled in (False, True):
        target = np.zeros_like(source)
        copies = CopyBatch(target.ctypes.data + rows, source.ctypes.data + rows, np.full(50, 200, np.int64))
        made.copy_batch(stream, copies, settled=settled)
        assert (target == source).all()
    target[:] = 0
    made.copy_batch(stream, CopyBatch(*(column[:1] for column in copies)))
    assert (target[:200] == source[:200]).all()
    assert not target[200:].any()
    made.register(0x7F0011112000, (1 << 33) + 4096)
    made.unregister(0x7F0011112000)
    made.enter(7)
    made.ignore_captures()
    assert [made.host_pointers_are_device_pointers(i) for i in (3, 4)] == [True, False]
    assert made.bus_id(5) == "0000:4e:00.5"
    return made.batches, log.read_text().splitlines()


def test_every_argument_arrives_as_the_header_declares_it(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles and addresses arrive with 64 bits, flags with their values, and a batch has one attribute."""
    how, seen = called(library, tmp_path / "log", monkeypatch)
    assert how == "taken"
    assert seen == [
        "find cuMemcpyBatchAsync of 12080, flags 0",
        "stream non-blocking -1",
        BATCH.format(order="stream, overlap"),
        BATCH.format(order="any, overlap"),
        f"copy 200 on {STREAM}",
        f"register 0x7f0011112000 {(1 << 33) + 4096} portable mapped",
        "unregister 0x7f0011112000",
        "retain 7",
        "current 0x7fabcdef0123",
        "capture mode relaxed",
    ]


def test_a_refused_flag_is_left_out(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of batch is tried once with the flag. After the refusal the batch is queued without the flag."""
    monkeypatch.setenv("FAKE_REFUSE_FLAGS", "1")
    with capture_logs():
        how, seen = called(library, tmp_path / "log", monkeypatch)
    assert how.startswith("taken without overlap")
    orders = ["stream, overlap", "stream", "any, overlap", "any"]
    assert seen[2:6] == [BATCH.format(order=order) for order in orders]


def test_structures_and_errors_are_those_of_the_header(library: Path) -> None:
    """Sizes and offsets of structures, and numbers of errors, equal those that the C compiler computes."""
    made = ctypes.CDLL(str(library))
    fields = (Attributes.source_access_order, Attributes.source_hint, Attributes.target_hint, Attributes.flags)
    layout = [ctypes.sizeof(Attributes), *(field.offset for field in fields)]
    wanted = [*layout, ctypes.sizeof(driver._Location), ctypes.sizeof(ctypes.c_int), ctypes.sizeof(ctypes.c_void_p)]
    assert list((ctypes.c_longlong * len(wanted)).in_dll(made, "LAYOUT")) == wanted
    assert set((ctypes.c_longlong * 2).in_dll(made, "REFUSALS")) == driver._REFUSALS
