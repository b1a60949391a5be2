"""kvpipe behind the engine's `Reuse` interface. This module has all code that an engine's adapter needs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvpipe.config.settings import load_settings
from kvpipe.protocol.engine import LATER
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Report
from kvpipe.scheduler.hooks import EngineFacts, EngineHooks
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.tiers.guard import FIND, READ, WRITE, guarded
from kvpipe.tiers.registry import make_tier, named
from kvpipe.transfer.base import TransferEngine
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.second_engine.engine import Ended, Engine, Hit, Request, Reuse, Step

MakeCopier = Callable[[], TransferEngine | None]


class KVPipe(Reuse):
    """One scheduler side, and one worker side per rank.

    All sides are in one process, so calls are passed on directly.
    """

    def __init__(self, engine: Engine, *, make_copier: MakeCopier = lambda: None, **keys: Any) -> None:
        """Create both sides. `keys` are keys of the configuration.

        `make_copier` returns the object that copies a rank's bytes, or None for the device's own.
        """
        self.settings = load_settings(keys)
        self.geometry = make_geometry(engine, self.settings.chunk_tokens, int(self.settings.pool_bytes_max))
        ranks = len(engine.caches)
        self._shape = [repr(engine.model.shape), repr(self.geometry.groups), self.geometry.chunk_tokens, ranks]
        self.scheduler = SchedulerSide(
            self.settings,
            self.geometry,
            EngineFacts(hash_tokens=engine.blocks.block_tokens, ranks=ranks, saves=True, loads=True),
            EngineHooks(space_of=self._space),
            tiers=guarded(self._tiers(writes=False), (FIND,)),
        )
        self._blocks = engine.blocks
        self.scheduler.bind(self._blocks)
        weights = engine.model.digest()
        self._loaded, self._failed = Counter[str](), set[str]()
        self.workers = [
            WorkerSide(
                RankContext(self.settings, rank, ranks),
                PagedCaches(self.geometry, caches, engine.blocks.count),
                engine=make_copier(),
                tiers=guarded(self._tiers(writes=True), (READ, WRITE)),
                weigh=lambda: weights,
            )
            for rank, caches in enumerate(engine.caches)
        ]
        slots = {worker.context.rank: worker.ready for worker in self.workers}
        self.scheduler.ranks_ready(slots, [worker.weigh_now() for worker in self.workers])
        engine.reuse = self

    def _space(self, weights: str) -> str:
        """Return the namespace in tiers, which is different for every model, shape and weights."""
        return hashlib.sha256(json.dumps([*self._shape, weights]).encode()).hexdigest()[:32]

    def _tiers(self, *, writes: bool) -> list[Any]:
        return [(name, spec, make_tier(name, spec, writes=writes)) for name, spec in named(self.settings.tiers)]

    # ---- scheduling -----------------------------------------------------------------------------------------------

    def lookup(self, request: Request, local_tokens: int) -> Hit | None:
        """See `Reuse`."""
        answer = self.scheduler.lookup(request, local_tokens)
        return None if answer is LATER else Hit(*answer)

    def admitted(self, request: Request, loaded_tokens: int) -> None:
        """See `Reuse`."""
        self.scheduler.admitted(request, [self._blocks.table(request.request_id)], loaded_tokens)

    def finished(self, request: Request) -> None:
        """See `Reuse`."""
        self.scheduler.finished(request)

    def reset(self) -> None:
        """See `Reuse`."""
        self.scheduler.reset()

    @property
    def pending(self) -> bool:
        """See `Reuse`."""
        return self.scheduler.pending

    # ---- one step -------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """See `Reuse`."""
        plan = self.scheduler.plan_step(step)
        for worker in self.workers:
            worker.bind(plan)
            worker.start_loads()

    def before(self, layer: str) -> None:
        """See `Reuse`."""
        for worker in self.workers:
            worker.wait_layer(layer)

    def after(self, layer: str) -> None:
        """See `Reuse`."""
        for worker in self.workers:
            worker.save_layer(layer)

    def end(self) -> Ended:
        """See `Reuse`. A load has ended when every rank has ended it, and has failed if any rank has failed."""
        reports: list[Report] = []
        bad_blocks: set[int] = set()
        for worker in self.workers:
            worker.end_step()
            loaded, failed = worker.collect()
            self._loaded.update(loaded)
            self._failed |= failed
            bad_blocks |= worker.take_bad_blocks()
            report = worker.take_report()
            reports += [report] if report is not None else []
            worker.unbind()
        if bad_blocks:
            self.scheduler.invalidated(bad_blocks)
        for report in reports[1:]:
            reports[0].add(report)
        if reports:
            self.scheduler.reported(reports[0])
        done = frozenset(name for name, ranks in self._loaded.items() if ranks == len(self.workers))
        ended = Ended(done, done & self._failed, frozenset(bad_blocks))
        for name in done:
            del self._loaded[name]
            self._failed.discard(name)
        return ended

    def shutdown(self) -> None:
        """End all threads."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def make_geometry(engine: Engine, chunk_tokens: int, pool_bytes_max: int) -> Geometry:
    """Describe the caches of one rank: all have one shape."""
    layers = tuple(Layer(name, cache[0].nbytes) for name, cache in engine.caches[0].items())
    return Geometry((Group(layers, engine.blocks.block_tokens),), chunk_tokens, pool_bytes_max)
