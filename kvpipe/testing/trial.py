"""A connector on trial: vLLM's real scheduler, the connector on both sides, fake ranks, and moves that disturb them.

`Trial.do(move)` makes one move; a move that is not possible now does nothing, so any list of moves is a sequence that
can be replayed and shrunk. Every move is a tuple of a name and JSON values: `MOVES` lists them.
"""

from __future__ import annotations

import functools
import pickle
import random
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpipe.plan import Kind
from kvpipe.testing.adapters import CHANGES, PATHS, AdapterFake, name, path
from kvpipe.testing.content import VOCAB, WRONG_TOKEN, Live, Sequence
from kvpipe.testing.drafts import Drafter
from kvpipe.testing.ears import Ears, kvpipe_in, plan_in
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.held_tier import TROUBLES, DictSpec, HeldTier
from kvpipe.testing.lookups import listen_to_lookups
from kvpipe.testing.rank import QUIRKS, Ran, Rank, Reporter, Runner, Step, Wrong
from kvpipe.testing.router import listening
from kvpipe.testing.shapes import KVPIPE, Connector, Shape, make_configs
from kvpipe.trace.events import SCHEDULER
from kvpipe.transfer.base import Direction

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.scheduler import SchedulerSide
    from kvpipe.tiers.carrier import Carrier
    from kvpipe.tiers.finder import Finder
    from kvpipe.tiers.shelf import MadeTier

Move = tuple[Any, ...]
SETTLE_SECONDS_MAX = 20.0
DOCUMENTS, DOCUMENT_TOKENS_MAX, OWN_TOKENS_MAX, ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX = 4, 250, 40, 70, 330
DRAIN_STEPS_MAX = 4000
PROBES = 3
_SAVE, _LOAD = Direction.SAVE, Direction.LOAD

MOVES = {
    "add": "document, tokens of it, own tokens, answer tokens, salt, LoRA id: a new request",
    "follow": "index, own tokens, answer tokens: a request that continues a finished one",
    "reuse": "document, tokens of it, answer tokens: a new request under the id of one that is over",
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
    "freeze": "on or off",
    "bypass": "on or off",
    "later": "times: lookups answer that they do not know yet",
    "fail": "rank, is a load, layer: the next copy job fails in that layer",
    "lose": "rank, is a load: the news of the next awaited copy is lost for long",
    "quirk": "rank, two indices: the next step's hooks are not what they should be, in one way or two",
    "adapter": "kind: the LoRA adapter changes, on disk, in the ranks or both, once its requests are gone",
    "hold": "on or off: tiers answer nothing until they are let go",
    "trouble": "tier, kind: what is wrong with a tier from now on",
    "late": "whoever waits for a tier has waited long enough",
    "dummy": "hooks of a warm-up run, without a step",
    "drain": "no more arrivals: everything ends",
    "probe": "everything ends; then the last requests are asked once more, with vLLM's own cache and without it",
    "shutdown": "the engine stops, whatever is in flight",
}


class Trial:
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
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(shape.hash_tokens, sha256)
        self.shape, self._pickles, self.rng = shape, seed % 2 == 0, random.Random(seed)  # noqa: S311
        self.documents = [
            [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(40, DOCUMENT_TOKENS_MAX))]
            for _ in range(DOCUMENTS)
        ]
        config, cache = make_configs(shape, connector, policy)
        kind = AsyncScheduler if shape.asynchronous else PlainScheduler
        self.scheduler: Scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            block_size=shape.unit_tokens,
            hash_block_size=shape.hash_tokens,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.scheduler.use_v2_model_runner = shape.v2
        self.ears = Ears()
        self.faults, self.replay = self.ears.faults, self.ears.replay
        self.weights = "weights 0"
        self.excused = {"reset"}  # names of faults that a move of this trial has asked for
        self.engines: list[HeldEngine] = []
        self.ranks: list[Rank] = []
        self.kvpipe = kvpipe_in(self.scheduler.connector)
        if self.kvpipe is not None:
            self.ears.listen(self.kvpipe, SCHEDULER)
        self._carriers: list[Finder | Carrier] = []
        self.tiers = [HeldTier(f"dict-{i}") for i in range(shape.tiers)]
        self._make_ranks(config, cache)
        self._introduce(config)
        self.runners: list[Runner] = [*self.ranks] or [Reporter(shape)]
        self._aggregator = KVOutputAggregator(len(self.runners))
        self.live: dict[str, Live] = {}
        self.over: list[Live] = []
        self.prefixes: dict[bytes, tuple[Sequence, int]] = {}  # what each block hash must stand for
        self.old_keys: set[bytes] = set()  # of prefixes that were computed with other weights or adapters
        self.router = listening(self.scheduler, PATHS) if shape.events else None
        self.before = dict[bytes, bytes | None]()  # the block hash before each
        self.violations = list[str]()
        self.on_schedule: Callable[[SchedulerOutput], object] = lambda _: None
        self.on_update: Callable[[], object] = lambda: None
        self.on_reset: Callable[[], object] = lambda: None
        self.on_drain: Callable[[], object] = lambda: None
        self.on_lookup: Callable[[Request, int, tuple[int | None, bool]], object] = lambda *_: None
        self.steps = self.reads = self.added = self.deferrals = 0
        self.wrong, self.let_down = (
            list[Wrong](),
            set[str](),
        )  # requests of whose failed asynchronous loads vLLM was told
        self.is_down = self._reversed = False
        self.careful = True  # leave out what vLLM itself is known to fail at
        listen_to_lookups(self)
        self._scheduled, self._executed = deque[Step](), deque[tuple[Step, "ModelRunnerOutput"]]()
        self._drafter = Drafter(seed + 1, shape.drafts)
        self._moves: dict[str, Callable[..., None]] = {name: getattr(self, f"_{name}") for name in MOVES}

    def _make_ranks(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        self.adapters = AdapterFake()
        if self.kvpipe is not None:
            self.side.adapters.reader = self.adapters  # type: ignore[assignment]
        for index in range(self.shape.ranks):
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            mine: Any = kvpipe_in(worker)
            if mine is not None:
                self.ears.listen(mine, index)
                mine.make_tiers, mine.worker.rank = self._made_tiers, index
                self.engines.append(engine := HeldEngine(device=self.shape.device))
                mine.make_engine = lambda engine=engine: engine
            self.ranks.append(rank := Rank(index, worker, self.shape))
            if mine is not None:
                mine.worker.weigh = lambda: self.weights
                rank.before_results = self._settle
                rank.load_adapters = functools.partial(self.adapters.load, index)
                self.adapters.join(index, mine.worker.adapters)

    def _made_tiers(self, *, writes: bool) -> list[MadeTier]:  # noqa: ARG002
        spec = DictSpec.model_validate({"lanes": 64, "timeout_ms_max": 600_000})
        return [(tier.name, spec, tier) for tier in self.tiers]

    def _introduce(self, config: VllmConfig) -> None:
        """Let both sides use the trial's tiers, and shake hands, as vLLM does when the ranks have their caches."""
        if self.kvpipe is None:
            return
        if not self.ranks:
            self.side.slots_ready({0: self.side.catalog.slots})
            return
        self.kvpipe.make_tiers = self._made_tiers  # type: ignore[method-assign]
        self.kvpipe._use_tiers(config)  # noqa: SLF001
        told = {rank.index: rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.kvpipe.set_xfer_handshake_metadata_pp_aware({(0, index): one for index, one in told.items() if one})
        if not self.tiers:
            return
        sides = [self.side.staging.finder] if self.side.staging is not None else []
        carriers = [rank.kvpipe.worker.carrier for rank in self.ranks]
        self._carriers = [*sides, *(one for one in carriers if one is not None)]
        for shelf in (shelf for one in self._carriers for shelf in one.shelves):
            shelf.probe_s = 3600.0  # by the clock: a sequence would not have one outcome

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

    def hear(self) -> None:
        """Feed what was traced since the last call back through the machines."""
        self.ears.hear()

    def close(self) -> None:
        """End threads, in vLLM's order. Idempotent."""
        if not self.is_down:
            self.is_down = True
            for rank in self.ranks:
                rank.connector.shutdown()
            self.scheduler.shutdown()

    # ---- arrivals -------------------------------------------------------------------------------------------------

    def _add(self, document: int, take: int, own: int, answer: int, salt: int = 0, lora: int = 0) -> None:
        text = self.documents[document % DOCUMENTS]
        prompt = text[: 1 + take % len(text)] + self._own(own)
        self._enter(f"r{self.added}", prompt, answer, salt, lora)

    def _follow(self, index: int, own: int, answer: int) -> None:
        done = [one for one in self.over if not one.aborted]
        if done:
            last = done[index % len(done)]
            self._enter(
                f"r{self.added}", last.sequence.prompt + last.output + self._own(own), answer, last.salt, last.lora
            )

    def _reuse(self, document: int, take: int, answer: int) -> None:
        busy = set(self.scheduler.requests) | {r for s in self._in_flight_steps() for r in s.sequences}
        free = [one for one in self.over if one.id not in busy]
        if free:
            text = self.documents[document % DOCUMENTS]
            self._enter(free[take % len(free)].id, text[: 1 + take % len(text)], answer, 0, 0)

    def _own(self, tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(tokens % (OWN_TOKENS_MAX + 1))]

    def _enter(self, request_id: str, prompt: list[int], answer: int, salt: int, lora: int) -> None:
        prompt, wanted = prompt[:PROMPT_TOKENS_MAX], 1 + answer % ANSWER_TOKENS_MAX
        self.added += 1
        sequence = Sequence(prompt, f"{salt}/{lora}/{self.adapters.version(lora)}/{self.weights}")
        sequence.lora = lora
        one = self.live[request_id] = Live(request_id, sequence, wanted, salt, lora)
        previous: bytes | None = None
        for i, block_hash in enumerate(self.request_of(one, prompt + one.expected).block_hashes):
            key = self.adapters.key(block_hash, lora) if self.kvpipe is not None else block_hash
            self.old_keys.update(self.adapters.other_keys(block_hash, lora))
            self.prefixes.setdefault(key, (one.sequence, (i + 1) * self.shape.hash_tokens))
            self.before[key], previous = previous, key
        self.scheduler.add_request(self.request_of(one, prompt))

    def request_of(self, one: Live, tokens: list[int]) -> Request:
        """Return vLLM's request with `tokens` and all else that `one` has."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        return Request(
            one.id,
            tokens,
            SamplingParams(max_tokens=one.wanted, ignore_eos=True),
            None,
            block_hasher=self.hasher,
            cache_salt=str(one.salt) if one.salt else None,
            lora_request=LoRARequest(name(one.lora), one.lora, path(one.lora)) if one.lora else None,
        )

    # ---- steps ----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Steps that were scheduled and not yet given back to the scheduler."""
        return len(self._scheduled) + len(self._executed)

    def _in_flight_steps(self) -> list[Step]:
        return [*self._scheduled, *(step for step, _ in self._executed)]

    def _schedule(self) -> None:
        if self.in_flight >= (2 if self.shape.asynchronous else 1) or not self.scheduler.has_requests():
            return
        self._settle_tiers()
        output = self.scheduler.schedule()
        self.on_schedule(output)
        if self._pickles:
            output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301
        scheduled = output.num_scheduled_tokens
        sampling = frozenset(r for r in scheduled if not self.scheduler.requests[r].is_prefill_chunk)
        self._scheduled.append(Step(output, sampling, {r: self.live[r].sequence for r in scheduled}))

    def _execute(self) -> None:
        if not self._scheduled:
            return
        step = self._scheduled.popleft()
        drafts = self._drafts(step)
        ran = [runner.execute(step, drafts) for runner in self.runners]
        self._executed.append((step, self._result(step, ran)))
        self.steps += 1

    def _update(self) -> None:
        if not self._executed:
            self._execute()
        if not self._executed:
            return
        step, result = self._executed.popleft()
        told = result.kv_connector_output
        self.let_down |= told.failed_recving if told is not None else set()
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for one in outputs.outputs:
                self.live[one.request_id].output += one.new_token_ids
        for request_id in [r for r in self.live if r not in self.scheduler.requests]:
            self._leave(self.live.pop(request_id))
        if self.shape.drafts and not self.shape.asynchronous:
            self._propose(step)
        self.on_update()

    def _step(self, count: int = 1) -> None:
        for _ in range(1 + count % 8):
            while self.in_flight < (2 if self.shape.asynchronous else 1) and self.scheduler.has_requests():
                self._schedule()
            self._update()

    def _leave(self, one: Live) -> None:
        self.over.append(one)
        expected = one.expected
        if one.output != (expected[: len(one.output)] if one.aborted else expected):
            self.violations.append(f"right_answers: {one.id} said {one.output} instead of {expected}")

    def _result(self, step: Step, ran: list[Ran]) -> ModelRunnerOutput:
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
                        [] if r not in step.sampling else [WRONG_TOKEN] if r in bad else one.said[r] for r in ids
                    ],
                    kv_connector_output=None if kv_output.is_empty() else kv_output,
                )
            )
        result = results[0] if len(results) == 1 else self._aggregator.aggregate(results)
        assert result is not None  # noqa: S101
        told = result.kv_connector_output
        invalid: set[int] = told.invalid_block_ids if told is not None else set()
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

    def _drafts(self, step: Step) -> dict[str, list[int]]:
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

    def _propose(self, step: Step) -> None:
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
            self.excused |= {"tier_failed", "chunk_damaged"}
            if not any(one.trouble == "down" for one in self.tiers):
                self._mend()

    def _mend(self) -> None:
        """Let everybody hear that the tiers are back."""
        breakers = [b for one in self._carriers for shelf in one.shelves for b in shelf.breakers.values()]
        limit = time.monotonic() + SETTLE_SECONDS_MAX
        for one in self._carriers:
            one.hurry()
        while not all(breaker.allows for breaker in breakers) and time.monotonic() < limit:
            time.sleep(0.0001)

    def _late(self) -> None:
        if self.kvpipe is not None and self.side.staging is not None:
            self.side.staging.hurry()

    def _adapter(self, kind: int) -> None:
        """Requests that began with other bytes are none of kvpipe's business, nor are hits of vLLM's own cache."""
        if self.kvpipe is None:
            return
        for place in reversed([place for place, one in enumerate(self.live.values()) if one.lora]):
            self._abort(place)
        while self._scheduled:  # the ranks' own requests are as old as what they hold
            self._execute()
        self.scheduler.kv_cache_manager.evict_blocks(set(range(self.shape.blocks)))
        held = self.adapters.change(CHANGES[kind % len(CHANGES)])
        self.excused |= {"adapter_changed", "job_failed", "save_failed", "load_failed"}
        if not self.shape.failing:  # no load may fail: the scheduler's side hears of it before it plans the next
            self.side.adapters.told(held)

    def _shutdown(self) -> None:
        self.close()

    def _reset(self, connector: bool, running: bool) -> None:  # noqa: FBT001
        if running and self.careful and (self.in_flight or self._held_apart()):  # vLLM itself may raise
            return
        if connector:
            self.on_reset()
        doubtful = self.kvpipe is not None and self.side.weights.doubtful
        self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        if self.kvpipe is not None and not doubtful:  # the weights are the same, and nobody waits to hear it
            self.side.weighed(dict.fromkeys(range(max(1, self.shape.ranks)), (self.side.weights.ask(), self.weights)))

    def _weights(self, which: int) -> None:
        if self.kvpipe is None or not self.ranks or self.side.weights.doubtful:
            return
        while self._scheduled:  # before the call that changes them
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
            return self.shape.async_loads
        manager, running = self.scheduler.kv_cache_manager, [r.request_id for r in self.scheduler.running]
        tables = (m.req_to_blocks.get(r, ()) for m in manager.coordinator.single_type_managers for r in running)
        theirs = {block.block_id for table in tables for block in table if not block.is_null}
        return len(theirs) < manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()

    def _freeze(self, on: bool) -> None:  # noqa: FBT001
        if self.kvpipe is not None:
            self.kvpipe.set_freeze(on)

    def _bypass(self, on: bool) -> None:  # noqa: FBT001
        if self.kvpipe is not None:
            self.side.bypass = on

    def _later(self, times: int) -> None:
        self.deferrals = times % 6

    def _fail(self, rank: int, load: bool, layer: int) -> None:  # noqa: FBT001
        if self.engines and (self.shape.failing or not load):
            self.engines[rank % len(self.engines)].arm(_LOAD if load else _SAVE, layer)
            self.excused |= {"job_failed", "save_failed", "load_failed"}

    def _lose(self, rank: int, load: bool) -> None:  # noqa: FBT001
        if self.engines and (self.shape.failing or not load):
            self.engines[rank % len(self.engines)].lose(_LOAD if load else _SAVE)
            self.excused |= {"copy_timeout", "job_failed", "save_failed", "load_failed"}

    def _quirk(self, rank: int, first: int, second: int) -> None:
        for index in {first, second} if self.ranks else ():
            self._add_quirk(self.ranks[rank % len(self.ranks)], list(QUIRKS)[index % len(QUIRKS)])

    def _add_quirk(self, rank: Rank, name: str) -> None:
        if name in {"no_waits", "no_layers", "no_start", "early_end"} and not self.shape.failing:
            return
        if name == "early_end" and self.shape.mode == "step":
            return  # nothing else tells step mode that the forward is over
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
        self._hold(on=False)
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
        """Wait until kvpipe's loop threads have heard of every completion, so that a sequence has one outcome."""
        for engine, rank in zip(self.engines, self.ranks, strict=bool(self.engines)):
            pipeline = rank.kvpipe.worker.pipeline
            if not pipeline._loop.settle(SETTLE_SECONDS_MAX):  # noqa: SLF001
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
