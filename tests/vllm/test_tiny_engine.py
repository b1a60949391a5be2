"""Tests of the engine that the tests run."""

from __future__ import annotations

import gc

from kvpipe.connectors.vllm.tiny import engine
from tests.rigs.forks import done_in_fork

OBJECTS = 1000


def test_modules_are_frozen_when_the_first_engine_ends() -> None:
    """At an engine's end, vLLM's calls of `gc` have no effect. The call that excludes modules has an effect."""

    def freeze() -> None:
        made = [[one] for one in range(OBJECTS)]
        before = gc.get_freeze_count()
        with engine._own_garbage():
            engine._freeze_modules("in this test")
        assert gc.get_freeze_count() >= before + len(made)

    assert done_in_fork(freeze)
