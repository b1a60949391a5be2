"""A connector on trial: vLLM's real scheduler, the connector on both sides, fake ranks, and moves that disturb them.

`Trial.do(move)` makes one move; a move that is not possible now does nothing, so any list of moves is a sequence that
can be replayed and shrunk. Every move is a tuple of a name and JSON values: `MOVES` lists them.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvpipe.connectors.vllm.trial.adapters import CHANGES, NUMBERS, PATHS
from kvpipe.connectors.vllm.trial.arrivals import Arrivals
from kvpipe.connectors.vllm.trial.content import WRONG_TOKEN, Live
from kvpipe.connectors.vllm.trial.drafts import Drafter
from kvpipe.connectors.vllm.trial.lookups import listen_to_lookups
from kvpipe.connectors.vllm.trial.rank import QUIRKS, STOPS, Rank, RankOutput, Reporter, Runner, TrialStep, Wrong
from kvpipe.connectors.vllm.trial.router import listening
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, Connector, Shape, make_cache, make_configs
from kvpipe.connectors.vllm.trial.tap import TraceTap, kvpipe_in, plan_in
from kvpipe.messages import Kind
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.held_tier import TROUBLES, DictSpec, HeldTier
from kvpipe.trace.events import SCHEDULER
from kvpipe.transfer.base import Direction

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.tiers.carrier import Carrier
    from kvpipe.tiers.finder import Finder
    from kvpipe.tiers.guard import MadeTier

Move = tuple[Any, ...]
SETTLE_SECONDS_MAX, DRAIN_STEPS_MAX = 120.0, 4000
UNPAUSED, THROTTLED, PROBES = 0, 3, 3
_SAVE, _LOAD = Direction.SAVE, Direction.LOAD
_ENDS_EARLY = frozenset({"mid_end", "early_clear", "mid_clear"})
_LOADS_FAIL = frozenset({"no_waits", "no_layers", "no_start", "early_bind", "mid_bind"}) | _ENDS_EARLY

MOVES = {
    "add": "document, tokens of it, own tokens, answer tokens, salt, LoRA id: a new request",
    "follow": "index, own tokens, answer tokens: a request that continues a finished one",
    "reuse": "document, tokens of it, answer tokens: a new request under the id of one that is over",
    "embed": "document, tokens of it, own tokens, answer tokens: a new request, the document as embeddings",
    "session": "document, tokens of it, answer tokens: a new request to which more input will come",
    "more": "index, own tokens, answer tokens: more input comes to a session",
    "end": "index: no more input comes to a session",
    "schedule": "the scheduler schedules a step",
    "execute": "the ranks run the oldest scheduled step",
    "update": "the scheduler gets the oldest step's results",
    "step": "whole steps, as many",
    "abort": "index: a live request is aborted",
    "tick": "saves, loads: so many held copies complete; neither: lost news arrive",
    "pace": "saves, loads, backwards: from now on copies complete by so many, at once; 0: when waited for",
    "again": "rank, ahead: the last completion is delivered once more, that of so many copies later twice",
    "reset": "connector, running: the prefix cache is reset",
    "weights": "which: everything is aborted and the weights change, or do not; nobody resets anything",
    "pause": "what, steps: vLLM admits nothing new, schedules nothing or puts prefills off, for so many steps",
    "freeze": "on or off",
    "bypass": "on or off",
    "later": "times: lookups answer that they do not know yet",
    "fail": "rank, is a load, layer: the next copy job fails in that layer",
    "lose": "rank, is a load, in time: the next wait for a copy is given up, its news lost for long, or just in time",
    "quirk": "rank, two indices: the next step's hooks are not what they should be, in one way or two",
    "adapter": "kind: the LoRA adapter changes, on disk, in the ranks or both, once its requests are gone",
    "hint": "which, seconds: the next request comes with hints, good or bad ones, where the shape has them",
    "hold": "on or off: tiers answer nothing until they are let go",
    "trouble": "tier, kind: what is wrong with a tier from now on",
    "late": "whoever waits for a tier has waited long enough",
    "operate": "index, what, tokens: operators pin (or fetch), unpin or evict a prompt, where the shape has them",
    "dummy": "hooks of a warm-up run, without a step",
    "drain": "no more arrivals: everything ends",
    "probe": "everything ends; then the last requests are asked once more, with vLLM's own cache and without it",
    "shutdown": "place in a step, 0 for between steps: the engine stops, whatever is in flight",
}


def _nothing(*_: object) -> None:
    """Ignore the call."""


class Trial(Arrivals):
    """One engine. `violations` grows when an invariant is broken; nothing is raised for that."""

    def __init__(
        self,
        shape: Shape,
        seed: int = 0,
        *,
        connector: Connector = KVPIPE,
        policy: str = "recompute",
    ) -> None:
        """`seed`: the documents. If it is even, what the two sides exchange is pickled, as between processes."""
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from kvpipe.connectors.vllm.connector import KVPipeConnector

        super().__init__(shape, seed)
        self._pickles = seed % 2 == 0
        config, cache = make_configs(shape, connector, policy)
        kind = AsyncScheduler if shape.asynchronous else PlainScheduler
        self.tiers = [HeldTier(f"dict-{i}") for i in range(shape.tiers)]
        with patch.object(KVPipeConnector, "make_tiers", self._made_tiers):
            self.scheduler: Scheduler = kind(
                vllm_config=config,
                kv_cache_config=cache,
                block_size=shape.whole_tokens,
                hash_block_size=shape.hash_tokens,
                structured_output_manager=StructuredOutputManager(config),
            )
        self.scheduler.use_v2_model_runner = shape.v2
        self.tap = TraceTap()
        self.faults, self.replay = self.tap.faults, self.tap.replay
        self.excused = {"reset"}  # names of faults that a move of this trial has asked for
        self.engines, self.ranks = list[HeldEngine](), list[Rank]()
        self.kvpipe = kvpipe_in(self.scheduler.connector)
        if self.kvpipe is not None:
            self.tap.attach(self.kvpipe, SCHEDULER)
        self._carriers: list[Finder | Carrier] = []
        self._make_ranks(config)
        self._introduce()
        self.runners: list[Runner] = [*self.ranks] or [Reporter(shape)]
        self._aggregator = KVOutputAggregator(len(self.runners))
        self.router = listening(self.scheduler, PATHS) if shape.events else None
        self.on_schedule: Callable[[SchedulerOutput], object] = _nothing
        self.on_lookup: Callable[[Request, int, tuple[int | None, bool]], object] = _nothing
        self.on_leave: Callable[[Live], object] = _nothing
        self.on_update: Callable[[], object] = _nothing
        self.on_reset: Callable[[], object] = _nothing
        self.on_drain: Callable[[], object] = _nothing
        self.steps = self.reads = self.deferrals = self._pauses = 0
        self.wrong = list[Wrong]()
        self.let_down = set[str]()  # requests whose failed asynchronous loads were reported to vLLM
        self.is_down = self._reversed = self._throttled = False
        listen_to_lookups(self)
        self._scheduled, self._executed = deque[TrialStep](), deque[tuple[TrialStep, "ModelRunnerOutput"]]()
        self._begun = deque[tuple[TrialStep, dict[str, list[int]], list[RankOutput]]]()  # by a pipeline's first stage
        self._drafter = Drafter(seed + 1, shape.drafts)
        self._moves: dict[str, Callable[..., None]] = {name: getattr(self, f"_{name}") for name in MOVES}

    def _make_ranks(self, config: VllmConfig) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        if self.kvpipe is not None:
            self.side.adapters.reader, self.side.prefetching.idle_s_max = self.adapters, 3600.0  # type: ignore[assignment]
            self.begin_hints()
        for index in range(self.shape.ranks):
            cache = make_cache(self.shape, index)
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            mine: Any = kvpipe_in(worker)
            if mine is not None:
                self.tap.attach(mine, index)
                mine.make_tiers, mine.rank = self._made_tiers, index
                self.engines.append(engine := HeldEngine(device=self.shape.device))
                mine.make_engine = lambda engine=engine: engine
                mine.hooks = functools.partial(self._hooks, mine.hooks)
            self.ranks.append(rank := Rank(index, worker, self.shape))
            if mine is not None:
                mine.worker.weigh = lambda: self.weights
                rank.before_results, mine.worker.step.watch = self._settle, self.tap.step_moved
                rank.load_adapters = functools.partial(self.adapters.load, index)
                self.adapters.join(index, mine.worker.adapters)

    def _hooks(self, hooks: Callable[[Any], Any], caches: Any) -> Any:  # noqa: ANN401
        """Return what the shape's runner calls, as far as it is another than the hooks of this machine's."""
        return hooks(caches)._replace(replays=self.shape.graphs, fences_late=self.shape.device and not self.shape.v2)

    def _made_tiers(self, *, writes: bool) -> list[MadeTier]:  # noqa: ARG002
        spec = DictSpec.model_validate({"lanes": 64, "timeout_ms_max": 600_000})
        return [(tier.name, spec, tier) for tier in self.tiers]

    def _introduce(self) -> None:
        """Shake hands, as vLLM does when the ranks have their caches."""
        if self.kvpipe is None:
            return
        if not self.ranks:
            self.side.slots_ready({0: self.side.catalog.slots})
            return
        reports = {(self.shape.stage_of(r.index), r.index): r.connector.get_handshake_metadata() for r in self.ranks}
        self.kvpipe.set_xfer_handshake_metadata_pp_aware({rank: one for rank, one in reports.items() if one})
        if not self.tiers:
            return
        sides = [self.side.staging.finder] if self.side.staging is not None else []
        carriers = [rank.kvpipe.worker.carrier for rank in self.ranks]
        self._carriers = [*sides, *(one for one in carriers if one is not None)]
        for tier in (tier for one in self._carriers for tier in one.tiers):
            tier.probe_s = 3600.0  # by the clock: a sequence would not have one outcome

    @property
    def side(self) -> SchedulerSide:
        """Kvpipe's scheduler side."""
        assert self.kvpipe is not None  # noqa: S101
        assert self.kvpipe.scheduler is not None  # noqa: S101
        return self.kvpipe.scheduler

    def do(self, move: Move) -> None:
        """Make one move. None is possible after a shutdown."""
        if self.is_down:
            return
        self._moves[move[0]](*move[1:])

    def replay_traces(self) -> None:
        """Replay what was traced since the last call through the machines."""
        self.tap.replay_new()

    def close(self) -> None:
        """End threads, in vLLM's order. Idempotent."""
        if not self.is_down:
            self.is_down = True
            for rank in self.ranks:
                rank.connector.shutdown()
            self.scheduler.shutdown()

    # ---- steps ----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Steps that were scheduled and not yet given back to the scheduler."""
        return len(self._scheduled) + len(self._begun) + len(self._executed)

    def _in_flight_steps(self) -> list[TrialStep]:
        return [*self._scheduled, *(step for step, *_ in self._begun), *(step for step, _ in self._executed)]

    def _schedule(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self._pause(UNPAUSED, 0)
        if self.in_flight >= self.shape.steps_in_flight or not self.scheduler.has_requests():
            return
        self._settle_tiers()
        output = self.scheduler.schedule(throttle_prefills=self._throttled)
        self.on_schedule(output)
        if self._pickles:
            output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301
        scheduled = output.num_scheduled_tokens
        sampling = frozenset(r for r in scheduled if not self.scheduler.requests[r].is_prefill_chunk)
        self._scheduled.append(TrialStep(output, sampling, {r: self.live[r].sequence for r in scheduled}))

    def _execute(self) -> None:
        """Run the oldest step; of a pipeline first the first stage, as far ahead as it can, and then the others."""
        if self._scheduled:
            step = self._scheduled.popleft()
            drafts = self._drafts(step)
            ran = [one.execute(step, drafts) for i, one in enumerate(self.runners) if not self.shape.stage_of(i)]
            self._begun.append((step, drafts, ran))
            if self.shape.stages > 1:
                return
        self._finish()

    def _finish(self) -> None:
        """Run what is left of the oldest step that was begun."""
        if self._begun:
            step, drafts, ran = self._begun.popleft()
            ran += [one.execute(step, drafts) for one in self.runners[len(ran) :]]
            self._executed.append((step, self._result(step, ran)))
            self.steps += 1

    def _update(self) -> None:
        if not self._executed and not self._begun:
            self._execute()
        if not self._executed:
            self._finish()
        if not self._executed:
            return
        step, result = self._executed.popleft()
        reported = result.kv_connector_output
        self.let_down |= reported.failed_recving if reported is not None else set()
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for one in outputs.outputs:
                self.live[one.request_id].output += one.new_token_ids
        self._gone()
        if self.shape.drafts and not self.shape.asynchronous:
            self._propose(step)
        self.on_update()

    def _step(self, count: int = 1) -> None:
        for _ in range(1 + count % 8):
            while self.in_flight < self.shape.steps_in_flight and self.scheduler.has_requests():
                self._schedule()
            self._update()

    def _gone(self) -> None:
        for one in list(self.live.values()):
            if one.id in self.scheduler.requests:
                self._advance(one)
            else:
                self._leave(self.live.pop(one.id))

    def _leave(self, one: Live) -> None:
        self.over.append(one)
        self.on_leave(one)
        expected = one.expected
        if one.output != (expected[: len(one.output)] if one.aborted else expected):
            self.violations.append(f"right_answers: {one.id} answered {one.output} instead of {expected}")

    def _result(self, step: TrialStep, ran: list[RankOutput]) -> ModelRunnerOutput:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(step.output.num_scheduled_tokens)
        results: list[ModelRunnerOutput | None] = []
        bad = {w.request for one in ran for w in one.wrong}
        for one in ran:
            kv_output: KVConnectorOutput = one.kv_output
            if self._pickles:
                kv_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(kv_output.kv_connector_worker_meta))  # noqa: S301
            results.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={r: i for i, r in enumerate(ids)},
                    sampled_token_ids=[
                        [] if r not in step.sampling else [WRONG_TOKEN] if r in bad else one.sampled[r] for r in ids
                    ],
                    kv_connector_output=None if kv_output.is_empty() else kv_output,
                )
            )
        result = results[0] if len(results) == 1 else self._aggregator.aggregate(results)
        assert result is not None  # noqa: S101
        reported = result.kv_connector_output
        invalid: set[int] = reported.invalid_block_ids if reported is not None else set()
        if self.kvpipe is not None and invalid and not self._reversed:
            jobs = plan_in(step.output.kv_connector_metadata).jobs
            loads = [job.blocks() for job in jobs if job.kind == Kind.LOAD_SYNC]
            if others := invalid - {block for blocks in loads for block in blocks}:
                self.violations.append(f"only_failed_blocks_are_reported: {others}, which this step has not loaded")
        for wrong in (w for one in ran for w in one.wrong):  # vLLM throws away what rests on invalid blocks
            if not invalid & self.ranks[wrong.rank].table(wrong.request):
                self.wrong.append(wrong)
        self.reads += len(ids) * sum(len(rank.layers) for rank in self.ranks)
        return result

    # ---- drafts ---------------------------------------------------------------------------------------------------

    def _drafts(self, step: TrialStep) -> dict[str, list[int]]:
        output, out = step.output, {}
        fresh = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request, tokens in output.scheduled_spec_decode_tokens.items():
            if self.shape.asynchronous and request not in fresh:  # placeholders: only the runner knows its drafts
                stop = self.runners[0].computed(request)
                scheduled = output.num_scheduled_tokens[request]
                out[request] = self._drafter.guess(step.sequences[request], stop + scheduled - len(tokens), len(tokens))
            else:
                out[request] = list(tokens)  # where a fresh request has placeholders, they are rejected
        return out

    def _propose(self, step: TrialStep) -> None:
        from vllm.v1.outputs import DraftTokenIds

        ids = [r for r in step.sampling if r in self.live]
        guesses = []
        for request_id in ids:
            one = self.live[request_id]
            guesses.append(self._drafter.propose(one.sequence, len(one.sequence.prompt) + len(one.output)))
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, guesses))

    # ---- disturbances ---------------------------------------------------------------------------------------------

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
            self._reversed = True  # a device's copies may now be taken for failed when their step is long over

    def _again(self, rank: int, ahead: int) -> None:
        if self.engines:
            self.engines[rank % len(self.engines)].again(ahead)
            self._settle()

    def _hold(self, on: bool) -> None:  # noqa: FBT001
        for tier in self.tiers:
            if on:
                tier.hold()
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
        """Probe all tiers now, and wait until no breaker is open."""
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
        """Requests that began with other bytes are none of kvpipe's business, nor are hits of vLLM's own cache."""
        if self.kvpipe is None:
            return
        for place in reversed([place for place, one in enumerate(self.live.values()) if one.lora]):
            self._abort(place)
        while self._scheduled or self._begun:  # the ranks' own requests are as old as what they hold
            self._execute()
        self.scheduler.kv_cache_manager.evict_blocks(set(range(self.shape.blocks)))
        how = CHANGES[kind % len(CHANGES)]
        held = self.adapters.change(how)
        self.excused |= {"adapter_changed", "job_failed", "save_failed", "load_failed"}
        if how == "loaded in place":
            for number in NUMBERS:
                self.side.adapter_called(number)
        elif not self.shape.failing:  # no load may fail: the scheduler's side gets it before it plans the next
            self.side.adapters.reported(held, self.side.trace.step)

    def _shutdown(self, place: int = 0) -> None:
        if place and not self._scheduled:
            while self.in_flight:
                self._update()
            self._schedule()
        if place:
            for rank in self.ranks:
                rank.quirks.append(STOPS[place])
            self._execute()
            self._finish()
        self.close()

    def _reset(self, connector: bool, running: bool) -> None:  # noqa: FBT001
        if running and self.careful and (self.in_flight or self._held_apart()):  # vLLM itself may raise
            return
        if connector:
            self.on_reset()
        doubtful = self.kvpipe is not None and self.side.weights.doubtful
        self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        if self.kvpipe is not None and not doubtful:  # the weights are the same, and nobody waits for the answer
            self.side.weighed(dict.fromkeys(range(max(1, self.shape.ranks)), (self.side.weights.ask(), self.weights)))

    def _weights(self, which: int) -> None:
        if self.kvpipe is None or not self.ranks or self.side.weights.doubtful:
            return
        while self._scheduled or self._begun:  # before the call that changes them
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
        """Whether others than running requests hold blocks."""
        if self.kvpipe is not None:
            return self.shape.async_loads or any(one.turns is not None for one in self.live.values())
        manager, running = self.scheduler.kv_cache_manager, [r.request_id for r in self.scheduler.running]
        tables = (m.req_to_blocks.get(r, ()) for m in manager.coordinator.single_type_managers for r in running)
        theirs = {block.block_id for table in tables for block in table if not block.is_null}
        return len(theirs) < manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()

    def _pause(self, what: int, steps: int) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._pauses, self._throttled = steps, what == THROTTLED
        self.scheduler.set_pause_state(PauseState.UNPAUSED if self._throttled else PauseState(what))

    def _freeze(self, on: bool) -> None:  # noqa: FBT001
        if self.kvpipe is not None:
            self.kvpipe.set_freeze(on)

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
            return  # nothing else marks the end of the forward of a step without hooks
        rank.quirks.append(name)
        self.excused |= {
            "job_failed", "save_failed", "load_failed", "step_never_ended", "layers_never_submitted",
            "step_end_skipped", "layers_read_without_waiting", "loads_never_started", "loads_started_by_hook",
            "hook_for_unknown_layer",
        }  # fmt: skip

    def _dummy(self) -> None:
        for rank in self.ranks:
            rank.dummy_run()

    def _drain(self) -> None:
        self.deferrals = 0
        self._pause(UNPAUSED, 0)
        self._hold(on=False)
        for one in [one for one in self.live.values() if one.turns is not None]:
            self._hang_up(one)
        for rank in self.ranks:
            rank.quirks.clear()
        for _ in range(DRAIN_STEPS_MAX):
            if self.in_flight:
                self._update()
            elif self.scheduler.has_requests():
                self._schedule()
                if not self._scheduled[-1].output.total_num_scheduled_tokens:  # only copies are left to wait for
                    self._let_end()
            elif not all(engine.idle for engine in self.engines):
                self._let_end()
            else:
                self.on_drain()
                return
        self.violations.append(f"no_hang: still busy after {DRAIN_STEPS_MAX} steps: {sorted(self.live)}")
        self.on_drain()

    def _probe(self) -> None:
        self._drain()
        self._freeze(on=False)
        self._bypass(on=False)
        last = self.over[-PROBES:]
        for local in (True, False):
            if not local:
                self._reset(connector=False, running=False)
            for one in last:
                prompt = one.sequence.prompt + one.output
                self._enter(f"r{self.added}", prompt, 0, one.salt, one.lora)
                self._drain()

    def _let_end(self) -> None:
        """Let copies end that were held or lost; those of a foreign connector end by themselves."""
        self._hold(on=False)
        self._tick(0, 0)
        self._tick(4, 4)
        if not self.engines:
            time.sleep(0.0002)

    def _settle(self) -> None:
        """Wait until kvpipe's loop threads have taken every completion, so that a sequence has one outcome."""
        for engine, rank in zip(self.engines, self.ranks, strict=bool(self.engines)):
            pipeline = rank.kvpipe.worker.pipeline
            loop = pipeline.copies.loop
            if loop.alive and not loop.settle(SETTLE_SECONDS_MAX):
                self.violations.append(f"no_hang: the loop thread of rank {rank.index} does not settle: {engine}")
        self._settle_tiers()

    def _settle_tiers(self) -> None:
        """Wait until all that tiers were asked has ended, or is held back."""
        limit = time.monotonic() + SETTLE_SECONDS_MAX
        while sum(one.open for one in self._carriers) > sum(tier.waiting for tier in self.tiers):
            if time.monotonic() > limit:
                self.violations.append("no_hang: what tiers were asked does not end")
                return
            time.sleep(0.0001)
