"""The moves of a trial that disturb it: faults of copies, tiers and hooks, and changes of weights and adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.adapters import CHANGES, NUMBERS
from kvpipe.connectors.vllm.trial.rank import QUIRKS, Rank
from kvpipe.connectors.vllm.trial.shapes import Shape
from kvpipe.connectors.vllm.trial.steps import Steps, ignore
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.held_tier import TROUBLES, HeldTier
from kvpipe.transfer.base import Direction

if TYPE_CHECKING:
    from kvpipe.tiers.carrier import Carrier
    from kvpipe.tiers.finder import Finder

SETTLE_SECONDS_MAX = 120.0
_SAVE, _LOAD = Direction.SAVE, Direction.LOAD
_ENDS_EARLY = frozenset({"mid_end", "early_clear", "mid_clear"})
_LOADS_FAIL = frozenset({"no_waits", "no_layers", "no_start", "early_bind", "mid_bind"}) | _ENDS_EARLY


class Disturbances(Steps):
    """Disturbs a trial's steps, and waits until the disturbances have taken effect."""

    def __init__(self, shape: Shape, seed: int) -> None:
        """`seed` has the same meaning as in `Steps`."""
        super().__init__(shape, seed)
        self.engines = list[HeldEngine]()
        self.tiers = [HeldTier(f"dict-{i}") for i in range(shape.tiers)]
        self.excused = {"reset"}  # the names of faults that this trial's moves may cause
        for tier in self.tiers:
            tier.values_max = shape.room
        self.deferrals = 0
        self.on_reset: Callable[[], object] = ignore
        self._carriers: list[Finder | Carrier] = []

    def _abort(self, index: int) -> None:
        from vllm.v1.request import RequestStatus

        if self.live:
            one = list(self.live.values())[index % len(self.live)]
            one.aborted = True
            self.scheduler.finish_requests(one.id, RequestStatus.FINISHED_ABORTED)
            if one.id not in self.scheduler.requests:
                self._leave(self.live.pop(one.id))

    def _tick(self, saves: int, loads: int) -> None:
        for engine in self.engines:
            engine.tick(_SAVE, saves)
            engine.tick(_LOAD, loads)
            if not saves + loads:
                engine.find_lost()
        self._settle()

    def _pace(self, saves: int, loads: int, backwards: bool) -> None:  # noqa: FBT001
        for engine in self.engines:
            engine.pace(saves, loads, backwards=backwards and self.shape.failing)
        if backwards:
            self.excused |= {"job_failed", "save_failed", "load_failed"}

    def _again(self, rank: int, ahead: int) -> None:
        if self.engines:
            self.engines[rank % len(self.engines)].again(ahead)
            self._settle()

    def _hold(self, on: bool) -> None:  # noqa: FBT001
        for tier in self.tiers:
            if on:
                tier.hold()
                self.excused.add("stores_too_slow")  # an engine waits only a few seconds for a tier's answer
            else:
                tier.let_go()
        self._settle()

    def _trouble(self, tier: int, kind: int) -> None:
        if self.tiers:
            self.tiers[tier % len(self.tiers)].trouble = TROUBLES[kind % len(TROUBLES)]
            self.excused |= {"tier_failed", "tier_full", "chunk_damaged"}
            if not any(one.trouble == "down" for one in self.tiers):
                self._mend()

    def _mend(self) -> None:
        """Probe all tiers now, and wait until every breaker is closed."""
        breakers = [b for one in self._carriers for tier in one.tiers for b in tier.breakers.values()]
        limit = time.monotonic() + SETTLE_SECONDS_MAX
        for one in self._carriers:
            one.probe_now()
        while not all(breaker.allows for breaker in breakers) and time.monotonic() < limit:
            time.sleep(0.0001)

    def _late(self) -> None:
        if self.kvpipe is not None and self.side.staging is not None:
            self.side.staging.expire()

    def _adapter(self, kind: int) -> None:
        """Change the adapters. Before this, abort the requests that use adapters, and empty vLLM's own prefix cache.

        Otherwise such a request, or a hit in vLLM's cache, would continue KV of the old adapters. kvpipe does not
        handle this case.
        """
        if self.kvpipe is None:
            return
        for place in reversed([place for place, one in enumerate(self.live.values()) if one.lora]):
            self._abort(place)
        while self._scheduled or self._begun:  # ranks know only the adapters of their last step
            self._execute()
        self.scheduler.kv_cache_manager.evict_blocks(set(range(self.shape.blocks)))
        how = CHANGES[kind % len(CHANGES)]
        held = self.adapters.change(how)
        self.excused |= {"adapter_changed", "job_failed", "save_failed", "load_failed"}
        if how == "loaded in place":
            for number in NUMBERS:
                self.side.adapter_called(number)
        # if no load may fail, the scheduler side must get the report before it plans the next load
        elif not self.shape.failing:
            self.side.adapters.reported(held, self.side.trace.step)

    def _reset(self, connector: bool, running: bool) -> None:  # noqa: FBT001
        if running and self.careful and (self.in_flight or self._held_apart()):  # vLLM may raise here
            return
        if connector:
            self.on_reset()
        doubtful = self.kvpipe is not None and self.side.weights.doubtful
        self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        if self.kvpipe is not None and not doubtful:  # the weights are the same, and no question is open
            self.side.weighed(
                dict.fromkeys(range(max(1, self.shape.ranks)), (self.side.weights.next_question(), self.weights))
            )

    def _weights(self, which: int) -> None:
        if self.kvpipe is None or not self.ranks or self.side.weights.doubtful:
            return
        while self._scheduled or self._begun:  # these steps were planned before the weights change
            self._execute()
        for index in reversed(range(len(self.live))):
            self._abort(index)
        if self.weights != f"weights {which}":
            self.on_reset()
            self.old_keys |= set(self.prefixes)
            self.prefixes.clear()
        self.weights = f"weights {which}"
        self.side.weights.suspect("move")

    def _held_apart(self) -> bool:
        """Whether requests that do not run hold blocks."""
        if self.kvpipe is not None:
            return (
                self.shape.async_loads or self.shape.sibling or any(one.turns is not None for one in self.live.values())
            )
        manager, running = self.scheduler.kv_cache_manager, [r.request_id for r in self.scheduler.running]
        tables = (m.req_to_blocks.get(r, ()) for m in manager.coordinator.single_type_managers for r in running)
        theirs = {block.block_id for table in tables for block in table if not block.is_null}
        return len(theirs) < manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()

    def _freeze(self, on: bool) -> None:  # noqa: FBT001
        if self.kvpipe is not None:
            self.kvpipe.scheduler_role.set_freeze(on)

    def _bypass(self, on: bool) -> None:  # noqa: FBT001
        if self.kvpipe is not None:
            self.side.switches.bypass = on

    def _later(self, times: int) -> None:
        self.deferrals = times % 6

    def _fail(self, rank: int, load: bool, layer: int) -> None:  # noqa: FBT001
        if self.engines and (self.shape.failing or not load):
            self.engines[rank % len(self.engines)].arm(_LOAD if load else _SAVE, layer)
            self.excused |= {"job_failed", "save_failed", "load_failed"}

    def _lose(self, rank: int, load: bool, in_time: bool = False) -> None:  # noqa: FBT001, FBT002
        if self.engines and (self.shape.failing or not load):
            self.engines[rank % len(self.engines)].lose(_LOAD if load else _SAVE, in_time=in_time)
            self.excused |= {"copy_timeout", "job_failed", "save_failed", "load_failed"}

    def _quirk(self, rank: int, first: int, second: int) -> None:
        for index in {first, second} if self.ranks else ():
            self._add_quirk(self.ranks[rank % len(self.ranks)], list(QUIRKS)[index % len(QUIRKS)])

    def _add_quirk(self, rank: Rank, name: str) -> None:
        if name in _LOADS_FAIL and not self.shape.failing:
            return
        if name in _ENDS_EARLY and (self.shape.mode == "step" or self.shape.graphs or self.shape.drafter):
            return  # without hooks, no other call marks the end of a step's forward
        rank.quirks.append(name)
        self.excused |= {
            "job_failed", "save_failed", "load_failed", "step_never_ended", "layers_never_submitted",
            "step_end_skipped", "layers_read_without_waiting", "loads_never_started", "loads_started_by_hook",
            "hook_for_unknown_layer",
        }  # fmt: skip

    def _dummy(self) -> None:
        for rank in self.ranks:
            rank.dummy_run()

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _let_end(self) -> None:
        """Complete held and lost copies. Copies of a foreign connector complete by themselves."""
        self._hold(on=False)
        self._tick(0, 0)
        self._tick(4, 4)
        if not self.engines:
            time.sleep(0.0002)

    def _settle(self) -> None:
        """Wait until kvpipe's loop threads have processed all completions, so that equal moves have equal outcomes."""
        for engine, rank in zip(self.engines, self.ranks, strict=bool(self.engines)):
            pipeline = rank.kvpipe.worker.pipeline
            loop = pipeline.copies.loop
            if loop.alive and not loop.settle(SETTLE_SECONDS_MAX):
                self.violations.append(f"no_hang: the loop thread of rank {rank.index} does not settle: {engine}")
        self._settle_tiers()

    def _settle_tiers(self) -> None:
        """Wait until every call to a tier has ended or is held back."""
        limit = time.monotonic() + SETTLE_SECONDS_MAX
        while sum(one.open for one in self._carriers) > sum(tier.waiting for tier in self.tiers):
            if time.monotonic() > limit:
                self.violations.append("no_hang: calls to tiers do not end")
                return
            time.sleep(0.0001)
