"""The race hunt: compute overwrites what was just saved, and reads what is just being loaded, thousands of times."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.gpu.rig import PAGES, Gpu, Rig, Shape
from kvpipe.plan import Kind
from kvpipe.transfer.base import Direction, Ticket
from kvpipe.transfer.movers import Mover

SHAPE = Shape("race", 4, 4 << 10)
CHUNKS = 3
PATIENCE = 64  # rounds between two looks at the bytes


class Finding(NamedTuple):
    """What a hunt has found."""

    rounds: int
    wrong: int
    failed: int


class Hunt:
    """One engine and what stands for the model's compute."""

    def __init__(self, gpu: Gpu, mover: Mover, wave_bytes: int) -> None:
        """`wave_bytes`: 0 queues each layer by itself."""
        self.gpu = gpu
        self.rig = Rig(gpu, SHAPE, CHUNKS, mover, wave_bytes=wave_bytes, calibrate_s_max=0, staging_bytes_max=1 << 18)
        self.rig.wait_pinned()
        self.wrong = torch.zeros((), dtype=torch.int64, device=gpu.where)
        self.random = torch.Generator().manual_seed(0)

    def late(self) -> None:
        """Every now and then, one of the engine's streams is busy with something else for a while."""
        if self.gpu.simulated or torch.rand((), generator=self.random) > 0.3:
            return
        lanes = list(self.rig.engine.lanes.values())
        lane = lanes[int(torch.randint(0, len(lanes), (), generator=self.random))]
        stream = lane.bus if torch.rand((), generator=self.random) < 0.5 else lane.kernel
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            self.gpu.sleep(0.05 + 0.3 * float(torch.rand((), generator=self.random)))

    def draw(self, rounds: int) -> None:
        """Draw the blocks of all rounds: a copy to the device between two rounds would wait for the device."""
        self.blocks = [self.rig.blocks_for(2 * CHUNKS * PAGES) for _ in range(rounds)]
        self.on_device = torch.tensor(self.blocks, device=self.gpu.where)

    def round(self, number: int) -> None:
        """Write, save, overwrite; load elsewhere, read after the guard; no waiting in between."""
        rig, where = self.rig, self.gpu.where
        stretches = [(slot, PAGES - (number + slot) % 3) for slot in range(CHUNKS)]
        count = sum(pages for _, pages in stretches)
        blocks = self.blocks[number][: 2 * count]
        source, target = self.on_device[number, :count], self.on_device[number, count : 2 * count]
        loads = rig.jobs(stretches, Kind.LOAD_SYNC, blocks[count:])
        if number % 2:
            self.gpu.sleep(0.02)  # compute itself is late
        save = rig.begin(Direction.SAVE, rig.jobs(stretches, Kind.SAVE, blocks[:count]))
        truths = []
        for layer, cache in enumerate(rig.caches):
            truth = torch.randint(0, 256, (count, SHAPE.page_bytes), dtype=torch.uint8, device=where)
            truths.append(truth)
            cache[source] = truth
            self.late()
            last = rig.submit(save, layer)
        rig.engine.fence(last, 0)
        for cache in rig.caches:  # the next step reuses the blocks at once
            cache[source] = 0xA5
        landed: list[Ticket] = [last]
        rig.land(*landed)  # a chunk is found when it has landed, and not before
        load = rig.begin(Direction.LOAD, loads)
        tickets = [rig.submit(load, layer) for layer in range(SHAPE.layers)]
        for ticket, cache, truth in zip(tickets, rig.caches, truths, strict=True):
            self.late()
            rig.engine.guard_read(ticket, 0)
            self.wrong += (cache[target] != truth).any()
            cache[target] = 0x5A

    def run(self, rounds: int) -> Finding:
        """Hunt, and look now and then."""
        self.draw(rounds)
        for number in range(rounds):
            self.round(number)
            if number % PATIENCE == PATIENCE - 1:
                self.gpu.sync()
        failed = self.rig.failed()
        finding = Finding(rounds, int(self.wrong), failed)
        self.rig.close()
        return finding
