"""Tracks spoiled blocks: paged blocks with wrong content after a failed sync load, until they are recomputed.

If several requests share a spoiled block, vLLM makes the first request recompute the block, and counts the block as
computed for the other requests (`Scheduler._update_requests_with_invalid_blocks`). If the first request is aborted or
preempted too early, no request recomputes the block, and the other requests would read wrong KV. So kvpipe plans a
load that fails for each of the other requests, and vLLM recomputes the blocks.

vLLM also offers a sync load's blocks to other requests as soon as the blocks are allocated. With the policy
`recompute`, vLLM leaves these blocks in its prefix cache when the load fails. If the request is then preempted or
aborted, another request would find the wrong KV as a local hit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvpipe.protocol.engine import Blocks, Request, Step


class ScheduledRange(NamedTuple):
    """The part of a request that one step computes.

    The step computes token positions [start, stop) and reads all positions before `start`.
    """

    request: str
    blocks: list[int]
    start: int
    stop: int


class Spoiled:
    """Spoiled blocks by id, with the number of each block's first tokens that are recomputed.

    The dictionary is nearly always empty.
    """

    def __init__(self, block_tokens: int) -> None:
        """Start without spoiled blocks. `block_tokens` is the number of tokens per block."""
        self._size = block_tokens
        self.clean: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are spoiled blocks."""
        return bool(self.clean)

    def add(self, blocks: Iterable[int]) -> None:
        """Add `blocks`, because a load into them has failed."""
        self.clean.update(dict.fromkeys(blocks, 0))

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove `blocks`, because another load overwrites them. If that load fails, the blocks are added again."""
        for block in blocks:
            self.clean.pop(block, None)

    def keep(self, held: set[int]) -> None:
        """Remove the blocks that are not in `held`, because the next holder writes a block before it reads it."""
        self.clean = {block: done for block, done in self.clean.items() if block in held}

    def readers(self, parts: list[ScheduledRange]) -> dict[str, list[int]]:
        """Record the tokens that a step computes. Returns, by request, the spoiled blocks that the step would read."""
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
    """Finds requests that would read spoiled blocks, and removes these blocks from the prefix cache. One per engine."""

    def __init__(self, block_tokens: int, groups: int) -> None:
        """Start without spoiled blocks.

        `block_tokens` is the number of tokens per block of the first cache group, because only engines with one group
        use sync loads. `groups` is the number of cache groups.
        """
        self.spoiled = Spoiled(block_tokens)
        self._groups = groups
        self.left: set[int] = set()
        """Blocks of requests that ended while some sync load was not reported yet.

        The blocks are kept here until all loads are reported.
        """

    def failed(self, block_ids: set[int], requests: Collection[str], blocks: Blocks) -> None:
        """Remove the blocks of a failed sync load, and blocks computed from them, from vLLM's prefix cache."""
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
        """Remember the blocks of an ended request if some sync load is not reported yet (`loading`)."""
        if loading:
            self.left |= self._held(request_id, blocks)
        else:
            self.left.clear()

    def _held(self, request_id: str, blocks: Blocks) -> set[int]:
        return {block.block_id for group in range(self._groups) for block in blocks.table(request_id, group)}
