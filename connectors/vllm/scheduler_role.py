"""The scheduler role of `KVPipeConnector`: the methods that vLLM's scheduler calls."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpipe.config.control import validate_control_file, watch_control_file
from kvpipe.config.tracing import tracing
from kvpipe.connectors.vllm import spans, support
from kvpipe.connectors.vllm.block_notes import BlockMaker
from kvpipe.connectors.vllm.doctor_facts import first_hash
from kvpipe.connectors.vllm.engine_protocols import ManagedBlocks, Remedies, make_room
from kvpipe.connectors.vllm.hints import hints_of, is_prefilled_elsewhere
from kvpipe.connectors.vllm.identity import drafters, shares
from kvpipe.connectors.vllm.identity.source import sees_a_part
from kvpipe.connectors.vllm.identity.spaces import Spaces
from kvpipe.connectors.vllm.identity.weights import WeightCalls
from kvpipe.connectors.vllm.kv_events import KvEvents
from kvpipe.connectors.vllm.limits import limits_of
from kvpipe.connectors.vllm.metadata import Introduction, PlanMetadata, ReportMetadata
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.connectors.vllm.remedies import mixed_prompts
from kvpipe.connectors.vllm.remedies.uncomputed import forget_uncomputed
from kvpipe.manage.start import read_token
from kvpipe.protocol.engine import LATER
from kvpipe.scheduler import gauges
from kvpipe.scheduler.hooks import EngineFacts, EngineHooks
from kvpipe.scheduler.records import MEMORY
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.threads.loop import LoopThread
from kvpipe.tiers.guard import FIND, GuardedTier, guarded
from kvpipe.trace.events import SCHEDULER, FreezeSwitched
from kvpipe.trace.log import info, warn

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.roles import Door, RoleFacts


SOURCES: Final = {"disk": CacheHitSource.DISK, "network": CacheHitSource.EXTERNAL_UNSPECIFIED}
"""vLLM's source of a hit, by the medium of a tier. vLLM has no name of its own for a remote store."""
POOL_REMEDY: Final = "restart the engine; if it is repeated, set pool='private', or remove what private_pool warns of"


class SchedulerRole:
    """The scheduler's part of a connector. There is one per engine."""

    def __init__(self, door: Door, facts: RoleFacts) -> None:
        """Make the checks that `facts` does not cover, and the scheduler side.

        `door` makes the tiers, so that tests can replace the tiers.
        """
        config, cache = facts.config, facts.cache
        self._config, self.settings, self.geometry = config, facts.settings, facts.geometry
        self._met: dict[int, Introduction] = {}  # by rank
        if self.settings.manage:
            read_token(self.settings)  # an invalid token raises before any thread is started
        self.hash_tokens = tokens = support.hash_tokens(cache, self.geometry)
        if (size := config.parallel_config.decode_context_parallel_size) > 1:
            warn("context_parallelism", decode_context_parallel_size=size, proven_on="vLLM's schedulers, not a device")
        if drafted := drafters.unproven(config):
            warn("drafts", method=drafted, proven_on="vLLM's schedulers, not a device")
        if size := self.geometry.match_tokens:
            warn("states_within_blocks", prefix_match_unit=size, proven_on="vLLM's schedulers, not a device")
        self.recorder, self.writer = tracing(
            self.settings, facts.engine, "scheduler", SCHEDULER, len(self.geometry.layers)
        )
        self._ends = ExitStack()
        self._ends.callback(self.writer.close)
        adapts = config.lora_config is not None and config.lora_config.enable_tower_connector_lora
        tiers = guarded(door.make_tiers(writes=False), (FIND,), self.recorder)
        self._sources = {MEMORY: CacheHitSource.HOST} | {tier.name: SOURCES[tier.spec.medium] for tier in tiers}
        shared = bool(tiers) or facts.node is not None
        self._spaces = Spaces(config, cache, self.geometry, tiers=shared, bound=self._report_sharing)
        self._remedies = Remedies(self.geometry, make_room(config, self.geometry), adapts_encoder=adapts)
        announces = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        self.events = KvEvents(cache, self.geometry, tokens, tiers) if announces else None
        self.scheduler = self._make_side(facts, tokens, tiers)
        if self.scheduler.staging is not None:
            self.scheduler.staging.finder.first_hash = first_hash(config.cache_config.prefix_caching_hash_algo)
        self.counters, self.scheduler.weights.awaited = self.scheduler.counters, True
        self._watch = WeightCalls(config, self.scheduler)
        self._watch.doubted = self._remedies.encoded.doubted
        self._watch.encoder_reset = self._remedies.encoded.reset
        if config.model_config.enable_prompt_embeds:
            mixed_prompts.extend_hashes()
        often, seldom = (functools.partial(one, self.scheduler) for one in (gauges.totals, gauges.quota_totals))
        requests = self.scheduler.requests  # every tracked request except sessions computes in a later step
        self.meter = Meter(
            often, seldom, self.counters.durations.take,
            can_wait=lambda: len(requests.tracked) > len(requests.sessions),
        )  # fmt: skip
        if self.settings.control_file is not None:
            validate_control_file(self.settings.control_file)
            watch = functools.partial(watch_control_file, self.settings.control_file, self.set_freeze)
            self._ends.callback(LoopThread("kvpipe-control", tasks=(watch,)).stop)
        self.counters.on_fault = self.recorder.fault

    def at_end(self, call: Callable[[], object]) -> None:
        """Call `call` in `shutdown`. The calls are made in the reverse order of their registration."""
        self._ends.callback(call)

    def _make_side(self, facts: RoleFacts, tokens: int, tiers: Sequence[GuardedTier]) -> SchedulerSide:
        """Return the scheduler side. `tokens` is the number of tokens per block hash."""
        config, transfer = facts.config, facts.transfer
        return SchedulerSide(
            self.settings,
            self.geometry,
            EngineFacts(
                hash_tokens=tokens,
                ranks=config.parallel_config.world_size,
                pipeline_stages=config.parallel_config.pipeline_parallel_size,
                saves=transfer.is_kv_producer,
                loads=transfer.is_kv_consumer,
                waits_idle=config.parallel_config.data_parallel_size == 1,  # data-parallel ranks step together
            ),
            EngineHooks(
                recovery=self._remedies,
                published=self.events,
                space_of=self._spaces.space,
                also_of=self._spaces.also,
                spans_of=spans.spans_of(config),
                note_of=None if facts.node is None else BlockMaker(self.geometry, tokens).note,
                priority_of=attrgetter("priority") if config.scheduler_config.policy == "priority" else None,
            ),
            tiers=tiers,
            trace=self.recorder,
            node=None if facts.node is None else facts.node.pool,
        )

    def set_freeze(self, on: bool) -> None:  # noqa: FBT001
        """Stop saving from the next step on if `on`, else resume saving. Hits are served in both cases."""
        if self.scheduler.switches.freeze != on:
            self.scheduler.switches.freeze = on
            self.counters["freeze_on" if on else "freeze_off"] += 1
            self.recorder.put(FreezeSwitched(*self.recorder.of("", 0), on=on))

    def set_bypass(self, on: bool) -> None:  # noqa: FBT001
        """Stop saving and loading from the next step on if `on`, else resume both."""
        if self.scheduler.switches.bypass != on:
            self.scheduler.switches.bypass = on
            self.counters["bypass_on" if on else "bypass_off"] += 1

    def stats(self) -> dict[str, int]:
        """Return counters and gauges of the scheduler side."""
        return self.scheduler.stats()

    def _report_sharing(self, common: str, source: str) -> None:
        """Count and log the reason why engines with other numbers of ranks cannot use this engine's chunks."""
        try:
            staging, why = self.scheduler.staging, shares.bound_by(self._config, common, source)
            if staging is not None and staging.space.bind(why) and why:
                info("tiers_of_one_layout", why=why, means=shares.BOUND_BY[why])
        except Exception as e:  # noqa: BLE001  (tiers do not depend on this log line)
            self.counters.fault("contained_error", where="_report_sharing", error=repr(e))

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the engine's cache manager, which holds the block tables."""
        blocks = ManagedBlocks(kv_cache_manager)
        self.scheduler.bind(blocks)
        self._remedies.bind(blocks, self.counters)
        if self._config.scheduler_config.policy == "priority":
            forget_uncomputed(kv_cache_manager, blocks, self._remedies.block_tokens, self.counters)
        self._watch.watch_resets(kv_cache_manager)
        if self.events is not None:
            self.events.watch(kv_cache_manager, self.scheduler.orders.turns.taken)

    def on_new_request(self, request: Request) -> None:
        """Begin to track a request. `kv_transfer_params` that are not a mapping are replaced by None."""
        if not isinstance(request.kv_transfer_params, Mapping | None):
            request.kv_transfer_params = None  # vLLM's scheduler calls `get` on the parameters next
        if self.events is not None:
            self.events.arrived(request)
        ignore = functools.partial(self.counters.count, "limits_ignored")
        self.scheduler.on_new_request(request, hints_of(request), limits_of(request, ignore))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (how many more tokens can be loaded, whether asynchronously). Takes no lease.

        If the count is None, vLLM calls again in a later step.
        """
        answer = self.scheduler.lookup(request, num_computed_tokens, elsewhere=is_prefilled_elsewhere(request))
        return (None, False) if answer is LATER else answer

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Lease the chunks of the hit and plan their load. vLLM may use all of the hit, a part of it, or nothing."""
        try:
            if request.mm_features:
                self._remedies.encoded.began(request.request_id, adapted=request.lora_request is not None)
        finally:  # vLLM expects the load, so plan it even if the call above raises
            self.scheduler.admitted(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return how many of the loaded tokens come from each source. vLLM may load only a part of the hit."""
        sources, left = Counter[CacheHitSource](), num_external_tokens
        for tier, tokens in self.scheduler.hit_by_tier(request).items():
            sources[self._sources[tier]] += min(tokens, left)
            left -= min(tokens, left)
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        """Return the step's plan for all ranks. The plan contains loads, saves and tier orders."""
        return PlanMetadata(self.scheduler.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the summed reports of all ranks, and the blocks that vLLM recomputes after failed loads."""
        report = connector_output.kv_connector_worker_meta
        try:
            if connector_output.invalid_block_ids:
                self.scheduler.invalidated(connector_output.invalid_block_ids)
        finally:  # ranks report each job once, so a dropped report is never repeated
            if isinstance(report, ReportMetadata):
                if report.introductions:
                    self.meet(report.introductions)
                self.scheduler.reported(report.report)

    def meet(self, introductions: Sequence[Introduction]) -> None:
        """Process the introductions of ranks. Never raises."""
        try:
            self._meet(introductions)
        except Exception as e:  # noqa: BLE001  (the report must still be taken)
            self.counters.fault("contained_error", where="meet", error=repr(e))

    def _meet(self, introductions: Sequence[Introduction]) -> None:
        """Process the introductions of ranks. If all ranks have tiers, use tiers in the resulting namespace."""
        side = self.scheduler
        side.orders.turns.take()
        self._met |= {one.rank: one for one in introductions}
        reported = [one for _, one in sorted(self._met.items())]
        ranks, tiers = self._config.parallel_config.world_size, side.staging is not None or side.node is not None
        pool = b"" if side.node is None else side.node.token
        if others := [one.rank for one in reported if one.pool != pool]:
            means = "their jobs fail, and the engine serves without a cache"
            warn("pool_differs", ranks=others, pool="node" if pool else "private", means=means, remedy=POOL_REMEDY)
        if tiers and not self._spaces.agree(reported) and not others:
            self.counters.fault("tiers_not_on_all_ranks", ranks=ranks, reported=len(reported))
        weights = [one.weights for one in reported] if len(reported) == ranks else []
        side.catalog.limit(min(one.slots for one in reported))
        heads = {one.heads for one in reported}
        agreed = heads.pop() if len(heads) == 1 else ()
        side.ranks_ready({}, weights, agreed)
        if self._spaces.agreed and not side.weights.digest:
            apart = sees_a_part(self._config.parallel_config)
            what = "experts lie in other engines" if apart else "install kvpipe where every process of vLLM finds it"
            unused = "tiers are not used" if side.node is None else "other engines' chunks are not used"
            warn("weights_not_known", remedy=f"{unused}: {what}")

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request. vLLM may free the blocks at once: later writes wait for the request's last save."""
        self.scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must continue to run steps, because some rank has not reported all its jobs yet."""
        return self.scheduler.pending

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events since the last call: blocks that lookups can find now, or can no longer find."""
        if self.events is None:
            return ()
        self.scheduler.orders.turns.take()
        return self.events.take()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes of the scheduler side's metrics since the last call, or None if nothing has changed."""
        return self.meter.take()

    def reset_cache(self) -> bool:
        """Forget every chunk, including chunks in tiers. A reset for a sleep forgets nothing. Returns True."""
        return self._watch.sleep.forget()

    def shutdown(self) -> None:
        """End all threads. Idempotent."""
        with self._ends:  # ends the parts in reverse order, and each part even if ending another part raises
            self._ends.callback(self.scheduler.shutdown)
