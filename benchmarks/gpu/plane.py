"""Measures how much of the bus's bandwidth copies use, and how much copies slow down the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.rig import CHUNK_TOKENS, LLAMA_8B, LLAMA_70B_TP4, PAGES, Gpu, Rig, Shape
from benchmarks.report import Figure
from kvpipe.protocol.messages import Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.movers import Mover

GB = 1e9
REPEATS = 7
STEPS = 8
MOVERS = (None, Mover.DMA, Mover.STAGED, Mover.DIRECT)


class Limit:
    """The bus's limits in GB/s, measured with one large pinned copy: in each direction alone, and in both at once."""

    def __init__(self, gpu: Gpu, size: int = 512 << 20) -> None:
        """Measure the limits with copies of `size` bytes."""
        self.gpu, self.size = gpu, size
        self.host = [gpu.pinned(size).fill_(7) for _ in Direction]
        self.there = [torch.full((size,), 9, dtype=torch.uint8, device=gpu.where) for _ in Direction]
        self.streams = [None if gpu.simulated else torch.cuda.Stream() for _ in Direction]  # type: ignore[no-untyped-call]
        self.one = {d: size / GB / (gpu.median_ms(lambda d=d: self.run(d), REPEATS) / 1e3) for d in Direction}  # type: ignore[misc]
        self.both = 2 * size / GB / (gpu.median_ms(lambda: self.run(*Direction), REPEATS) / 1e3)

    def run(self, *directions: Direction) -> tuple[Any, Any]:
        """Copy in each of `directions`, on separate streams, and return the marks before and after the copies."""
        self.gpu.sync()
        begin = self.gpu.mark()
        for d in directions:
            to, source = (self.host, self.there) if d is Direction.SAVE else (self.there, self.host)
            with self._on(d):
                to[d].copy_(source[d], non_blocking=True)
        for d in directions:
            if not self.gpu.simulated:
                torch.cuda.current_stream().wait_stream(self.streams[d])  # type: ignore[arg-type]
        return begin, self.gpu.mark()

    @contextmanager
    def _on(self, direction: Direction) -> Iterator[None]:
        stream = self.streams[direction]
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield


def throughput(gpu: Gpu, limit: Limit, shape: Shape, chunks: int, asked: float) -> Iterator[Figure]:
    """Measure copies of whole chunks in scattered blocks with every mover, as shares of the bus's limit.

    First each direction is measured alone, and then both directions at once.
    """
    for mover in MOVERS:
        rig = Rig(gpu, shape, chunks, mover)
        rig.wait_pinned()
        yield from _one_mover(rig, limit, mover.value if mover else "auto", asked)
        if mover is None:
            yield from _calibrated(rig)
        assert rig.failed() == 0, "a copy failed"
        rig.close()


def _one_mover(rig: Rig, limit: Limit, name: str, asked: float) -> Iterator[Figure]:
    size = rig.chunks * rig.shape.chunk_bytes / GB

    def rate(*plans: CopyPlan) -> float:
        return len(plans) * size / (rig.gpu.median_ms(lambda: rig.copy(*plans), REPEATS) / 1e3)

    for direction in Direction:
        plan = rig.chunk_plan(direction)
        got, most = rate(plan), limit.one[direction]
        title = f"{rig.shape.name}: {direction.name.lower()}, {name}"
        note = f"{plan.mover}: {got:.1f} of {most:.1f} GB/s"
        yield Figure(title, got / most, asked, "x limit", note, at_least=True)
    plans = [rig.chunk_plan(Direction.SAVE), rig.chunk_plan(Direction.LOAD, first=rig.chunks)]
    got = rate(*plans)
    note = f"{plans[0].mover}, {plans[1].mover}: {got:.1f} of {limit.both:.1f} GB/s"
    title = f"{rig.shape.name}: both ways at once, {name}"
    yield Figure(title, got / limit.both, 0.8, "x limit", note, at_least=True)


def _calibrated(rig: Rig) -> Iterator[Figure]:
    yield Figure(f"{rig.shape.name}: start-up", rig.attach_s, 10, "s", "pins a piece, compiles kernels, calibrates")
    for direction, ways in rig.engine.costs.items():
        for mover, way in ways.items():
            landed, read = way.landed, way.read
            title = f"{rig.shape.name}: calibrated {direction.name.lower()}, {mover.value}"
            note = f"{landed.fixed_us:.0f} us a batch, {landed.copy_us:.2f} us a copy"
            if read != landed:
                note += f"; read {read.fixed_us:.0f} us, {read.copy_us:.2f} us, {read.gb_per_s:.0f} GB/s"
            yield Figure(title, landed.gb_per_s, 0, "GB/s", note, at_least=True)


class Forward:
    """The matrix products of `layers` layers of Llama-3-8B, for `tokens` tokens."""

    def __init__(self, gpu: Gpu, tokens: int, layers: int, hidden: int = 4096, inner: int = 14336) -> None:
        """Make a set of weights for each layer, because a real decode step reads the weights of all layers."""
        self.gpu, self.layers = gpu, layers
        shapes = [(hidden, hidden * 3 // 2), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
        scale = hidden**-0.5
        self.weights = [
            [torch.randn(shape, device=gpu.where, dtype=gpu.dtype) * scale for shape in shapes] for _ in range(layers)
        ]
        self.x = torch.randn(tokens, hidden, device=gpu.where, dtype=gpu.dtype)
        self.y = torch.randn(tokens, inner, device=gpu.where, dtype=gpu.dtype)

    def layer(self, number: int) -> None:
        """Run the matrix products of one layer."""
        qkv, out, up, down = self.weights[number]
        self.x @ qkv
        self.x @ out
        self.x @ up
        self.y @ down

    def run(self, before: Callable[[int], object], after: Callable[[int], object]) -> tuple[Any, Any]:
        """Run all layers, with a hook before and after each layer, and return the marks before and after all layers."""
        begin = self.gpu.mark()
        for number in range(self.layers):
            before(number)
            self.layer(number)
            after(number)
        return begin, self.gpu.mark()


def nothing(_: int) -> None:
    """Do nothing. This is a hook without work."""


def paired(gpu: Gpu, plain: Callable[[], tuple[Any, Any]], loaded: Callable[[], tuple[Any, Any]], pairs: int) -> float:
    """Run `plain` and `loaded` alternately, and return the median of the ratios of their times (`loaded` / `plain`)."""
    ratios = []
    for turn in range(pairs + 1):
        gpu.sync()
        a = gpu.ms(*plain())
        gpu.sync()
        b = gpu.ms(*loaded())
        if turn:
            ratios.append(b / a)
    return sorted(ratios)[len(ratios) // 2]


def hidden_load(gpu: Gpu, tokens: int, hit_tokens: int, pairs: int, width: tuple[int, int]) -> Iterator[Figure]:
    """Compare a prefill of `tokens` while `hit_tokens` are loaded layer by layer with a prefill without loads."""
    shape = gpu.sized(LLAMA_8B)
    forward = Forward(gpu, tokens, shape.layers, *width)
    for mover in MOVERS:
        chunks = max(1, hit_tokens // CHUNK_TOKENS)
        rig = Rig(gpu, shape, chunks, mover)
        rig.wait_pinned()

        read: list[bool] = []

        def loading(rig: Rig = rig, chunks: int = chunks, read: list[bool] = read) -> tuple[Any, Any]:
            jobs = rig.jobs([(slot, PAGES) for slot in range(chunks)], Kind.LOAD_SYNC)
            begin = gpu.mark()
            plan = rig.begin(Direction.LOAD, jobs)
            tickets = [rig.submit(plan, layer) for layer in range(shape.layers)]
            forward.run(lambda k: read.append(rig.engine.guard_read(tickets[k], 0)), nothing)
            return begin, gpu.mark()

        ratio = paired(gpu, lambda: forward.run(nothing, nothing), loading, pairs)
        assert all(read), "a guard failed"
        assert rig.failed() == 0, "a copy failed"
        title = f"prefill of {tokens} while loading {hit_tokens}, {mover.value if mover else 'auto'}"
        yield Figure(title, ratio, 1.03, "x without")
        rig.close()


def decode_saving(gpu: Gpu, requests: int, pairs: int, width: tuple[int, int]) -> Iterator[Figure]:
    """Compare decode steps of `requests` requests, whose KV is saved block by block, with decode steps without saves.

    Several steps run in a row, because the host prepares a step while the device still computes the previous step.
    """
    shape = gpu.sized(LLAMA_8B)
    forward = Forward(gpu, requests, shape.layers, *width)
    for mover in MOVERS:
        rig = Rig(gpu, shape, 8, mover)
        rig.wait_pinned()

        def plain() -> tuple[Any, Any]:
            begin = gpu.mark()
            for _ in range(STEPS):
                forward.run(nothing, nothing)
            return begin, gpu.mark()

        def saving(rig: Rig = rig) -> tuple[Any, Any]:
            full = max(1, requests // 16)  # the number of blocks of 16 tokens that become full in a step
            steps = [rig.jobs([(slot, 1) for slot in range(full)], Kind.SAVE) for _ in range(STEPS)]
            begin = gpu.mark()
            for jobs in steps:
                plan = rig.begin(Direction.SAVE, jobs)
                tickets: list[Ticket] = []
                forward.run(nothing, lambda k, plan=plan, mine=tickets: mine.append(rig.submit(plan, k)))  # type: ignore[misc]
                rig.engine.fence(tickets[-1], 0)  # the next step's compute waits for copies that still read
            return begin, gpu.mark()

        ratio = paired(gpu, plain, saving, pairs)
        assert rig.failed() == 0, "a copy failed"
        title = f"decode step of {requests} while saving, {mover.value if mover else 'auto'}"
        yield Figure(title, ratio, 1.01, "x without")
        rig.close()


SHAPES = ((LLAMA_8B, 32, 0.9), (LLAMA_70B_TP4, 64, 0.85))
