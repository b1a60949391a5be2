"""The race hunt: thousands of times, compute overwrites blocks that were just saved, and reads blocks during a load.

The host orders the use of slots: a round loads the previous round's chunks only after the host was notified that these
chunks have landed. The device orders all other accesses. For example, a load writes to blocks that compute has just
used, and a save waits for the compute that writes the saved blocks.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.rig import PAGES, Gpu, Rig, Shape
from kvpipe.protocol.messages import Kind
from kvpipe.transfer.base import Direction, Ticket
from kvpipe.transfer.movers import Mover

SHAPE = Shape("race", 4, 4 << 10)
CHUNKS = 3
SETS = 2  # sets of slots: a round saves to one set and loads from the other
PATIENCE = 64  # rounds between two waits for the device


class Finding(NamedTuple):
    """The result of a hunt."""

    rounds: int  # rounds that were done
    wrong: int
    failed: int


class _Saved(NamedTuple):
    """The chunks that a round has saved: the last ticket, each chunk's (slot, pages), and the bytes of each layer."""

    last: Ticket
    stretches: list[tuple[int, int]]
    truths: list[torch.Tensor]


class Hunt:
    """A race hunt on one transfer engine, with random writes and checks in place of the model's compute."""

    def __init__(self, gpu: Gpu, mover: Mover, wave_bytes: int) -> None:
        """If `wave_bytes` is 0, each layer is queued by itself."""
        self.gpu = gpu
        self.rig = Rig(gpu, SHAPE, CHUNKS, mover, wave_bytes=wave_bytes, calibrate_s_max=0, staging_bytes_max=1 << 18)
        self.rig.wait_pinned()
        self.wrong = torch.zeros((), dtype=torch.int64, device=gpu.where)
        self.random = torch.Generator().manual_seed(0)
        self.saved: _Saved | None = None

    def late(self) -> None:
        """Delay one of the engine's streams for a short random time, in about a third of all calls."""
        if self.gpu.simulated or torch.rand((), generator=self.random) > 0.3:
            return
        lanes = list(self.rig.engine.lanes.values())
        lane = lanes[int(torch.randint(0, len(lanes), (), generator=self.random))]
        stream = lane.bus if torch.rand((), generator=self.random) < 0.5 else lane.kernel
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            self.gpu.sleep(0.05 + 0.3 * float(torch.rand((), generator=self.random)))

    def draw(self, rounds: int) -> None:
        """Draw the blocks of all rounds in advance, because a copy to the device between rounds would synchronise."""
        self.blocks = [self.rig.blocks_for(2 * CHUNKS * PAGES) for _ in range(rounds)]
        self.on_device = torch.tensor(self.blocks, device=self.gpu.where)

    def round(self, number: int) -> None:
        """Write, save and overwrite blocks. Load the previous round's chunks to other blocks, and check the bytes."""
        if number % 2:
            self.gpu.sleep(0.02)  # delays compute
        before, self.saved = self.saved, self._save(number)
        if before is not None:
            self.rig.wait_for(before.last)  # lookups find only chunks that have landed
            self._load(number, before)

    def _save(self, number: int) -> _Saved:
        rig = self.rig
        per_set = 2 * CHUNKS // SETS
        slots = range(number % SETS * per_set, (number % SETS + 1) * per_set)
        stretches = [(slot, PAGES - (number + slot) % 3) for slot in slots]
        count = sum(pages for _, pages in stretches)
        source = self.on_device[number, :count]
        save = rig.begin(Direction.SAVE, rig.jobs(stretches, Kind.SAVE, self.blocks[number][:count]))
        truths = []
        for layer, cache in enumerate(rig.caches):
            truth = torch.randint(0, 256, (count, SHAPE.page_bytes), dtype=torch.uint8, device=self.gpu.where)
            truths.append(truth)
            self.gpu.compute(partial(cache.index_copy_, 0, source, truth))
            self.late()
            last = rig.submit(save, layer)
        rig.engine.fence(last, 0)
        for cache in rig.caches:  # the next step reuses the blocks at once
            self.gpu.compute(partial(cache.index_fill_, 0, source, 0xA5))
        return _Saved(last, stretches, truths)

    def _load(self, number: int, saved: _Saved) -> None:
        rig, count = self.rig, len(saved.truths[0])
        blocks = self.blocks[number][-count:]
        target = self.on_device[number, -count:]
        load = rig.begin(Direction.LOAD, rig.jobs(saved.stretches, Kind.LOAD_SYNC, blocks))
        tickets = [rig.submit(load, layer) for layer in range(SHAPE.layers)]
        for ticket, cache, truth in zip(tickets, rig.caches, saved.truths, strict=True):
            self.late()
            rig.engine.guard_read(ticket, 0)
            self.gpu.compute(partial(self._check, cache, target, truth))

    def _check(self, cache: torch.Tensor, target: torch.Tensor, truth: torch.Tensor) -> None:
        self.wrong += (cache[target] != truth).any()
        cache[target] = 0x5A

    def run(self, rounds: int, until: float = math.inf) -> Finding:
        """Run at most `rounds` rounds, and return the finding.

        After `until`, in seconds of the monotonic clock, no round begins, except for the first.
        """
        self.draw(rounds)
        done = 0
        for number in range(rounds):
            if number and time.monotonic() > until:
                break
            self.round(number)
            done += 1
            if number % PATIENCE == PATIENCE - 1:
                self.gpu.sync()
        if self.saved is not None:
            self.rig.wait_for(self.saved.last)
        self.gpu.sync()
        failed = self.rig.failed()
        finding = Finding(done, int(self.wrong), failed)
        self.rig.close()
        return finding
