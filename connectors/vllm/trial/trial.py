"""A connector on trial: vLLM's real scheduler, the connector on both sides, fake ranks, and moves that disturb them.

`Trial.do(move)` makes one move; a move that is not possible now does nothing, so any list of moves is a sequence that
can be replayed and shrunk. Every move is a tuple of a name and JSON values: `MOVES` lists them.
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
from kvpipe.connectors.vllm.trial.lookups import listen_to_lookups
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


@functools.cache
def _measured_once() -> Callable[[Any, Iterable[Any]], str]:
    """Return `numerics.measured` with a memory: all ranks of a trial are in one process."""
    from kvpipe.connectors.vllm.numerics import measured

    remembered = functools.cache(measured)
    return lambda device, dtypes: remembered(device, tuple(dtypes))


class Trial(Disturbances):
    """One engine. `violations` grows when an invariant is broken; nothing is raised for that."""

    def __init__(
        self,
        shape: Shape,
        seed: int = 0,
        *,
        connector: Connector = KVPIPE,
    ) -> None:
        """`seed`: the documents. If it is even, what the two sides exchange is pickled, as between processes."""
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from kvpipe.connectors.vllm.connector import KVPipeConnector

        super().__init__(shape, seed)
        self.producer: Trial | None = None
        if shape.role == CONSUMER:
            self.producer = Trial(shape._replace(role=PRODUCER), seed, connector=connector)
            self.tiers = self.producer.tiers
        config, cache = make_configs(shape, connector)
        kind = AsyncScheduler if shape.asynchronous else PlainScheduler
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
        self.kvpipe = kvpipe_in(self.scheduler.connector)
        if self.kvpipe is not None:
            self.tap.attach(self.kvpipe, SCHEDULER)
        self._make_ranks(config)
        self._introduce()
        self.runners = [*self.ranks] or [Reporter(shape)]
        self.aggregator = KVOutputAggregator(len(self.runners))
        self.router = listening(self.scheduler, PATHS) if shape.events else None
        self.on_lookup: Callable[[Request, int, tuple[int | None, bool]], object] = ignore
        self.on_drain: Callable[[], object] = ignore
        self.is_down = False
        listen_to_lookups(self)
        self._moves: dict[str, Callable[..., None]] = {name: getattr(self, f"_{name}") for name in MOVES}
        if self.producer is not None:
            for document in range(DOCUMENTS):
                self.producer.do(("add", document, -1, 0, 0))
            self.producer.do(("drain",))

    def _make_ranks(self, config: VllmConfig) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        if self.kvpipe is not None:
            self.side.adapters.reader, self.side.prefetching.idle_s_max = self.adapters, 3600.0  # type: ignore[assignment]
            self.begin_hints()
            if self.side.staging is not None:
                self.side.staging.patience.await_s = 0.0  # by the clock: a sequence would not have one outcome
            if self.shape.slow and self.side.staging is not None:
                patience = self.side.staging.patience
                patience.pace.s_per_token, patience.rates = 1e-12, dict.fromkeys(range(len(self.tiers)), 1.0)
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
        from kvpipe.connectors.vllm.hooks import is_replayed

        fences_late = self.shape.device and not self.shape.v2
        return hooks(caches)._replace(replayed=is_replayed if self.shape.graphs else None, fences_late=fences_late)

    def _made_tiers(self, *, writes: bool) -> list[MadeTier]:  # noqa: ARG002
        spec = DictSpec.model_validate({"lanes": 64, "timeout_ms_max": 600_000})
        return [(tier.name, spec, tier) for tier in self.tiers]

    def _introduce(self) -> None:
        """Shake hands, as vLLM does when the ranks have their caches. Then the ranks report, as with an empty step."""
        from vllm.v1.outputs import KVConnectorOutput

        if self.kvpipe is None:
            return
        if not self.ranks:
            self.side.ranks_ready({0: self.side.catalog.slots}, ())
            return
        connector: Any = self.scheduler.connector
        with patch("kvpipe.connectors.vllm.numerics.measured", _measured_once()):
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
            tier.probe_s = 3600.0  # by the clock: a sequence would not have one outcome
        if self.producer is not None:  # who waits for one waits for both: calls that a tier holds may be either's
            self.producer._carriers += self._carriers  # noqa: SLF001
            self._carriers = self.producer._carriers  # noqa: SLF001

    def do(self, move: Move) -> None:
        """Make one move. None is possible after a shutdown."""
        if self.is_down:
            return
        if self.producer is not None:
            self.producer.do(move)
        self._moves[move[0]](*move[1:])

    def replay_traces(self) -> None:
        """Replay what was traced since the last call through the machines."""
        self.tap.replay_new()

    def close(self) -> None:
        """End threads, in vLLM's order. Idempotent."""
        if self.producer is not None:
            self.producer.close()
        if not self.is_down:
            self.is_down = True
            with self._no_drain_of_held_tiers():
                for rank in self.ranks:
                    rank.connector.shutdown()
                self.scheduler.shutdown()

    def _no_drain_of_held_tiers(self) -> AbstractContextManager[object]:
        """Let a shutdown give up stores at once while tiers are held, because no store would end."""
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
