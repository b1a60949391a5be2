"""Reacts to failed loads: all KV that requests have computed since a failed load was planned may be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.protocol.messages import Kind
from kvpipe.scheduler.events import Subscriber

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Blocks, Recovery
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.in_flight import JobInFlight
    from kvpipe.scheduler.jobs import Jobs
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.requests import Requests


class FailedLoads(Subscriber):
    """Reacts to the failed loads of one engine.

    `blocks` gives the engine's block tables, and is set before the first step.
    """

    def __init__(
        self, context: Context, *, requests: Requests, jobs: Jobs, recovery: Recovery, hash_tokens: int
    ) -> None:
        """Start without block tables. `hash_tokens` is the number of tokens per block hash."""
        self._context, self._requests, self._jobs, self._recovery = context, requests, jobs, recovery
        self._hashes_per_block = max(1, context.geometry.groups[0].block_tokens // hash_tokens)
        self.blocks: Blocks | None = None

    def load_failed(self, tracked: Tracked, load: JobInFlight) -> None:
        """Taint the saves planned after `load`, so that they are not published, and make the engine recover."""
        kind = Kind(load.job.kind).name.lower()
        self._context.counters.fault("load_failed", request=load.job.request, job=load.job.id, kind=kind)
        if tracked.epoch == load.job.epoch:
            tracked.saving.give_up()
        if load.job.kind == Kind.LOAD_SYNC:
            self._jobs.taint_saves(after=load.job.id)
            blocks = load.job.blocks()
            self._recovery.failed(blocks, self._requests.tracked)
            if given := blocks - self._held_since(load):
                self._recovery.given_away(given)

    def _held_since(self, load: JobInFlight) -> set[int]:
        """Return the blocks that unfinished requests have held since `load` was planned.

        These are the blocks of the load's request, and the blocks of other requests that begin with the same tokens.
        """
        blocks, keys, held = self.blocks, set(load.tracked.request.block_hashes), set[int]()
        if blocks is None:
            return load.job.blocks()
        for request_id, tracked in self._requests.tracked.items():
            table = [block.block_id for block in blocks.table(request_id, 0)]
            if tracked is load.tracked and tracked.epoch == load.job.epoch:
                held.update(table)
            else:
                ends = tracked.request.block_hashes[self._hashes_per_block - 1 :: self._hashes_per_block]
                held.update(block for block, key in zip(table, ends, strict=False) if key in keys)
        return held
