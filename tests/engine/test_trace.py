"""The trace, log and metrics of a real engine record its requests."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from kvpipe.scheduler.gauges import totals
from kvpipe.testing.logged import capture_logs
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.reader import Trace
from kvpipe.trace.replay import replay
from tests.engine.common import assert_clean, block_tokens, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine
CROWDED: dict[str, Any] = {"cache_tokens": 1280, "enable_prefix_caching": False}


def test_a_crowd_is_traced_from_end_to_end(trace_file: Path) -> None:
    """The trace has the events of every request, from arrival to end, with layers and preemptions.

    The log has two lines per request.
    """
    with capture_logs() as lines, engine(kvpipe={"chunk_tokens": 128, "log_requests": True}, **CROWDED) as live:
        live.generate([prompt(60 + 20 * i, i) for i in range(10)], 160)
        live.generate([prompt(60, 0)], 8)
        preemptions = assert_clean(live)["preempted"]
        layers, held = len(live.connector.geometry.layers), whole_blocks(live, 60)
    events = list(Trace(trace_file))
    done = replay(events)
    assert done.ok
    assert done.transitions > 500
    assert preemptions > 0
    assert sum(isinstance(one, transitions.Preempted) for one in events) == preemptions
    assert sum(isinstance(one, transitions.Resumed) for one in events) == preemptions

    requests = {one.request for one in events if isinstance(one, e.RequestAdded)}
    assert len(requests) == 11
    for name in requests:
        mine = [one for one in events if one.request == name]
        kinds = [type(one) for one in sorted(mine, key=lambda one: one.t_ns)]
        assert kinds[0] is e.RequestAdded
        late = {*kinds[kinds.index(e.RequestDone) + 1 :]}  # a save of the last step may end after the request
        assert all(issubclass(one, transitions.Transition) for one in late)
        assert kinds.count(e.RequestAdmitted) == 1
        saved = {one.job for one in mine if isinstance(one, e.SavePlanned)}
        for job in saved:
            landed = [one for one in mine if isinstance(one, transitions.LayerLanded) and one.cursor == job]
            at, first = (
                [one.now.removeprefix("CONFIRMED_") for one in landed],
                [f"LAYER_{k}" for k in range(layers - 1)],
            )
            # The event `finalized` follows the landing of the job's last layer, perhaps after the end of the request.
            assert at in ([*first, "LANDED"], first)
    assert {one.engine for one in events} == {events[0].engine}
    (last,) = [one for one in events if type(one) is e.RequestAdmitted and one.hit_tokens]
    assert last.hit_tokens == {"memory": held}
    assert (last.missed_tokens, last.why) == (60 - held, "below_minimum")

    for name in requests:
        logged = [line["event"] for line in lines if line.get("request") == name and line["log_level"] == "info"]
        assert sorted(logged) == ["request_admitted", "request_done"]


def test_log_of_the_host_is_unchanged_when_an_engine_runs(trace_file: Path) -> None:
    """The host's structlog and handlers are not changed. By default kvpipe logs no line per request."""
    before, host = structlog.get_config(), io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(host), cache_logger_on_first_use=True)
        configured = structlog.get_config()
        with capture_logs() as lines, engine(kvpipe={"chunk_tokens": 128}) as live:
            live.generate([prompt(300, 1)], 4)
            assert structlog.get_config() == configured
    finally:
        structlog.configure(**before)
    assert host.getvalue() == ""
    assert (root.handlers, root.level) == (handlers, level)
    assert any(isinstance(one, e.RequestDone) for one in Trace(trace_file))
    assert "numerics" in [line["event"] for line in lines]
    assert [line for line in lines if "request" in line] == []


def test_why_a_prompt_was_not_found(trace_file: Path) -> None:
    """Each reason of a miss is reported: not saved, another salt, evicted, reset, too short, bypassed."""
    with engine(
        kvpipe={"chunk_tokens": 64, "pool_bytes_max": 2 * 64 * TOKEN_BYTES}, enable_prefix_caching=False
    ) as live:
        slots = live.connector.geometry.slots

        def ask(tokens: list[int], salt: str | None = None) -> None:
            live.generate([tokens], 2, salt=salt)
            live.settle()

        first = prompt(65, 1)
        ask(first)
        ask(first, "salted")
        ask(first[:20])
        for i in range(slots + 1):
            ask(prompt(65, 100 + i))
        ask(first)
        live.llm.reset_prefix_cache(reset_connector=True)
        ask(first)
        live.connector.scheduler.switches.bypass = True  # type: ignore[union-attr]
        ask(first)
        counted = totals(live.connector.scheduler)["misses"]  # type: ignore[arg-type]
    why = [one.why for one in Trace(trace_file) if isinstance(one, e.RequestAdmitted)]
    assert why == [*["not_saved"] * 2, "below_minimum", *["not_saved"] * (slots + 1), "evicted", "reset", "bypass"]
    assert counted == {name: why.count(name) for name in why}


def test_router_receives_ends_of_chunks_and_prompts(trace_file: Path) -> None:
    """The ends of chunks and prompts are announced while they can be found.

    Each end is announced as one block with vLLM's own hash.
    """
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    kvpipe = {"chunk_tokens": 64, "pool_bytes_max": 2 * 64 * TOKEN_BYTES}
    with engine(kvpipe=kvpipe, enable_prefix_caching=True, kv_events_config=reported) as live:
        received: list[object] = []
        block = block_tokens(live)
        live.scheduler.kv_event_publisher.publish = lambda batch: received.extend(batch.events)
        slots = live.connector.geometry.slots
        for i in range(slots + 1):
            live.generate([prompt(100, i)], 2)
            live.settle()
        held = live.connector.scheduler.catalog.index(0)  # type: ignore[union-attr]
        keys = {maybe_convert_block_hash(key) for key in held}
        live.generate([prompt(5, 99)], 2)
    ours = [one for one in received if getattr(one, "medium", "") == "CPU"]
    theirs = {
        key for one in received if isinstance(one, BlockStored) and one.medium == "GPU" for key in one.block_hashes
    }
    now: set[object] = set()
    for one in ours:
        assert isinstance(one, BlockStored | BlockRemoved)
        hashes = set(one.block_hashes)
        if isinstance(one, BlockStored):
            assert not now & hashes
            assert len(one.block_hashes) == 1
            assert len(one.token_ids) == one.block_size <= 64
            assert one.block_size % block == 0
            now |= hashes
        else:
            assert hashes <= now
            now -= hashes
    assert any(isinstance(one, BlockRemoved) for one in ours)
    assert keys <= now <= theirs
    assert trace_file.exists()
