"""An engine with a tier, in a process that forks as user code does: `-m tests.engine.forking TIER ...`."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from tests.engine.common import assert_clean, ended, patient, prompt, waiting

PROMPTS = [prompt(300, 81), prompt(200, 82)]
DUE = 288 + 192
TOKENS = 8


def _collect(live: Engine) -> None:
    live.connector.stats()
    gc.collect()


def _shut_down(live: Engine) -> None:
    live.connector.shutdown()
    live.worker_connector.shutdown()


def _fork(live: Engine, work: Callable[[Engine], None]) -> int:
    """Do `work` in a child, and return the child's process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work(live)
            code = 0
        finally:
            # When an interpreter ends in a fork, vLLM's process groups fail, even without a connector.
            os._exit(code)
    return child


def _multiprocess(live: Engine) -> int:
    process = multiprocessing.get_context("fork").Process(target=_collect, args=(live,))
    process.start()
    assert process.pid is not None
    return process.pid


def play(tier: dict[str, Any]) -> None:
    """Fork during copies, reads and writes.

    The children end, the engine continues, and the tier returns all its chunks.
    """
    config = {"chunk_tokens": 64, "tiers": [tier]}
    live = Engine(str(make_model("llama")), kvpipe=patient(config), enable_prefix_caching=False)
    expected = live.generate(PROMPTS, TOKENS)
    ways: dict[str, Callable[[], int]] = {
        "collects and ends": lambda: _fork(live, _collect),
        "shuts down": lambda: _fork(live, _shut_down),
        "multiprocessing": lambda: _multiprocess(live),
    }
    side = live.connector.scheduler
    assert side is not None
    for name, fork in ways.items():
        side.catalog.reset()
        asked = [live.add(tokens, TOKENS) for tokens in PROMPTS]
        live.step()
        child = fork()
        outputs = live.drain()
        assert [list(outputs[one].outputs[0].token_ids) for one in asked] == expected, name
        assert ended(child) == 0, name
    live.settle()
    side.catalog.reset()
    before = side.tracer.hit_tokens[tier["kind"]]
    assert live.generate(PROMPTS, TOKENS) == expected
    assert side.tracer.hit_tokens[tier["kind"]] - before == DUE
    assert_clean(live)
    live.close()


def main(tiers: list[str]) -> None:
    """Fork with each tier. Print each tier, and the exception that was raised or an empty text."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for tier in map(json.loads, tiers):
        why = ""
        try:
            play(tier)
        except Exception:  # noqa: BLE001  (the next one is tried)
            why = traceback.format_exc()
        print(json.dumps([tier["kind"], why]), file=out, flush=True)


if __name__ == "__main__":
    # Python warns of a fork in a process with threads, which is what this program tests
    warnings.simplefilter("ignore", DeprecationWarning)
    with waiting():
        main(sys.argv[1:])
