"""The first questions to a GPU, in a minute or two: `python -m benchmarks.gpu.probe [--simulated]`.

Is host memory pinned, and what does that cost; is every batch of copies taken, and how fast; may a helper thread work
while a CUDA graph is captured; which streams are others, and which hold each other up. Where pinning or batches are
refused every later figure would be of a fallback: it prints that, and the exit status is 3. What is known is written
after each question.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from benchmarks.gpu import bare  # noqa: F401  (first: it stands in for what a bare machine lacks)
from benchmarks.report import Figure, tabulate, write
from kvpipe.errors import TransferError
from kvpipe.transfer.device import CopyBatch, CudaDevice
from kvpipe.transfer.driver import Driver

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results"
REFUSED: Final = 3
PIECE_BYTES, PIECES = 256 << 20, 4
BATCH_BYTES, COPIES_MAX, REPEATS = 128 << 20, 4096, 5
COPY_BYTES: Final = (8 << 10, 64 << 10, 1 << 20)
HOWS: Final = {"stream order, overlap": (1, 1), "stream order": (1, 0), "any order": (3, 0)}
"""``srcAccessOrder`` and ``flags`` of a batch's attributes, as cuda.h numbers them."""
OURS: Final = (1, 1)
"""What kvpipe asks for; the driver's own wrapper goes on without the flag where that is refused."""
CALL_BYTES: Final = 64 << 20  # pinned during a capture
TORCH_STREAMS, OWN_STREAMS = 40, 32
SLEEP_CYCLES, HELD_S_MIN = 15_000_000, 0.004  # about 10 ms, and what counts as having waited for that
PRIORITIES: Final = (0, -1)
WAIT_S: Final = 20.0


class Batch(NamedTuple):
    """What became of one batch of copies."""

    gb_per_s: float
    host_us: float
    how: str  # as in `Driver.batches`


class Machine(Protocol):
    """What is asked."""

    def facts(self) -> dict[str, str]:
        """Return versions and settings."""

    def pin(self) -> float:
        """Pin the next piece; return the milliseconds. Raises `TransferError`."""

    def pin_across(self) -> None:
        """Pin what overlaps two pieces that are pinned. Raises `TransferError`, as it should."""

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:
        """Copy scattered pages. Raises `TransferError`."""

    def during_capture(self, *, enters: bool) -> list[str]:
        """Capture a graph while a helper thread, which has entered or not, works; return what failed, and why."""

    def torch_streams(self) -> int:
        """Ask torch for `TORCH_STREAMS` streams; return how many others they are."""

    def held_up(self, priority: int) -> int:
        """Of `OWN_STREAMS` streams, return how many hold compute up while they wait for another."""


class Real:
    """A CUDA device."""

    def __init__(self) -> None:
        """Map memory as the pool does: private, with huge pages, kept from children."""
        self._where = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self._where)
        self._driver, self._device = Driver(), CudaDevice(self._where)
        self._pool = self._mapped(PIECE_BYTES * PIECES)
        self._base, self._pinned = self._pool.data_ptr(), 0
        self._there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=self._where)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @staticmethod
    def _mapped(size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def facts(self) -> dict[str, str]:
        """See `Machine.facts`."""
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
        """See `Machine.pin`."""
        began = time.perf_counter()
        self._device.register(self._base + self._pinned, PIECE_BYTES)
        self._pinned += PIECE_BYTES
        return (time.perf_counter() - began) * 1e3

    def pin_across(self) -> None:
        """See `Machine.pin_across`."""
        self._device.register(self._base + PIECE_BYTES // 2, PIECE_BYTES)

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:
        """See `Machine.batch`. The best of a few: the question is what the device can do."""
        count = min(COPIES_MAX, BATCH_BYTES // copy_bytes)
        places = np.random.default_rng(0).permutation(count).astype(np.int64)
        host, there = self._base + np.arange(count) * copy_bytes, self._there.data_ptr() + places * copy_bytes
        copies = CopyBatch(there, host, np.full(count, copy_bytes)) if loading else CopyBatch(
            host, there, np.full(count, copy_bytes)
        )  # fmt: skip
        driver = Driver()
        driver.how.source_access_order, driver.how.flags = how
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
        """See `Machine.during_capture`."""
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

    def torch_streams(self) -> int:
        """See `Machine.torch_streams`."""
        made = [torch.cuda.Stream() for _ in range(TORCH_STREAMS)]  # type: ignore[no-untyped-call]
        return len({stream.cuda_stream for stream in made})

    def held_up(self, priority: int) -> int:
        """See `Machine.held_up`. Compute is the legacy default stream, on which vLLM's forwards run."""
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
            work()  # nothing is loaded or allocated while the clock runs
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


class Simulated:
    """Answers as a GPU should, to see that the questions can be asked. The times mean nothing."""

    def facts(self) -> dict[str, str]:
        """See `Machine.facts`."""
        return {"gpu": "none: simulated"}

    def pin(self) -> float:
        """See `Machine.pin`."""
        return 1.0

    def pin_across(self) -> None:
        """See `Machine.pin_across`."""
        raise TransferError("CUDA error 712")

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:  # noqa: ARG002
        """See `Machine.batch`."""
        return Batch(1.0, 1.0, "taken")

    def during_capture(self, *, enters: bool) -> list[str]:
        """See `Machine.during_capture`."""
        return [] if enters else ["query: operation not permitted when stream is capturing"]

    def torch_streams(self) -> int:
        """See `Machine.torch_streams`."""
        return OWN_STREAMS

    def held_up(self, priority: int) -> int:  # noqa: ARG002
        """See `Machine.held_up`."""
        return 0


class RefusedError(Exception):
    """What the device refuses, and without which nothing is worth measuring."""


Question = Callable[[Machine, dict[str, str]], Iterator[Figure]]
"""May add to the facts. What it raises is printed, and the next is asked, but for `RefusedError`."""


def pinning(machine: Machine, _: dict[str, str]) -> Iterator[Figure]:
    """Pin pieces beside each other; a piece across two must be refused."""
    try:
        took = [machine.pin() for _ in range(PIECES)]
    except RuntimeError as error:  # the driver's, or torch's
        raise RefusedError(f"host memory cannot be pinned ({first_line(error)})") from error
    yield Figure(f"pinning {PIECE_BYTES >> 20} MiB", median(took), 100, "ms", ", ".join(f"{ms:.1f}" for ms in took))
    try:
        machine.pin_across()
        message = "accepted"
    except TransferError as error:
        message = f"refused: {error}"
    yield Figure("pinning what is pinned", float(message == "accepted"), 0, "accepted", message)


def batches(machine: Machine, facts: dict[str, str]) -> Iterator[Figure]:
    """Ask for every order and flag, each way, by pages of three sizes."""
    ours: dict[str, None] = {}
    for copy_bytes in COPY_BYTES:
        for loading in (False, True):
            for name, how in HOWS.items():
                title = f"{'load' if loading else 'save'} by {copy_bytes >> 10} KiB, {name}"
                try:
                    got = machine.batch(copy_bytes, how, loading=loading)
                except RuntimeError as error:
                    raise RefusedError(f"a batch of copies fails ({title}: {first_line(error)})") from error
                if how == OURS:
                    ours[got.how] = None
                    facts["batches"] = ", ".join(ours)
                    if got.how.startswith("one by one"):
                        raise RefusedError(f"batches of copies are queued {got.how}")
                yield Figure(
                    title, got.gb_per_s, 0, "GB/s", f"{got.how}; {got.host_us:.0f} us on the host", at_least=True
                )


def streams(machine: Machine, _: dict[str, str]) -> Iterator[Figure]:
    """Whose streams they are, and which wait for each other."""
    message = f"of {TORCH_STREAMS} that torch was asked for"
    yield Figure("streams of torch's that differ", machine.torch_streams(), 0, "streams", message, at_least=True)
    for priority in PRIORITIES:
        limit = 0 if priority else OWN_STREAMS
        message = f"of {OWN_STREAMS}; compute is the default stream"
        title = f"streams of priority {priority} whose wait holds compute up"
        yield Figure(title, machine.held_up(priority), limit, "streams", message)


def captures(machine: Machine, _: dict[str, str], *, enters: bool = True) -> Iterator[Figure]:
    """A helper at work during a capture: its thread has entered, as kvpipe's do."""
    failed = machine.during_capture(enters=enters)
    title = f"calls that fail during a capture, thread {'' if enters else 'not '}entered"
    yield Figure(title, len(failed), 0 if enters else len(failed), "calls", "; ".join(failed) or "all are fine")


def spoilt_captures(machine: Machine, facts: dict[str, str]) -> Iterator[Figure]:
    """The same without, to compare."""
    yield from captures(machine, facts, enters=False)


QUESTIONS: Final[tuple[Question, ...]] = (pinning, batches, streams, captures, spoilt_captures)
"""The last may spoil the context: nothing is asked after it, and all the rest is written before."""


def first_line(error: Exception) -> str:
    """Return the first line of `error`: torch's errors go on with advice."""
    return (str(error).splitlines() or [repr(error)])[0]


def ask(machine: Machine, path: Path) -> int:
    """Ask everything; after each question show a table and write JSON of all so far. Return the exit status."""
    figures: list[Figure] = []
    troubles: list[str] = []
    refused = ""
    facts = machine.facts()
    print(*(f"{name}: {message}" for name, message in facts.items()), sep="\n")
    for question in QUESTIONS:
        name, before = question.__name__.replace("_", " "), len(figures)
        try:
            for figure in question(machine, facts):
                figures.append(figure)  # noqa: PERF402  (those before one that fails are kept)
        except RefusedError as error:
            refused = str(error)
        except Exception as error:  # noqa: BLE001  (the other answers are worth having)
            traceback.print_exc()
            troubles.append(f"{name}: {first_line(error)}")
        finally:
            tabulate(f"Questions to the GPU: {name}", figures[before:])
            write(figures, path, facts=facts, refused=refused, troubles=troubles)
        if refused:
            print(f"kvpipe: {refused}; every later figure would be of a fallback, so nothing more is measured")
            return REFUSED
    print(*troubles, sep="\n")
    return int(bool(troubles) or any(not figure.ok for figure in figures))


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.probe", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="ask what stands for a GPU, to see that it works")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu-probe.json", help="where answers go")
    options = parser.parse_args(arguments)
    if not options.simulated and not torch.cuda.is_available():
        print(
            "kvpipe: no GPU is here (torch.cuda.is_available() is False); --simulated asks without one", file=sys.stderr
        )
        return 2
    return ask(Simulated() if options.simulated else Real(), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
