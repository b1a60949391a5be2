"""Measures costs on the host without an engine: transitions, hooks, lookups, planning, wire size, copies, memory."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.calls import Manager, blocks_of, output_of, request_of
from benchmarks.report import Figure, median_s
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy.large import PLAIN_MAX
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.engine_protocols import ManagedBlocks, Remedies
from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.connectors.vllm.remedies.admission import LoadAdmission
from kvpipe.connectors.vllm.worker_role import WorkerRole
from kvpipe.protocol.engine import MISS
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, StepPlan
from kvpipe.scheduler.gauges import totals
from kvpipe.scheduler.hooks import EngineFacts, EngineHooks
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.statemachine.copy import LANDED_AGAIN, SAVE, LayerCursor
from kvpipe.trace.log import Counters
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.pipeline import Pipeline
from kvpipe.worker.side import WorkerSide

LAYERS = 32


def run() -> list[Figure]:
    """Return all figures that need no engine."""
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # vLLM also freezes all objects when an engine has started
    return [
        *_transitions(), *_hooks(), *_idle_hooks(), *_scheduler(), *_wire(), *_copies(), *_memory(),
    ]  # fmt: skip


def _transitions() -> list[Figure]:
    cursor = LayerCursor(SAVE.compile(LAYERS), "bench")
    cursor.landed(0)
    one = median_s(lambda: cursor.fire(LANDED_AGAIN), 200, 1000)
    compiled = SAVE.compile(LAYERS)

    def life() -> None:
        c = LayerCursor(compiled, 0)
        for k in range(LAYERS):
            c.landed(k)

    return [
        Figure("machine transition (fire)", one * 1e6, 0.5, "us"),
        Figure("machine transition (landed k, whole life / layers)", median_s(life, 500) / LAYERS * 1e6, 0.5, "us"),
    ]


class _NoCopy:
    """A transfer engine that completes every copy at once, so that only kvpipe's own cost is measured."""

    piece_bytes = 1 << 20

    def attach(self, *_: Any) -> None: ...

    def claim(self, *_: Any) -> bool:
        return True

    def prepare(self, plan: CopyPlan) -> None: ...

    def reached(self, ticket: Ticket) -> None: ...

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:  # noqa: ARG002
        ticket.complete()

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        return ticket.wait(timeout_s)

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        return ticket.wait(timeout_s)

    def abandon(self, ticket: Ticket) -> bool:
        return ticket.over

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None: ...

    def shutdown(self) -> None: ...


def _geometry(layers: int = LAYERS, page: int = 65536, block: int = 16, pool: int = 1 << 40) -> Geometry:
    return Geometry((Group(tuple(Layer(f"l{i}", page) for i in range(layers)), block),), 256, pool)


def _job(number: int, kind: Kind, blocks: int) -> Job:
    rows = [(0, number, page, number * blocks + page) for page in range(blocks)]
    return Job(number, int(kind), f"cmpl-{number:032x}-0", 1, np.asarray(rows, dtype="<i4").tobytes())


def _hooks() -> list[Figure]:
    geometry = _geometry()
    pipeline = Pipeline(RankContext(load_settings()), _NoCopy(), geometry)
    out = []

    def hooks() -> None:
        for layer in range(LAYERS):
            pipeline.wait_layer(layer)
            pipeline.save_layer(layer)

    out.append(Figure("hooks of a layer, nothing to do", median_s(hooks, 300) / LAYERS * 1e6, 2, "us"))
    costs = {}
    for requests in (1, 64):
        samples = []
        for _ in range(40):
            jobs = [_job(i + 1, Kind.SAVE, 1) for i in range(requests)]
            jobs += [_job(i + 1001, Kind.LOAD_SYNC, 1) for i in range(requests)]
            pipeline.begin(StepPlan(1, tuple(jobs)))
            pipeline.start_loads()
            samples.append(_timed(hooks))
            pipeline.end_step()
            pipeline.collect()
        samples.sort()
        costs[requests] = samples[len(samples) // 2] / LAYERS * 1e6
        out.append(Figure(f"hooks of a layer with work, {requests} requests", costs[requests], 20, "us"))
    out.append(Figure("the same, 64 requests / 1 request", max(costs.values()) / min(costs.values()), 2, "x"))
    pipeline.shutdown()
    return out


def _idle_hooks() -> list[Figure]:
    """Measure the hooks of an attention layer, as vLLM calls them, while no job is open."""
    geometry = _geometry(page=1024, pool=1 << 24)
    caches = {layer.name: torch.zeros(1, 1, 16, 16) for layer in geometry.groups[0].layers}
    settings, paged = load_settings({"prefault": "use"}), PagedCaches(geometry, caches, 1)
    side = WorkerSide(RankContext(settings), paged, engine=_NoCopy())
    made = object.__new__(KVPipeConnector)  # this part of the class needs no engine's configuration
    role: Any = object.__new__(WorkerRole)
    role.worker, role.counters, role.recorder, role.writer, role.step = side, side.counters, None, None, side.step
    made._take_worker_role(role)

    def both(connector: Any) -> None:
        for layer in range(LAYERS):
            connector.wait_for_layer_load("l0")
            connector.save_kv_layer("l0", layer, None)

    mine, empty = (median_s(partial(both, one), 2000) / LAYERS * 1e6 for one in (made, _Empty()))
    side.shutdown()
    return [Figure("both hooks of a layer, no job", mine, 0.3, "us", f"{empty:.2f} us: methods that do nothing")]


class _Empty:
    """A connector whose hooks do nothing. The time to call them is the least that two hooks can take."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...


def _timed(call: Any) -> float:
    import time

    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def make_side(**given: Any) -> tuple[SchedulerSide, Manager]:
    """Return a scheduler side with a pool of common size and the settings `given`, and the engine's block manager."""
    settings = load_settings({"chunk_tokens": 256, "prefault": "use", **given})
    geometry, manager = _geometry(page=1024, pool=PLAIN_MAX << 19), Manager()  # larger pools cost more: decision 30
    room, blocks = LoadAdmission(geometry, 8192, 1 << 17), ManagedBlocks(manager)  # type: ignore[arg-type]
    remedies = Remedies(geometry, room)
    facts = EngineFacts(hash_tokens=16, ranks=1, saves=True, loads=True)
    side = SchedulerSide(settings, geometry, facts, EngineHooks(recovery=remedies))
    side.bind(blocks)
    remedies.bind(blocks, side.counters)
    return side, manager


def _scheduler() -> list[Figure]:
    from kvpipe.protocol.messages import Report, Tally

    side, manager = make_side()
    tokens = 131_072
    writer = request_of("writer", tokens + 1)
    blocks = blocks_of(tokens + 1)
    manager.req_to_blocks["writer"] = blocks
    side.lookup(writer, 0)
    side.admitted(writer, (blocks,), 0)
    plan = side.plan_step(output_of({"writer": tokens}))
    side.reported(Report({job.id: Tally(1, 0) for job in plan.jobs}))
    side.finished(writer)
    reader, stranger = request_of("reader", tokens + 1), request_of("stranger", tokens + 1, seed=1)
    assert side.lookup(reader, 0) == (tokens, False)
    assert side.lookup(stranger, 0) == MISS
    full = median_s(lambda: side.lookup(reader, 0), 50)
    miss = median_s(lambda: side.lookup(stranger, 0), 200, 10)

    side, manager = make_side()
    running = [request_of(f"r{i}", 1000, seed=i) for i in range(256)]
    for request in running:
        manager.req_to_blocks[request.request_id] = blocks[:64]
        side.lookup(request, 0)
        side.admitted(request, (blocks[:64],), 0)
    plan = side.plan_step(output_of({r.request_id: 1000 for r in running}))
    side.reported(Report({job.id: Tally(1, 0) for job in plan.jobs}))
    for request in running:
        request.num_computed_tokens = 1000
    step = output_of({r.request_id: 1 for r in running})
    assert not side.plan_step(step).jobs
    return [
        Figure("lookup, 128k tokens, full hit", full * 1e3, 1, "ms"),
        Figure("lookup, 128k tokens, miss", miss * 1e6, 20, "us"),
        Figure("plan a step, 256 running, nothing new", median_s(lambda: side.plan_step(step), 200) * 1e3, 0.3, "ms"),
        Figure("metrics of a step, nothing new", median_s(Meter(partial(totals, side)).take, 500, 10) * 1e6, 50, "us"),
    ]


def _wire() -> list[Figure]:
    def size(requests: int, blocks: int) -> int:
        return len(
            pickle.dumps(PlanMetadata(StepPlan(1, tuple(_job(i + 1, Kind.SAVE, blocks) for i in range(requests)))))
        )

    empty = len(pickle.dumps(PlanMetadata(StepPlan(1, ()))))
    out = []
    for blocks in (1, 33):
        beyond = (size(64, blocks) - empty) / 64 - 16 * blocks
        name = f"metadata on the wire, per request, beyond 16 per block ({blocks} blocks)"
        out.append(Figure(name, beyond, 100, "bytes"))
    return out


def _copies() -> list[Figure]:
    out = []
    cases = [(how, page) for page in (65536, 32768, 8192) for how in ("adjacent", "scattered")]
    for how, page in cases:
        layers = 8
        blocks = 4096 * 65536 // page // 4
        geometry = _geometry(layers=layers, page=page, pool=blocks * page * layers * 2)
        pool = HostPool(geometry)
        caches = [torch.randint(0, 255, (blocks, 1, 1, page), dtype=torch.uint8) for _ in range(layers)]
        engine = CpuEngine(0)
        engine.attach([view_pages(f"l{i}", c, blocks) for i, c in enumerate(caches)], geometry, pool)
        per_chunk = geometry.pages_per_chunk[0]
        order = torch.randperm(blocks // per_chunk)[: min(16, geometry.slots)].tolist()
        scattered = torch.randperm(blocks)[: per_chunk * len(order)].tolist() if how == "scattered" else range(blocks)
        rows = [
            (0, s, p, scattered[i * per_chunk + p]) for i, s in enumerate(range(len(order))) for p in range(per_chunk)
        ]
        job = Job(1, 0, "r", 1, np.asarray(rows, dtype="<i4").tobytes())
        nbytes = len(rows) * page * layers
        source = torch.cat([c.view(blocks, page)[: len(rows)] for c in caches])
        target = torch.empty_like(source)
        for direction in (Direction.SAVE, Direction.LOAD):
            plan = CopyPlan(direction, [job], 1)

            mine = median_s(partial(_copy_all, engine, plan, layers), 15)
            plain = median_s(partial(target.copy_, source), 15)
            name = f"CPU {direction.name.lower()}, {page >> 10} KiB pages, {how} blocks"
            beside = f"{nbytes / mine / 1e9:.1f} of {nbytes / plain / 1e9:.1f} GB/s (copy_)"
            out.append(Figure(name, plain / mine, 0.8, "of copy_", beside, at_least=True))
    return out


def _copy_all(engine: CpuEngine, plan: CopyPlan, layers: int) -> None:
    for layer in range(layers):
        engine.copy_layer(plan, layer)


def _memory() -> list[Figure]:
    from kvpipe.cache.chunks import Owner

    chunks = 20_000
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    catalog = Catalog(chunks, 1, make_policy("lru", chunks), Counters())
    for i in range(chunks):
        chunk = catalog.reserve(0)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 16, i.to_bytes(32, "big"), keep=False))
    catalog.release(Owner("nobody", 0))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    threads = threading.active_count()
    beside = f"{threads} threads, key bytes included, {sys.getsizeof(b'.' * 32)} each"
    return [Figure("catalog memory per chunk", used / chunks, 512, "bytes", beside)]
