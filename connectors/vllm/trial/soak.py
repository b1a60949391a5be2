"""Runs many requests of all kinds through a real engine and samples the process's memory: `make soak`.

The same requests also run through the same engine without kvpipe, in a separate process. vLLM causes the growth of that
process. Memory is read after a garbage collection, and its slope is computed after a warm-up.

oneDNN keeps code for each of the last 1,024 shapes, 100 KB per shape. With thousands of requests of mixed lengths, this
growth hides all other growth. So oneDNN is configured to keep code for few shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.worker.side import WorkerSide

REQUESTS: Final = 20_000
CROWD: Final = 10
SAMPLES: Final = 100
WARM_SHARE: Final = 0.4  # share of the requests that are warm-up, before the slope is computed
SLOPE_BYTES_MAX: Final = 512  # resident memory per request, beyond the growth without kvpipe
SLOPE_OBJECTS_MAX: Final = 0.1  # objects of kvpipe's classes per request
PROMPT_TOKENS_MAX, ANSWER_TOKENS_MAX, DOCUMENTS = 400, 40, 24
ABORTS: Final = 0.04
ENGINE: Final[dict[str, Any]] = {"num_gpu_blocks_override": 28, "max_model_len": 512, "max_num_batched_tokens": 512}
KVPIPE: Final[dict[str, Any]] = {
    "pool_bytes_max": "16MiB", "chunk_tokens": 64, "log_level": "error", "prefault": "start",
}  # fmt: skip
PLOT_COLUMNS, PLOT_ROWS, TABLE_ROWS = 72, 12, 10
MIB: Final = 1 << 20


@dataclass
class MemorySample:
    """The resources that the process and kvpipe hold after a number of requests."""

    requests: int = 0
    seconds: float = 0.0
    resident_bytes: int = 0
    malloc_bytes: int = 0  # bytes in use of C's allocator
    python_blocks: int = 0  # blocks in use of Python's allocator
    objects: int = 0  # objects of kvpipe's classes
    threads: int = 0
    descriptors: int = 0
    preemptions: int = 0
    loaded_tokens: int = 0
    slots_used: int = 0
    leases: int = 0
    tracked: int = 0
    jobs: int = 0
    faults: int = 0


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def malloc_bytes() -> int:
    """Return the number of bytes that C's allocator has allocated, or 0 if the allocator does not report it."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _Mallinfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def held_resources() -> MemorySample:
    """Return the resources that this process holds, after a garbage collection."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return MemorySample(
        resident_bytes=resident,
        malloc_bytes=malloc_bytes(),
        python_blocks=sys.getallocatedblocks(),
        objects=sum(str(type(one).__module__).startswith("kvpipe") for one in gc.get_objects()),
        threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
    )


class Player:
    """Sends requests of all kinds to one engine: with new and repeated, long and short prompts.

    Some requests are aborted.
    """

    def __init__(self, engine: Engine) -> None:
        """Make the documents with which prompts begin."""
        self.engine, self._rng = engine, random.Random(0)  # noqa: S311
        self._documents = [self._tokens(self._rng.randrange(20, PROMPT_TOKENS_MAX)) for _ in range(DOCUMENTS)]
        self._live: list[str] = []
        self.done = self.preempted = 0
        self._began = time.monotonic()

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB) for _ in range(count)]

    def _add(self) -> None:
        rng = self._rng
        prompt: list[int] = []
        if rng.random() < 0.7:  # noqa: PLR2004
            document = rng.choice(self._documents)
            prompt = document[: rng.randrange(1, len(document) + 1)]
        prompt = (prompt + self._tokens(rng.randrange(1, 120)))[:PROMPT_TOKENS_MAX]
        salt = rng.choice([None, None, None, "a", "b"])
        self._live.append(self.engine.add(prompt, rng.randrange(1, ANSWER_TOKENS_MAX), salt=salt))

    def play(self, requests: int) -> None:
        """Run until `requests` more requests have ended."""
        stop = self.done + requests
        while self.done < stop:
            while len(self._live) < min(CROWD, stop - self.done):
                self._add()
            for output in self.engine.step():
                self._live.remove(output.request_id)
                self.done += 1
            if self._live and self._rng.random() < ABORTS:
                self.engine.abort(self._live.pop(self._rng.randrange(len(self._live))))
                self.done += 1
        self.preempted += sum(self.engine.preemptions.values())
        self.engine.preemptions.clear()

    def sample(self) -> MemorySample:
        """Return a sample of the resources in use, and check the catalog when no job is in flight."""
        with_kvpipe = self.engine.scheduler.connector is not None
        if with_kvpipe:
            self.engine.settle()  # jobs in flight would use memory
        taken = held_resources()
        taken.requests, taken.preemptions = self.done, self.preempted
        taken.seconds = round(time.monotonic() - self._began, 1)
        if not with_kvpipe:
            return taken
        side = self.engine.connector.scheduler
        assert side is not None  # noqa: S101
        check_integrity(side.catalog)
        stats = self.engine.connector.stats()
        taken.slots_used, taken.leases = stats["slots_used"], stats["leases"]
        taken.tracked, taken.jobs = stats["requests"], stats["jobs_in_flight"] + stats["orders_in_flight"]
        taken.loaded_tokens = stats.get("tokens_loaded", 0)
        worker = self.engine.worker_connector.worker
        assert isinstance(worker, WorkerSide)  # noqa: S101
        taken.faults = sum(side.counters.faults.values()) + sum(worker.counters.faults.values())
        return taken


@contextlib.contextmanager
def player(kvpipe: dict[str, Any] | None, *, disk_bytes_max: str = "24MiB") -> Iterator[Player]:
    """Make an engine with kvpipe and a disk tier that becomes full during the run, or an engine without kvpipe."""
    with tempfile.TemporaryDirectory(prefix="kvpipe-soak-") as folder:
        config = None
        if kvpipe is not None:
            tiers = [{"kind": "disk", "path": folder, "bytes_max": disk_bytes_max}]
            config = KVPIPE | {"tiers": tiers, "state_dir": folder} | kvpipe
        engine = Engine(str(make_model("soak")), kvpipe=config, **ENGINE)
        try:
            yield Player(engine)
        finally:
            engine.close()


def soak(
    requests: int, kvpipe: dict[str, Any] | None, on_sample: Callable[[MemorySample], object]
) -> list[MemorySample]:
    """Run `requests` requests and return the samples. `on_sample` is called with each new sample."""
    samples = []
    with player(kvpipe) as one:
        per_sample = max(1, requests // SAMPLES)
        while one.done < requests:
            one.play(min(per_sample, requests - one.done))
            samples.append(one.sample())
            on_sample(samples[-1])
    return samples


# ---- reports --------------------------------------------------------------------------------------------------------


def slope(samples: Sequence[MemorySample], what: str = "resident_bytes") -> float:
    """Return the growth per request after the warm-up: the median slope of all pairs of samples (Theil and Sen)."""
    warm = samples[int(len(samples) * WARM_SHARE) :]
    pairs = [
        (getattr(b, what) - getattr(a, what)) / (b.requests - a.requests) for a, b in itertools.combinations(warm, 2)
    ]
    return median(pairs) if pairs else 0.0


def memory_verdict(plain: Sequence[MemorySample], piped: Sequence[MemorySample]) -> tuple[bool, str]:
    """Return whether memory stays flat, and a sentence with the result."""
    mine, theirs = slope(piped), slope(plain)
    objects = slope(piped, "objects")
    flat = mine - max(0.0, theirs) <= SLOPE_BYTES_MAX and objects <= SLOPE_OBJECTS_MAX
    word = "flat" if flat else "NOT flat"
    first, last = piped[int(len(piped) * WARM_SHARE)], piped[-1]
    message = (
        f"After a warm-up of {first.requests} of {last.requests} requests memory is {word}: {mine:+.0f} bytes per "
        f"request with kvpipe, {theirs:+.0f} without (limit: {SLOPE_BYTES_MAX} more); of kvpipe's objects there were "
        f"{first.objects} then, {last.objects} at the end ({objects:+.2f} per request), threads "
        f"{first.threads} and {last.threads}, files {first.descriptors} and {last.descriptors}."
    )
    return flat, message


def sampled_rows(title: str, samples: Sequence[MemorySample]) -> Table:
    """Return some of the samples, including the first and the last sample."""
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    heads = (
        "requests", "seconds", "resident MiB", "malloc MiB", "python blocks", "kvpipe objects", "threads", "files",
        "preempted", "loaded tokens", "slots", "leases", "tracked", "jobs", "faults",
    )  # fmt: skip
    for head in heads:
        made.add_column(head, justify="right")
    picked = sorted({round(i * (len(samples) - 1) / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)})
    for one in (samples[i] for i in picked):
        cells = [getattr(one, field.name) for field in fields(one)]
        cells[2:4] = [f"{size / MIB:.1f}" for size in cells[2:4]]
        made.add_row(*map(str, cells))
    return made


def plot(series: Mapping[str, Sequence[MemorySample]]) -> str:
    """Draw resident memory over requests. Each series is drawn with the last letter of its name."""
    least = min(one.resident_bytes for samples in series.values() for one in samples)
    most = max(one.resident_bytes for samples in series.values() for one in samples)
    last = max(samples[-1].requests for samples in series.values())
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    for name, samples in series.items():
        for one in samples:
            column = min(PLOT_COLUMNS - 1, one.requests * PLOT_COLUMNS // (last + 1))
            row = (one.resident_bytes - least) * (PLOT_ROWS - 1) // max(1, most - least)
            grid[PLOT_ROWS - 1 - row][column] = name[-1]
    lines = ["".join(row).rstrip() for row in grid]
    labels = [f"{most / MIB:8.1f} |", *["         |"] * (PLOT_ROWS - 2), f"{least / MIB:8.1f} |"]
    legend = ", ".join(f"{name[-1]} {name}" for name in series)
    body = "\n".join(label + line for label, line in zip(labels, lines, strict=True))
    return f"resident MiB ({legend})\n{body}\n         +{'-' * PLOT_COLUMNS}\n          0 … {last} requests"


def main() -> int:
    """Run both engines, each in its own process. Print and store the samples. Return 1 if memory grows, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["plain", "piped"], help="only this engine; samples on stdout")
    parser.add_argument("--kvpipe", type=json.loads, default={}, help="keys of the configuration")
    given = parser.parse_args()
    if given.one:
        config = given.kvpipe if given.one == "piped" else None
        soak(given.requests, config, lambda one: sys.stdout.write(f"{MARK}{json.dumps(asdict(one))}\n") and None)
        return 0
    series = {name: _in_a_process(name, given.requests, given.kvpipe) for name in ("plain", "piped")}
    flat, message = memory_verdict(series["plain"], series["piped"])
    console = Console(width=150)
    for name, samples in series.items():
        console.print(sampled_rows({"plain": "without kvpipe", "piped": "with kvpipe"}[name], samples))
    console.print(plot(series), markup=False, highlight=False)
    console.print(message, highlight=False)
    if given.json is not None:
        slopes = {name: {what: round(slope(samples, what), 3) for what in ("resident_bytes", "malloc_bytes",
                  "python_blocks", "objects")} for name, samples in series.items()}  # fmt: skip
        rows = {name: [asdict(one) for one in samples] for name, samples in series.items()}
        kept = {"requests": given.requests, "flat": flat, "says": message, "slopes": slopes, "samples": rows}
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if flat else 1


MARK: Final = "soak: "
FEW_SHAPES: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}


def _in_a_process(name: str, requests: int, kvpipe: dict[str, Any]) -> list[MemorySample]:
    command = [sys.executable, "-m", "kvpipe.connectors.vllm.trial.soak", "--one", name, "--requests", str(requests),
               "--kvpipe", json.dumps(kvpipe)]  # fmt: skip
    samples = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | FEW_SHAPES) as child:  # noqa: S603
        assert child.stdout is not None  # noqa: S101
        for line in child.stdout:
            if MARK in line:
                samples.append(MemorySample(**json.loads(line.partition(MARK)[2])))
                sys.stderr.write(f"\r{name}: {samples[-1].requests} of {requests} requests ")
    sys.stderr.write("\n")
    if child.returncode or not samples:
        message = f"the engine of {name!r} ended with {child.returncode}"
        raise RuntimeError(message)
    return samples


if __name__ == "__main__":
    sys.exit(main())
