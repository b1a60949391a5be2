"""vLLM may give a block a key for a step that never computes the block.

Kvpipe removes such blocks from vLLM's cache.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.connectors.vllm import scheduler_role
from kvpipe.connectors.vllm.remedies.uncomputed import forget_uncomputed
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.trace.log import Counters

FIRST, SHORT, LAST = 29, 2, 1
"""The lengths of three answers, minus one token. A trial derives a request's priority from this length."""


def _preempted_when_scheduled() -> Trial:
    """Return a trial with a preempted prefill.

    The pass that preempted the prefill had scheduled two more of its blocks. The cache has 14 blocks: a first request
    holds 5, the prefill 6 and a short request 1. The prefill takes the last 2 blocks. Then the short request, which
    runs behind the prefill and finishes in this step, needs another block.
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


def test_prefix_cache_keeps_no_block_that_no_step_has_computed() -> None:
    """If a pass schedules and preempts a request, the prefix cache keeps only the request's computed blocks."""
    trial = _preempted_when_scheduled()
    try:
        manager, watched = trial.scheduler.kv_cache_manager, Watched(trial)
        assert manager.get_computed_blocks(trial.scheduler.requests["r1"])[1] == 6 * BLOCK
        trial.do(("drain",))
        assert not watched.broken
        assert not trial.wrong
    finally:
        trial.close()


def test_vllm_keeps_blocks_that_no_step_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the remedy, vLLM keeps uncomputed blocks.

    When this test fails, vLLM does not need the remedy any more.
    """
    monkeypatch.setattr(scheduler_role, "forget_uncomputed", lambda *_: None)
    trial = _preempted_when_scheduled()
    try:
        watched = Watched(trial)
        assert trial.scheduler.kv_cache_manager.get_computed_blocks(trial.scheduler.requests["r1"])[1] == 7 * BLOCK
        trial.do(("drain",))
        assert any("every_read_is_right" in one for one in watched.broken)
    finally:
        trial.close()


def test_exception_while_uncomputed_blocks_are_evicted_is_contained() -> None:
    """The failure is counted as a fault, and the blocks are freed. Blocks of finished requests are not touched."""
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
