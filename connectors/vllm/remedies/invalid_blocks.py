"""Spoiled blocks: paged blocks that a failed sync load has left with garbage, until they are computed again.

Of several requests that share such a block vLLM lets the first compute it again and takes it for computed in the
others (`Scheduler._update_requests_with_invalid_blocks`). If the first one is aborted or preempted before, nobody
does, and the others read garbage: a load that fails is planned for them.

vLLM also offers a sync load's blocks to others from their allocation on and, with policy `recompute`, leaves them in
its prefix cache when the load fails: a preemption or abort before they are recomputed would make garbage a local hit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvpipe.scheduler.base import Blocks, Request, Step


class ScheduledRange(NamedTuple):
    """One request in a step: token positions [start, stop) are computed, those before are read."""

    request: str
    blocks: list[int]
    start: int
    stop: int


class Spoiled:
    """Spoiled blocks, by block id, and how many of their first tokens are computed again. Nearly always empty."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: tokens per block."""
        self._size = block_tokens
        self.clean: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are spoiled blocks."""
        return bool(self.clean)

    def add(self, blocks: Iterable[int]) -> None:
        """A load into `blocks` has failed."""
        self.clean.update(dict.fromkeys(blocks, 0))

    def discard(self, blocks: Iterable[int]) -> None:
        """Another load overwrites `blocks`; if it fails they are added again."""
        for block in blocks:
            self.clean.pop(block, None)

    def keep(self, held: set[int]) -> None:
        """Forget blocks that no request holds: their next owner writes them first."""
        self.clean = {block: done for block, done in self.clean.items() if block in held}

    def readers(self, parts: list[ScheduledRange]) -> dict[str, list[int]]:
        """Record what a step computes. Returns, by request, the spoiled blocks that it would read."""
        size, clean = self._size, self.clean
        for part in parts:
            first = part.start // size
            for i, block in enumerate(part.blocks[first : -(-part.stop // size)], first):
                done = clean.get(block)
                if done is not None and part.start <= i * size + done:
                    clean[block] = max(done, min(part.stop - i * size, size))
        read = {
            part.request: [
                block
                for i, block in enumerate(part.blocks[: -(-part.start // size)])
                if clean.get(block, size) < min(part.start - i * size, size)
            ]
            for part in parts
        }
        self.discard([block for block, done in clean.items() if done == size])
        return {request: blocks for request, blocks in read.items() if blocks}


class InvalidBlocks:
    """One per engine: finds requests that would read spoiled blocks, and keeps these out of the prefix cache."""

    def __init__(self, block_tokens: int, groups: int) -> None:
        """`block_tokens`: of the first of `groups` cache groups; there are sync loads only if it is the only one."""
        self.spoiled = Spoiled(block_tokens)
        self._groups = groups
        self.left: set[int] = set()
        """Blocks of requests that ended before all sync loads were reported; needed until they are."""

    def failed(self, block_ids: set[int], requests: Collection[str], blocks: Blocks) -> None:
        """Take the blocks of a failed sync load, and those computed from them, out of vLLM's prefix cache."""
        self.spoiled.add(block_ids)
        resting = block_ids | self.left
        for request_id in requests:
            resting |= self._held(request_id, blocks)
        blocks.forget(resting)

    def failing_loads(self, step: Step, requests: Iterable[Request], blocks: Blocks) -> dict[str, list[int]]:
        """Return, by request, the spoiled blocks that `step` would read."""
        alive = {request.request_id: request for request in requests}
        tables = {request_id: [block.block_id for block in blocks.table(request_id, 0)] for request_id in alive}
        self.spoiled.keep({block for table in tables.values() for block in table})
        parts = []
        for request_id, scheduled in step.num_scheduled_tokens.items():
            if request_id in alive:
                start = alive[request_id].num_computed_tokens
                parts.append(ScheduledRange(request_id, tables[request_id], start, start + scheduled))
        return self.spoiled.readers(parts)

    def finished(self, request_id: str, blocks: Blocks, *, loading: bool) -> None:
        """Remember the blocks of a request that is over while some sync load is not reported."""
        if loading:
            self.left |= self._held(request_id, blocks)
        else:
            self.left.clear()

    def _held(self, request_id: str, blocks: Blocks) -> set[int]:
        return {block.block_id for group in range(self._groups) for block in blocks.table(request_id, group)}
