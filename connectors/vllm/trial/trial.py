"""A connector on trial: vLLM's real scheduler, the connector on both sides, fake ranks, and moves that disturb them.

`Trial.do(move)` makes one move. A move that is not possible at that moment does nothing, so any list of moves can be
replayed and shrunk. Every move is a tuple of a name and JSON values. `MOVES` lists the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvpipe.connectors.vllm.trial.adapters import PATHS
from kvpipe.connectors.vllm.trial.arrivals import DOCUMENTS
from kvpipe.connectors.vllm.trial.disturbances import Disturbances
from kvpipe.connectors.vllm.trial.limits import LOCALITIES
from kvpipe.connectors.vllm.trial.neighbours import TrialMemory
from kvpipe.connectors.vllm.trial.rank import STOPS, Rank, Reporter
from kvpipe.connectors.vllm.trial.router import listening
from kvpipe.connectors.vllm.trial.shapes import CONSUMER, KVPIPE, PRODUCER, Connector, Shape, make_cache, make_configs
from kvpipe.connectors.vllm.trial.steps import UNPAUSED, ignore
from kvpipe.connectors.vllm.trial.tap import TraceTap, kvpipe_in
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.held_tier import DictSpec
from kvpipe.tiers import carrier
from kvpipe.trace.events import SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from kvpipe.tiers.guard import MadeTier

Move = tuple[Any, ...]
DRAIN_STEPS_MAX, PROBES = 4000, 3
LOOKUPS_PER_REPEAT = 5

MOVES = {
    "add": "document, tokens of it, own tokens, answer tokens, salt, LoRA id: a new request arrives",
    "follow": "index, own tokens, answer tokens: a request arrives that continues a finished request",
    "reuse": "document, tokens of it, answer tokens: a request arrives with the id of a finished request",
    "embed": "document, tokens of it, own tokens, answer tokens: a request arrives whose document is given as "
    "embeddings",
    "session": "document, tokens of it, answer tokens: a streaming session begins, which will get more input",
    "more": "index, own tokens, answer tokens: a session gets more input",
    "end": "index: a session ends and gets no more input",
    "schedule": "the scheduler schedules a step",
    "execute": "the ranks run the oldest scheduled step",
    "update": "the scheduler processes the results of the oldest step",
    "step": "number: whole steps are scheduled, run and processed",
    "abort": "index: a request is aborted",
    "tick": "saves, loads: this many held copies complete; if both are 0, late completions arrive",
    "pace": "saves, loads, backwards: from now on copies complete in groups of this size; 0: only when a thread "
    "waits for them",
    "again": "rank, ahead: the last completion is delivered again, and the completion of the copy `ahead` copies "
    "later twice",
    "reset": "connector, running: the prefix cache is reset",
    "weights": "which: all requests are aborted, then the weights change or stay the same; no cache is reset",
    "pause": "what, steps: for this many steps vLLM admits no new request, schedules nothing, or postpones prefills",
    "freeze": "on or off: the freeze switch is set",
    "bypass": "on or off: the bypass switch is set",
    "later": "times: this many lookups are postponed",
    "fail": "rank, whether a load, layer: the next copy of this kind fails in this layer",
    "lose": "rank, whether a load, in time: the next wait for a copy times out; the copy's completion comes late, "
    "or just in time",
    "quirk": "rank, two indices: the rank's next step has one or two quirks (`QUIRKS` in `rank.py`)",
    "adapter": "kind: the requests of the LoRA adapter are aborted, then it changes on disk, in the ranks, or in both",
    "hint": "which, seconds: the next request has good or bad hints, if the shape has hints",
    "limit": "which, tokens: the next request has valid or invalid limits, if the shape has limits",
    "hold": "on or off: tiers hold their answers back",
    "trouble": "tier, kind: from now on a tier has a fault of this kind",
    "late": "all waits for tiers time out",
    "operate": "index, what, tokens: an operator pins (or fetches), unpins or evicts a prompt, if the shape has "
    "operators",
    "dummy": "the ranks call the hooks of a warm-up run, without a step",
    "drain": "no more requests arrive, and steps run until every request has ended",
    "probe": "drain, then the last requests are repeated, with vLLM's own cache and without it",
    "shutdown": "place in a step, or 0 for between steps: the engine stops, perhaps with copies in flight",
}


@functools.cache
def measured_once() -> Callable[[Any, Iterable[Any]], str]:
    """Return `numerics.measured` with a cache, because all ranks of a trial measure in the same process."""
    from kvpipe.connectors.vllm.identity.numerics import measured

    remembered = functools.cache(measured)
    return lambda device, dtypes: remembered(device, tuple(dtypes))


class Trial(Disturbances):
    """One engine on trial. A broken invariant is appended to `violations`, and raises no exception."""

    def __init__(
        self,
        shape: Shape,
        seed: int = 0,
        *,
        connector: Connector = KVPIPE,
        memory: TrialMemory | None = None,
    ) -> None:
        """`seed` determines the documents. `memory` is the memory of an engine beside this trial's engine.

        If `seed` is even, messages between the sides are pickled, as between processes.
        """
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from kvpipe.connectors.vllm.connector import KVPipeConnector

        super().__init__(shape, seed)
        self.beside: Trial | None = None
        """The producer of a consumer, or the other engine on a node's memory."""
        self._memory = memory or (TrialMemory() if shape.engines else None)
        if shape.role == CONSUMER:
            self.beside = Trial(shape._replace(role=PRODUCER), seed, connector=connector)
            self.tiers = self.beside.tiers
        elif shape.engines > 1:
            self.beside = Trial(shape._replace(engines=1), seed, connector=connector, memory=self._memory)
            self.tiers = self.beside.tiers
        config, cache = make_configs(shape, connector)
        kind = AsyncScheduler if shape.asynchronous else PlainScheduler
        with patch.object(KVPipeConnector, "make_tiers", self._made_tiers), self._attaching():
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
        self.kvpipe = kvpipe_in(self.scheduler.connector)
        if self.kvpipe is not None:
            self.tap.attach(self.kvpipe, SCHEDULER)
        self._make_ranks(config)
        self._introduce()
        self.runners = [*self.ranks] or [Reporter(shape)]
        self.aggregator = KVOutputAggregator(len(self.runners))
        self.router = listening(self.scheduler, PATHS) if shape.events else None
        if self.router is not None and shape.engines > 1 and self.beside is not None and self.beside.router is not None:
            self.router.share(self.beside.router)
        self.on_lookup: Callable[[Request, int, tuple[int | None, bool]], object] = ignore
        self.on_drain: Callable[[], object] = ignore
        self.is_down = False
        _listen_to_lookups(self)
        self._moves: dict[str, Callable[..., None]] = {name: getattr(self, f"_{name}") for name in MOVES}
        if shape.role == CONSUMER and self.beside is not None:
            for document in range(DOCUMENTS):
                self.beside.do(("add", document, -1, 0, 0))
            self.beside.do(("drain",))

    def _attaching(self, rank: int = 0) -> AbstractContextManager[object]:
        return nullcontext() if self._memory is None else self._memory.attaching(rank)

    def _make_ranks(self, config: VllmConfig) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        if self.kvpipe is not None:
            self.side.adapters.reader, self.side.prefetching.idle_s_max = self.adapters, 3600.0  # type: ignore[assignment]
            self.begin_hints()
            if self.side.staging is not None:
                self.side.staging.patience.await_s = 0.0  # a wait by the clock would make outcomes random
            if self.shape.slow and self.side.staging is not None:
                patience = self.side.staging.patience
                patience.pace.s_per_token, patience.rates = 1e-12, dict.fromkeys(range(len(self.tiers)), 1.0)
        for index in range(self.shape.ranks):
            cache = make_cache(self.shape, index)
            with self._attaching(index):
                worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            mine: Any = kvpipe_in(worker)
            if mine is not None:
                self.tap.attach(mine, index)
                mine.make_tiers, mine.worker_role.rank = self._made_tiers, index
                self.engines.append(engine := HeldEngine(device=self.shape.device))
                mine.make_engine = lambda engine=engine: engine
                mine.hooks = functools.partial(self._hooks, mine.hooks)
            self.ranks.append(rank := Rank(index, worker, self.shape))
            if mine is not None:
                self.tap.count_layers(mine, index)
                mine.worker.weigh = lambda: self.weights
                rank.before_results, mine.worker.step.watch = self._settle, self.tap.step_moved
                rank.load_adapters = functools.partial(self.adapters.load, index)
                self.adapters.join(index, mine.worker.adapters)

    def _hooks(self, hooks: Callable[[Any], Any], caches: Any) -> Any:  # noqa: ANN401
        """Return the hooks that this machine's runner calls, with the changes that the shape's runner needs."""
        from kvpipe.connectors.vllm.hooks import is_replayed

        fences_late = self.shape.device and not self.shape.v2
        return hooks(caches)._replace(replayed=is_replayed if self.shape.graphs else None, fences_late=fences_late)

    def _made_tiers(self, *, writes: bool) -> list[MadeTier]:  # noqa: ARG002
        keys = {"lanes": 64, "timeout_ms_max": 600_000}
        specs = [DictSpec.model_validate(keys | {"announce": locality}) for locality in LOCALITIES]
        return [(tier.name, spec, tier) for tier, spec in zip(self.tiers, specs, strict=False)]

    def _introduce(self) -> None:
        """Make the handshake, as vLLM does when the ranks have their caches.

        Then the ranks send their first reports, as with an empty step.
        """
        from vllm.v1.outputs import KVConnectorOutput

        if self.kvpipe is None:
            return
        if not self.ranks:
            self.side.ranks_ready({0: self.side.catalog.slots}, ())
            return
        connector: Any = self.scheduler.connector
        with patch("kvpipe.connectors.vllm.identity.numerics.measured", measured_once()):
            hands = {(self.shape.stage_of(r.index), r.index): r.connector.get_handshake_metadata() for r in self.ranks}
        connector.set_xfer_handshake_metadata_pp_aware({rank: hand for rank, hand in hands.items() if hand is not None})
        if not self.shape.unmet:
            reports: list[Any] = [rank.connector.build_connector_worker_meta() for rank in self.ranks]
            report = functools.reduce(lambda one, other: one.aggregate(other), reports)
            connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        if not self.tiers:
            return
        sides = [self.side.staging.finder] if self.side.staging is not None else []
        carriers = [rank.kvpipe.worker.carrier for rank in self.ranks]
        self._carriers += [*sides, *(one for one in carriers if one is not None)]
        for tier in (tier for one in self._carriers for tier in one.tiers):
            tier.probe_s = 3600.0  # a probe by the clock would make a sequence's outcome random
        # both engines wait together, because a held call of a tier may belong to either engine
        if self.beside is not None:
            self.beside._carriers += self._carriers  # noqa: SLF001
            self._carriers = self.beside._carriers  # noqa: SLF001

    def do(self, move: Move) -> None:
        """Make one move. After a shutdown no move has an effect."""
        if self.is_down:
            return
        if self.beside is not None:
            self.beside.do(move)
        if self._memory is not None and self.beside is not None:
            self._memory.count_move()
        self._moves[move[0]](*move[1:])

    def replay_traces(self) -> None:
        """Replay the trace events since the last call through the state machines."""
        self.tap.replay_new()

    def close(self) -> None:
        """End all threads, in vLLM's order. A second call does nothing."""
        if self.beside is not None:
            self.beside.close()
        if not self.is_down:
            self.is_down = True
            with self._no_drain_of_held_tiers():
                for rank in self.ranks:
                    rank.connector.shutdown()
                self.scheduler.shutdown()
        if self._memory is not None and self.beside is not None:
            self._memory.close()

    def _no_drain_of_held_tiers(self) -> AbstractContextManager[object]:
        """Make a shutdown drop stores at once while tiers are held, because these stores would never end."""
        held = any(tier.is_held for tier in self.tiers)
        return patch.object(carrier, "DRAIN_S_MAX", 0.0) if held else nullcontext()

    def _shutdown(self, place: int = 0) -> None:
        if place and not self._scheduled:
            while self.in_flight:
                self._update()
            self._schedule()
        if place:
            for rank in self.ranks:
                rank.quirks.append(STOPS[place])
            with self._no_drain_of_held_tiers():
                self._execute()
            self._finish()
        self.close()

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
                if not self._scheduled[-1].output.total_num_scheduled_tokens:  # the trial waits only for copies
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


def _listen_to_lookups(trial: Trial) -> None:
    """Make the next `deferrals` lookups return None, as with a slow tier. Repeat some of kvpipe's lookups."""
    if trial.kvpipe is not None:
        _report_lookups(trial, trial.kvpipe)
    shape = trial.shape
    if shape.drafter and shape.states and not shape.masks:  # vLLM caches states, but its lookups must find none
        trial.scheduler.kv_cache_manager.prefix_cache_lookup_enabled = lambda _: False  # type: ignore[method-assign]
    lookups = 0
    connector: Any = trial.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def lookup(request: Request, computed: int) -> tuple[int | None, bool]:
        nonlocal lookups
        lookups += 1
        answer: tuple[int | None, bool] = ask(request, computed)
        if trial.kvpipe is not None and not lookups % LOOKUPS_PER_REPEAT:
            again = ask(request, computed)
            if again != answer:
                trial.violations.append(f"lookups_are_idempotent: {request.request_id}: {answer}, then {again}")
        if trial.deferrals:
            trial.deferrals -= 1
            return None, False
        return answer

    connector.get_num_new_matched_tokens = lookup


def _report_lookups(trial: Trial, connector: Any) -> None:  # noqa: ANN401
    """Call `on_lookup` with each lookup of kvpipe and its answer."""
    ask = connector.get_num_new_matched_tokens

    def lookup(request: Request, computed: int) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = ask(request, computed)
        trial.on_lookup(request, computed, answer)
        return answer

    connector.get_num_new_matched_tokens = lookup
