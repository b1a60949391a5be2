"""An engine in virtual time around kvpipe's real scheduler side: lookups, leases, loads, saves, staging and stores.

The engine schedules as vLLM does. Requests are served in the order of their arrival, as long as the step has tokens
left and the device has blocks left. Running prompts continue before other prompts begin. The engine first asks its own
prefix cache, which evicts the least recently used chunks, and then kvpipe.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from unittest.mock import patch

from benchmarks.replay.model import Host, Link, Model, Store
from benchmarks.replay.tiers import Clock, VirtualFinder, VirtualTier
from benchmarks.replay.workload import Prompt, Workload
from kvpipe.config.settings import load_settings
from kvpipe.protocol.engine import LATER
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import ROW_BYTES, Job, Kind, Report, StepPlan, Tally
from kvpipe.scheduler.hooks import EngineFacts
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.scheduler.wishes import RawHints

_T = TypeVar("_T")
IDLE_STEP_S: Final = 0.001
"""The seconds that a step takes if it computes nothing, while chunks wait to be stored or prefetched."""
DEVICE: Final = "device"
COMPUTED: Final = "computed"


@dataclass
class Outcome:
    """The result of a replay. `tokens` has the tokens of all prompts by source. Times are in seconds."""

    workload: str
    policy: str
    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    """The number of copied bytes, by source and destination."""
    scheduler_s: float = 0.0
    """The processor time of kvpipe's scheduler side, in seconds."""
    steps: int = 0
    ended_at_s: float = 0.0
    faults: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """The share of all tokens that came from each source."""
        whole = sum(self.tokens.values())
        return {where: count / whole for where, count in self.tokens.items()}

    def ttft(self, share: float) -> float:
        """Return the time within which `share` of all requests got their first token, in seconds."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


class Running:
    """One request, with the attributes that the scheduler side and this engine read, under vLLM's names."""

    __slots__ = (
        "block_hashes", "cache_salt", "lora_request", "num_computed_tokens", "num_preemptions", "num_prompt_tokens",
        "num_tokens", "prompt", "request_id", "resumable", "skip_reading_prefix_cache",
    )  # fmt: skip

    def __init__(self, number: int, prompt: Prompt) -> None:
        """Make a request that has just arrived."""
        self.prompt, self.request_id, self.block_hashes = prompt, str(number), prompt.keys
        self.num_tokens = self.num_prompt_tokens = max(1, prompt.tokens)
        self.num_computed_tokens = self.num_preemptions = 0
        self.cache_salt = self.lora_request = None
        self.resumable = self.skip_reading_prefix_cache = False


class Device:
    """The blocks of the engine's device, counted in chunks. Idle chunks of finished requests may be hit again."""

    def __init__(self, slots: int) -> None:
        """Make an empty device with room for `slots` chunks."""
        self.slots, self.used = slots, 0
        self._pinned: Counter[bytes] = Counter()
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    def held(self, keys: Sequence[bytes]) -> int:
        """Return how many chunks at the beginning of `keys` the device holds without a gap."""
        pinned, idle = self._pinned, self._idle
        return next((at for at, key in enumerate(keys) if key not in idle and key not in pinned), len(keys))

    def begin(self, keys: Sequence[bytes], held: int, size: int) -> None:
        """Allocate the `size` chunks of a request. The device already holds the first `held` of these chunks."""
        self.used += size
        for key in keys[:held]:
            self._pinned[key] += 1
            self._idle.pop(key, None)
        self._trim()

    def computed(self, keys: Sequence[bytes], held: int) -> None:
        """Make all chunks of a computed prompt available to lookups."""
        for key in keys[held:]:
            self._pinned[key] += 1
            self._idle.pop(key, None)

    def end(self, keys: Sequence[bytes], size: int) -> None:
        """Free the `size` chunks of a finished request. The prompt's chunks stay available while there is room."""
        self.used -= size
        for key in reversed(keys):
            self._pinned[key] -= 1
            if not self._pinned[key]:
                del self._pinned[key]
                self._idle[key] = None
        self._trim()

    def _trim(self) -> None:
        while self._idle and len(self._idle) > self.slots - self.used:
            self._idle.popitem(last=False)


class Scheduled(dict[str, int]):
    """The number of prompt tokens that a step computes, by request. If `decodes`, the step also computes answers."""

    decodes = False

    def __bool__(self) -> bool:
        """Whether the engine computes any tokens in this step."""
        return self.decodes or len(self) > 0


class Engine:
    """One replay."""

    def __init__(
        self, workload: Workload, policy: str, *, model: Model, host: Host, tiers: Sequence[Store] = (),
        pauses_s: Sequence[float | None] = (), **settings: Any,
    ) -> None:  # fmt: skip
        """`settings` are kvpipe's settings. If `host` has no slots, the engine runs without kvpipe.

        `pauses_s` has the pause in seconds that each request's client announces. If empty, no client announces a pause.
        """
        self.workload, self.model, self.clock = workload, model, Clock()
        self.chunk = workload.chunk_tokens
        self.block_bytes = model.bytes_per_token * self.chunk
        self.down, self.up = Link(host.bytes_per_s), Link(host.bytes_per_s)
        self.tiers = [VirtualTier(store) for store in tiers]
        self.finder = finder = VirtualFinder(self.tiers, self.clock)
        self.device = Device(model.device_tokens // self.chunk)
        self.out = Outcome(workload.name, policy if host.slots else "none")
        geometry = Geometry(
            (Group((Layer("l", self.block_bytes),), self.chunk),), self.chunk, max(1, host.slots) * self.block_bytes
        )
        given = load_settings({"policy": policy, "chunk_tokens": self.chunk, **settings})
        self.patience_s = given.lookup_ms_max / 1000

        used = host.slots > 0
        with patch("kvpipe.scheduler.side.Finder", lambda *_, **__: finder):
            facts = EngineFacts(hash_tokens=self.chunk, ranks=1, saves=used, loads=used)
            self.side = SchedulerSide(given, geometry, facts, tiers=finder.tiers)
        self.side.ranks_ready({0: geometry.slots}, ["weights"])
        block = SimpleNamespace(block_id=1, is_null=False)
        longest = max(-(-prompt.tokens // self.chunk) for prompt in workload.prompts) + 1
        self.table = [block] * longest  # the blocks' identities affect no result
        self.side.bind(SimpleNamespace(table=lambda *_: self.table, knows=lambda *_: False, free=lambda: longest))  # type: ignore[arg-type]
        self.arrivals, self.pauses_s = deque(enumerate(workload.prompts)), pauses_s
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.alive = 0
        self.loading: dict[str, Running] = {}
        self.local: dict[str, int] = {}  # by request with blocks: how many chunks the device already had
        self.report = Report(rate=host.bytes_per_s)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Replay all requests until the last answer has ended."""
        with _time_is(self.clock):
            while self.arrivals or self.waiting or self.running or self.alive or self.side.jobs.in_flight:
                self._step()
                assert self.clock.now_s < float("inf"), "somebody waits for nothing"
            self._close()
        return self.out

    def _close(self) -> None:
        out, side = self.out, self.side
        out.ended_at_s, out.requests = self.clock.now_s, len(out.ttft_s)
        out.moved |= {"device to memory": self.down.moved, "memory to device": self.up.moved}
        for one in self.tiers:
            out.moved |= {f"memory to {one.store.name}": one.write.moved, f"{one.store.name} to memory": one.read.moved}
        out.faults, out.stats = dict(side.counters.faults), side.stats()
        side.shutdown()

    def _step(self) -> None:
        clock = self.clock
        while self.arrivals and self.arrivals[0][1].at_s <= clock.now_s:
            number, prompt = self.arrivals.popleft()
            request, pause_s = Running(number, prompt), self.pauses_s[number] if self.pauses_s else None
            hint = RawHints(None, {"resume": {"after_seconds": pause_s}}) if pause_s is not None else None
            self._timed(self.side.on_new_request, request, hint)
            self.waiting.append(request)
        scheduled = self._schedule()
        step: Any = SimpleNamespace(num_scheduled_tokens=Scheduled(scheduled), preempted_req_ids=None)
        step.num_scheduled_tokens.decodes = self.alive > 0
        plan = self._timed(self.side.plan_step, step)
        self.out.steps += 1
        end_s = self._carry(plan, scheduled)
        if not scheduled and end_s <= clock.now_s:
            begins_s = self.arrivals[0][1].at_s if self.arrivals else float("inf")
            end_s = max(clock.now_s, min(begins_s, clock.next_s))
            if self.alive:  # the engine makes steps meanwhile, because it decodes
                end_s = min(end_s, max(clock.now_s + IDLE_STEP_S, self.side.prefetching.announced.due_s))
            if self.side.staging is not None and (
                self.side.staging.stores.pending or (not self.alive and self.side.prefetching.has_work())
            ):
                end_s = min(end_s, clock.now_s + IDLE_STEP_S)
        clock.go(end_s)
        if self.report.tallies:
            report, self.report = self.report, Report(rate=self.report.rate)
            report.tier_rates = {place: tier.rate.bytes_per_s for place, tier in enumerate(self.tiers)}
            self._timed(self.side.reported, report)
        self._computed(scheduled)

    def _timed(self, call: Callable[..., _T], *arguments: Any) -> _T:
        begin_s = time.thread_time()
        try:
            return call(*arguments)
        finally:
            self.out.scheduler_s += time.thread_time() - begin_s

    # ---- scheduling -----------------------------------------------------------------------------------------------

    def _schedule(self) -> dict[str, int]:
        """Return the number of tokens that this step computes for each request."""
        left, scheduled = self.model.step_tokens, dict[str, int]()
        for request in self.running:
            left -= self._take(request, left, scheduled)
        later: list[Running] = []
        while self.waiting and left and self.alive < self.model.requests_max:
            request = self.waiting[0]
            size = self._size(request)
            if self.device.used + size > self.device.slots and self.alive:
                break
            self.waiting.popleft()
            answer = self._admit(request, size)
            if answer is None:
                later.append(request)
            elif not answer:
                self.running.append(request)
                left -= self._take(request, left, scheduled)
        self.waiting.extendleft(reversed(later))
        return scheduled

    def _take(self, request: Running, left: int, scheduled: dict[str, int]) -> int:
        tokens = min(left, request.num_tokens - request.num_computed_tokens)
        if tokens:
            scheduled[request.request_id] = tokens
        return tokens

    def _size(self, request: Running) -> int:
        return -(-request.num_tokens // self.chunk)

    def _admit(self, request: Running, size: int) -> bool | None:
        """Admit `request`, and return whether the request waits for a load, or None if the lookup must be repeated."""
        held = min(self.device.held(request.block_hashes), (request.num_tokens - 1) // self.chunk)
        local = held * self.chunk
        answer = self._timed(self.side.lookup, request, local)
        if answer is LATER:
            self.clock.at(self.clock.now_s + self.patience_s, lambda: None)  # the latest time of the next lookup
            return None
        tokens, waits = answer
        self.device.begin(request.block_hashes, held, size)
        self.alive += 1
        self.local[request.request_id] = held
        self._timed(self.side.admitted, request, (self.table[:size],), tokens)
        request.num_computed_tokens = min(local + tokens, request.num_tokens - 1)
        self._count(request, local, tokens)
        if tokens and waits:
            self.loading[request.request_id] = request
            return True
        return False

    def _count(self, request: Running, local: int, tokens: int) -> None:
        by = self.side.requests.tracked[request.request_id].asking.answer.by_tier if tokens else {}
        self.out.tokens.update(by)
        self.out.tokens[DEVICE] += local
        self.out.tokens[COMPUTED] += request.num_tokens - local - tokens

    # ---- what a step does -----------------------------------------------------------------------------------------

    def _carry(self, plan: StepPlan, scheduled: dict[str, int]) -> float:
        """Start the planned jobs and orders, and return the time at which the step ends."""
        now_s, by_id = self.clock.now_s, {one.request_id: one for one in self.running}
        compute_s = self.model.step_s if scheduled else 0.0
        for request_id, tokens in scheduled.items():
            first = by_id[request_id].num_computed_tokens
            compute_s += self.model.prefill_s(first, first + tokens)
        computed_s = end_s = now_s + compute_s
        for job in plan.jobs:
            size = len(job.rows) // ROW_BYTES * self.block_bytes
            if job.kind == Kind.SAVE:
                self.clock.at(self.down.carry(size, computed_s), self._done(job))
                continue
            at_s = self.up.carry(size, now_s)
            self.clock.at(at_s, self._done(job))
            if job.kind == Kind.LOAD_SYNC:
                end_s = max(end_s, at_s)
        for order in plan.orders:
            size = order.units * self.block_bytes
            self.finder.carry(order, size, lambda ok, number=order.id: self._ended(number, ok=ok))  # type: ignore[misc]
        return end_s

    def _done(self, job: Job) -> Callable[[], None]:
        def done() -> None:
            self._ended(job.id, ok=True)
            if job.kind == Kind.LOAD_ASYNC:
                self.running.append(self.loading.pop(job.request))

        return done

    def _ended(self, number: int, *, ok: bool) -> None:
        self.report.tallies[number] = Tally(int(ok), int(not ok))

    def _computed(self, scheduled: dict[str, int]) -> None:
        ended = []
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.num_computed_tokens >= request.num_tokens:
                ended.append(request)
        for request in ended:
            self.running.remove(request)
            self.out.ttft_s.append(self.clock.now_s - request.prompt.at_s)
            self.device.computed(request.block_hashes, self.local.pop(request.request_id))
            over_s = self.clock.now_s + request.prompt.answer * self.model.answer_s_per_token
            self.clock.at(over_s, self._over(request))

    def _over(self, request: Running) -> Callable[[], None]:
        def over() -> None:
            size = self._size(request)
            request.num_tokens += request.prompt.answer
            self._timed(self.side.finished, request)
            self.device.end(request.block_hashes, size)
            self.alive -= 1

        return over


@contextmanager
def _time_is(clock: Clock) -> Iterator[None]:
    """Replace the clock of kvpipe's scheduler side by the replay's clock."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(("kvpipe.scheduler.", "kvpipe.cache.", "kvpipe.tiers.finder")) and hasattr(
                module, "time"
            ):
                stack.enter_context(patch.object(module, "time", clock))
        yield
