"""The pool on a real engine: slots are ready before their use, fit into memory, and are not changed by children."""

from __future__ import annotations

import functools
import gc
import os
import threading
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.machine.headroom import Headroom
from kvpipe.testing.waiting import eventually
from kvpipe.trace.events import PoolReady, PoolShort
from kvpipe.trace.reader import Trace
from kvpipe.transfer import ready
from kvpipe.transfer.ready import Readier
from kvpipe.worker import side as worker_side
from kvpipe.worker.side import WorkerSide
from tests.engine.common import assert_clean, baseline, ended, engine, prompt, whole_blocks

PROMPTS = [prompt(300, seed) for seed in range(4)]
POOL = {"pool_bytes_max": "192MiB"}


def wait_for_memory(live: Engine) -> None:
    """Wait until the whole pool is in memory."""
    worker = live.worker_connector.worker
    assert isinstance(worker, WorkerSide)
    assert eventually(lambda: worker._readier._at == worker.geometry.slots)
    live.settle()


def test_the_whole_pool_becomes_ready(trace_file: Path) -> None:
    """The scheduler side knows at the start that the pool's first slots are ready, and later that all slots are ready.

    The trace has an event for the ready pool.
    """
    wanted = baseline(PROMPTS, 8)
    with engine(kvpipe=POOL) as live:
        live.settle()  # ranks report only with a step, so the idle engine makes a step
        at_start = live.connector.stats()["slots_ready"]
        assert at_start > 0
        slots = live.connector.stats()["slots"]
        wait_for_memory(live)
        assert live.connector.stats()["slots_ready"] == slots
        assert live.generate(PROMPTS, 8) == wanted
        assert_clean(live)
    reported = [event for event in Trace(trace_file) if isinstance(event, PoolReady)]
    assert [event.slots for event in reported] == [slots]


def test_a_pool_that_the_machine_has_no_memory_for(monkeypatch: pytest.MonkeyPatch, trace_file: Path) -> None:
    """The engine uses only slots that fit into memory, evicts chunks if it needs more, and reports the shortage once.

    The engine uses more slots when memory becomes free.
    """
    monkeypatch.setattr(ready, "SHORT_S", 0.01)
    plenty, short = Headroom(1 << 40, 1 << 40, "plenty"), Headroom(1 << 20, 1 << 40, "a limit")
    rooms = [plenty]  # enough memory for the first slots only
    made = functools.partial(Readier, room=lambda: rooms.pop() if rooms else short)
    monkeypatch.setattr(worker_side, "Readier", made)
    many = [prompt(900, 50 + seed) for seed in range(8)]
    wanted = baseline(many, 4)
    with engine(kvpipe=POOL | {"chunk_tokens": 32}) as live:
        live.settle()
        stats = live.connector.stats()
        assert 0 < stats["slots_ready"] < stats["slots"]
        assert live.generate(many, 4) == wanted
        assert live.connector.stats()["slots_ready"] == stats["slots_ready"]
        rooms.extend([plenty] * 100)
        wait_for_memory(live)
        live.generate(PROMPTS[:1], 1)  # ranks report only with a step
        assert live.connector.stats()["slots_ready"] == stats["slots"]
        assert_clean(live)
    reported = [event for event in Trace(trace_file) if isinstance(event, (PoolShort, PoolReady))]
    assert [type(event) for event in reported] == [PoolShort, PoolReady]


def test_no_chunk_is_evicted_while_the_pool_becomes_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new engine finds all chunks that it has saved, although its pool is not in memory yet."""
    begin, goes_on = Readier.begin, threading.Event()

    def begin_only(readier: Readier, how: ready.How) -> None:
        monkeypatch.setattr(readier, "_main", goes_on.wait)
        readier._step = 1  # one slot is ready
        begin(readier, how)

    monkeypatch.setattr(Readier, "begin", begin_only)
    wanted = baseline(PROMPTS, 8)
    with engine(kvpipe=POOL | {"chunk_tokens": 32}, enable_prefix_caching=False) as live:
        assert [live.generate([one], 8) for one in PROMPTS] == [[one] for one in wanted]
        assert [live.generate([one], 8) for one in PROMPTS] == [[one] for one in wanted]
        assert live.connector.stats()["slots_used"] > 1
        stats = assert_clean(live)
        assert stats.get("evicted", 0) == 0
        assert stats["tokens_loaded"] == whole_blocks(live, *map(len, PROMPTS))
        goes_on.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_of_a_live_engine() -> None:
    """A process is forked during copies.

    The forked process ends, with or without clean-up, and changes nothing in the engine's process.
    """
    wanted = baseline(PROMPTS, 24)
    with engine(kvpipe=POOL, enable_prefix_caching=False) as live:
        live.generate(PROMPTS[:2], 4)
        for clean in (True, False, True):
            ids = [live.add(one, 24) for one in PROMPTS]
            live.step()
            child = os.fork()
            if not child:
                _end_of_child(live, clean=clean)
            outputs = live.drain()
            assert [list(outputs[i].outputs[0].token_ids) for i in ids] == wanted
            assert ended(child) == 0, "the child was killed, or hung"
        assert live.connector.stats()["tokens_loaded"] > 0
        side = live.worker_connector.worker
        assert isinstance(side, WorkerSide)
        assert side.pipeline.alive
        assert_clean(live)


def _end_of_child(live: Engine, *, clean: bool) -> None:
    """End a forked child of the process.

    If `clean`, the child first collects all garbage and reads the connector's stats.
    """
    code = 1
    try:
        if clean:
            gc.collect()
            live.connector.stats()
        code = 0
    finally:
        os._exit(code)
