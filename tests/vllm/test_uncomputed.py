"""Blocks that vLLM has given a key for a step that does not compute them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm import connector
from kvpipe.connectors.vllm.remedies.uncomputed import forget_uncomputed
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.trace.log import Counters

FIRST, SHORT, LAST = 29, 2, 1
"""By how many tokens answers are longer than one: priorities follow from that."""


def _preempted_when_scheduled() -> Trial:
    """Return a trial in which a prefill was preempted in the pass that had scheduled two more blocks of it.

    Of 14 blocks a first request has 5, the prefill 6 and a short one 1. The prefill takes the last 2; then the short
    one, which is behind it and ends with that, needs another.
    """
    trial = Trial(SHAPES["priorities-long-prefills"])
    trial.documents[:3] = [list(range(at, at + tokens)) for at, tokens in ((0, 150), (200, 250), (10, BLOCK - 1))]
    trial.do(("add", 0, 149, 0, FIRST))
    trial.do(("step", 1))
    trial.do(("add", 1, 249, 0, LAST))
    trial.do(("step", 0))
    trial.do(("add", 2, BLOCK - 2, 0, SHORT))
    trial.do(("step", 1))
    prefill = trial.scheduler.requests["r1"]
    assert prefill.num_computed_tokens == 6 * BLOCK
    assert trial.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 2
    trial.do(("step", 0))
    assert prefill.num_preemptions == 1
    return trial


def test_nobody_reads_what_no_step_has_computed() -> None:
    """Of a request that is preempted in the pass that has scheduled it, the prefix cache keeps what was computed."""
    trial = _preempted_when_scheduled()
    try:
        manager, watched = trial.scheduler.kv_cache_manager, Watched(trial)
        assert manager.get_computed_blocks(trial.scheduler.requests["r1"])[1] == 6 * BLOCK
        trial.do(("drain",))
        assert not watched.broken
        assert not trial.wrong
    finally:
        trial.close()


def test_vllm_itself_offers_what_no_step_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the remedy: when this fails, vLLM needs it no more."""
    monkeypatch.setattr(connector, "forget_uncomputed", lambda *_: None)
    trial = _preempted_when_scheduled()
    try:
        watched = Watched(trial)
        assert trial.scheduler.kv_cache_manager.get_computed_blocks(trial.scheduler.requests["r1"])[1] == 7 * BLOCK
        trial.do(("drain",))
        assert any("every_read_is_right" in one for one in watched.broken)
    finally:
        trial.close()


def test_blocks_that_cannot_be_forgotten() -> None:
    """Cost a fault, and are given back all the same; those of requests that are over are left alone."""
    from vllm.v1.request import RequestStatus

    freed, asked, counters = list[str](), list[set[int]](), Counters()
    manager: Any = SimpleNamespace(free=lambda request: freed.append(request.request_id))
    table = [SimpleNamespace(block_id=block, is_null=block == 4) for block in range(3, 8)]
    blocks: Any = SimpleNamespace(table=lambda *_: table, forget=asked.append)
    forget_uncomputed(manager, blocks, (32, 64), counters)
    request = SimpleNamespace(request_id="one", num_computed_tokens=70, status=RequestStatus.RUNNING)
    manager.free(request)
    assert asked == [{5, 6, 7}]
    request.status = RequestStatus.FINISHED_STOPPED
    manager.free(request)
    assert len(asked) == 1
    request.status, blocks.forget = RequestStatus.RUNNING, None
    manager.free(request)
    assert counters.faults == {"uncomputed_blocks_not_forgotten": 1}
    assert freed == ["one"] * 3
