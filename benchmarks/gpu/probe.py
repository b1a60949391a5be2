"""The first measurements of a GPU, in 1 to 2 minutes: `python -m benchmarks.gpu.probe [--simulated]`.

The probe answers these questions. Can host memory be pinned, and how long does pinning take? Does the driver accept
every batch of copies, and how fast are the copies? May a helper thread call CUDA while a graph is captured? Which
streams are distinct, and which streams delay each other? If pinning or batches are refused, the probe prints the
refusal and ends with status 3, because later figures would measure a fallback. After each question, all results so far
are written.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final

import torch

from benchmarks.gpu import bare  # noqa: F401  (first: it finds the packages that are missing)
from benchmarks.gpu.machine import (
    COPY_BYTES,
    HOWS,
    LAG_US_MAX,
    OURS,
    OWN_STREAMS,
    PIECE_BYTES,
    PIECES,
    PINNED_MS_MAX,
    PRIORITIES,
    TORCH_STREAMS,
    Batch,
    Machine,
    Real,
    first_line,
)
from benchmarks.report import Figure, tabulate, write
from kvpipe.errors import TransferError
from kvpipe.transfer.cuda import POLL_S_MAX

__all__ = ("COPY_BYTES", "HOWS", "OURS", "REFUSED", "Batch", "Machine", "Simulated", "ask", "main")

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results"
REFUSED: Final = 3


class Simulated:
    """A simulated GPU, which tests the probe itself. The simulated times are meaningless."""

    def facts(self) -> dict[str, str]:
        """Return versions and settings."""
        return {"gpu": "none: simulated"}

    def pin(self) -> float:
        """Pin the next piece, and return the time in milliseconds."""
        return 1.0

    def pin_across(self) -> None:
        """Pin memory that overlaps two pinned pieces."""
        raise TransferError("CUDA error 712")

    def launches(self, *, pinning: bool) -> float:
        """Return the longest time of a small kernel launch, in milliseconds."""
        return 3.0 if pinning else 0.1

    def batch(self, copy_bytes: int, how: tuple[int, int], *, loading: bool) -> Batch:  # noqa: ARG002
        """Copy scattered pages in one batch."""
        return Batch(1.0, 1.0, "taken")

    def during_capture(self, *, enters: bool) -> list[str]:
        """Return the CUDA calls that failed during a capture, with the reasons."""
        return [] if enters else ["query: operation not permitted when stream is capturing"]

    def blocking_lag_us(self) -> float:
        """Return how many microseconds later a sleeping thread notices an event than a polling thread."""
        return 30.0

    def torch_streams(self) -> int:
        """Return how many different streams torch has."""
        return OWN_STREAMS

    def held_up(self, priority: int) -> int:  # noqa: ARG002
        """Return how many streams delay the compute stream while they wait."""
        return 0


class RefusedError(Exception):
    """The device refuses a call that all later measurements need."""


Question = Callable[[Machine, dict[str, str]], Iterator[Figure]]
"""A question yields figures, and may add facts to the given dict. If a question raises, the error is printed and the
next question is asked. After `RefusedError` no question is asked."""


def pinning(machine: Machine, _: dict[str, str]) -> Iterator[Figure]:
    """Pin adjacent pieces of memory. The driver must refuse a piece that overlaps two pinned pieces."""
    try:
        took = [machine.pin() for _ in range(PIECES)]
    except RuntimeError as error:  # raised by the driver or by torch
        raise RefusedError(f"host memory cannot be pinned ({first_line(error)})") from error
    yield Figure(
        f"pinning {PIECE_BYTES >> 20} MiB", median(took), PINNED_MS_MAX, "ms", ", ".join(f"{ms:.1f}" for ms in took)
    )
    try:
        machine.pin_across()
        message = "accepted"
    except TransferError as error:
        message = f"refused: {error}"
    yield Figure("pinning what is pinned", float(message == "accepted"), 0, "accepted", message)


def launches(machine: Machine, _: dict[str, str]) -> Iterator[Figure]:
    """Measure the longest kernel launch, without and with a thread that pins memory meanwhile."""
    for pinning, title in ((False, "beside nothing"), (True, "while memory is pinned")):
        message = f"pieces of {PIECE_BYTES >> 20} MiB" if pinning else ""
        yield Figure(f"longest launch {title}", machine.launches(pinning=pinning), PINNED_MS_MAX, "ms", message)


def batches(machine: Machine, facts: dict[str, str]) -> Iterator[Figure]:
    """Measure batches with every access order and flag, in each direction, with pages of three sizes."""
    ours: dict[str, None] = {}
    for copy_bytes in COPY_BYTES:
        for loading in (False, True):
            for name, how in HOWS.items():
                title = f"{'load' if loading else 'save'} by {copy_bytes >> 10} KiB, {name}"
                try:
                    got = machine.batch(copy_bytes, how, loading=loading)
                except RuntimeError as error:
                    raise RefusedError(f"a batch of copies fails ({title}: {first_line(error)})") from error
                if how == OURS[loading]:
                    ours[got.how] = None
                    facts["batches"] = ", ".join(ours)
                    if got.how.startswith("one by one"):
                        raise RefusedError(f"batches of copies are queued {got.how}")
                yield Figure(
                    title, got.gb_per_s, 0, "GB/s", f"{got.how}; {got.host_us:.0f} us on the host", at_least=True
                )


def completions(machine: Machine, facts: dict[str, str]) -> Iterator[Figure]:
    """Measure the delay of a thread that sleeps until an event fires, and derive what `completions=auto` selects."""
    lag_us = machine.blocking_lag_us()
    facts["completions"] = "block" if lag_us <= POLL_S_MAX * 1e6 else "poll"
    message = f"completions=auto means {facts['completions']} here"
    yield Figure("blocking wait, later than polling", lag_us, LAG_US_MAX, "us", message)


def streams(machine: Machine, _: dict[str, str]) -> Iterator[Figure]:
    """Count the distinct streams of torch, and the streams whose waits delay the compute stream."""
    message = f"of {TORCH_STREAMS} that torch was asked for"
    yield Figure("streams of torch's that differ", machine.torch_streams(), 0, "streams", message, at_least=True)
    for priority in PRIORITIES:
        limit = 0 if priority else OWN_STREAMS
        message = f"of {OWN_STREAMS}; compute is the default stream"
        title = f"streams of priority {priority} whose wait holds compute up"
        yield Figure(title, machine.held_up(priority), limit, "streams", message)


def captures(machine: Machine, _: dict[str, str], *, enters: bool = True) -> Iterator[Figure]:
    """Call CUDA on a helper thread during a graph's capture. If `enters`, the thread has called `enter_thread`."""
    failed = machine.during_capture(enters=enters)
    title = f"calls that fail during a capture, thread {'' if enters else 'not '}entered"
    yield Figure(title, len(failed), 0 if enters else len(failed), "calls", "; ".join(failed) or "all are fine")


def spoilt_captures(machine: Machine, facts: dict[str, str]) -> Iterator[Figure]:
    """Repeat `captures` with a thread that has not called `enter_thread`, for comparison."""
    yield from captures(machine, facts, enters=False)


QUESTIONS: Final[tuple[Question, ...]] = (pinning, launches, batches, completions, streams, captures, spoilt_captures)
"""The questions in order. The last question may break the CUDA context, so no other question follows."""


def ask(machine: Machine, path: Path) -> int:
    """Ask all questions, and return the exit status.

    After each question, print a table of its figures and write all results so far as JSON.
    """
    figures: list[Figure] = []
    troubles: list[str] = []
    refused = ""
    facts = machine.facts()
    print(*(f"{name}: {message}" for name, message in facts.items()), sep="\n")
    for question in QUESTIONS:
        name, before = question.__name__.replace("_", " "), len(figures)
        try:
            for figure in question(machine, facts):
                figures.append(figure)  # noqa: PERF402  (the figures before an error are kept)
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
    """Run the probe from the command line, and return the exit status."""
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
