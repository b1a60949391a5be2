"""After a hit of a whole prompt, the prompt's last token is computed again, into a block that the same step loads."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings

from kvpipe.config.settings import load_settings
from kvpipe.protocol.messages import Kind, StepPlan
from kvpipe.testing.transfer_programs import schedules
from kvpipe.testing.transfer_worlds import GEOMETRY, KINDS, LAYERS, job_rows, make_job, world
from kvpipe.testing.waiting import WAIT_S
from kvpipe.worker.caches import Hooks
from kvpipe.worker.context import RankContext
from kvpipe.worker.pipeline import Pipeline

BLOCKS = {0: [0, 1], 1: [3]}
COMPUTED = 200
PLAN = StepPlan(1, (make_job(1, job_rows(0, BLOCKS), Kind.LOAD_SYNC),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unhooked", [(), (1,), (0, 2)], ids=str)
@settings(max_examples=40, deadline=None)
@given(schedule=schedules)
def test_last_token_overwrites_loaded_kv(kind: str, unhooked: Collection[int], schedule: list[int]) -> None:
    """A layer's new KV is written before the layer's hook is called.

    The loaded KV never overwrites the new KV, even if copies land late.

    A layer without a hook is loaded before the first layer computes.
    """
    with world(kind, schedule=schedule) as w:
        context = RankContext(load_settings({"wait_ms_max": int(WAIT_S * 1000)}))
        p = Pipeline(context, w.engine, GEOMETRY, hooks=Hooks(frozenset(unhooked)))
        p.begin(PLAN)
        p.start_loads()
        for layer in range(LAYERS):
            last = BLOCKS[GEOMETRY.layers[layer][0]][-1]
            w.let_run()
            w.write_block(layer, last, COMPUTED)
            w.let_run()
            if layer not in unhooked:
                p.wait_layer(layer)
        p.end_step()
        w.drain_all()
        kept = [bool(w.caches[layer][BLOCKS[group][-1]].eq(COMPUTED).all())
                for layer, (group, _) in enumerate(GEOMETRY.layers)]  # fmt: skip
        p.shutdown()
        assert kept == [True] * LAYERS
        assert not p.counters.faults
