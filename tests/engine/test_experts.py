"""Expert parallelism: the KV equals that of tensor or data parallelism, and KV is saved and loaded in the same way.

The ranks run with the tests' own worker classes, because vLLM's CPU build lacks two parts. vLLM's kernel does not know
which experts a rank has (`staged.ExpertWorker`). vLLM's communicator cannot bring tokens to the experts of other
engines (`staged.ReplicaWorker`). An engine with one rank gives the expected answers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.trace.events import RequestAdmitted
from kvpipe.trace.reader import Trace
from tests.engine.common import BLOCK, assert_clean, baseline, engine, prompt, whole_blocks
from tests.engine.serving import Server

pytestmark = pytest.mark.engine

MODEL, WORKER = "qwen3-moe", "tests.engine.staged.ExpertWorker"
PROMPTS = [prompt(300, 31), prompt(140, 32)]
LOGGING: dict[str, Any] = {
    "version": 1,
    "formatters": {"host": {"format": "host %(vllm_process_name)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"host": {"class": "logging.StreamHandler", "formatter": "host"}},
    "loggers": {"vllm": {"handlers": ["host"], "level": "INFO", "propagate": False}},
}
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_cls": WORKER}


def test_experts_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of the experts and half of the heads. The cases are cold, warm, and a conversation."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    expected = baseline(PROMPTS, 12, MODEL, enable_prefix_caching=False)
    turn = PROMPTS[0] + expected[0] + prompt(50, 33)
    answer = baseline([turn], 12, MODEL, enable_prefix_caching=False)
    with engine(MODEL, {}, enable_prefix_caching=False, **TWO_RANKS) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 12) == expected
        assert live.generate([turn], 12) == answer
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, 300, 140, 300)


def test_experts_in_two_engines(tmp_path: Path, trace_file: Path) -> None:
    """Each engine has half of the experts, a cache of its own, and no tier.

    kvpipe reads only the engine's own part of the weights.
    """
    expected = baseline(PROMPTS, 12, MODEL, enable_prefix_caching=False)
    kvpipe = {"chunk_tokens": 64, "pool_bytes_max": "64MiB", "tiers": [str(tmp_path / "kv")]}
    options = ("--data-parallel-size", "2", "--enable-expert-parallel", "--no-enable-prefix-caching")
    worker = ("--worker-cls", "tests.engine.staged.ReplicaWorker")
    logging_file = tmp_path / "logging.json"
    logging_file.write_text(json.dumps(LOGGING))
    with (
        Server(
            tmp_path / "log",
            kvpipe,
            *options,
            *worker,
            model=make_model(MODEL),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_LOGGING_CONFIG_PATH=str(logging_file),
        ) as server,
        ThreadPoolExecutor(2) as both,
    ):

        def ask(replica: int) -> list[list[int] | None]:
            return [server.stream(tokens, 12, rank=replica) for tokens in PROMPTS]

        assert [ask(0), ask(0), ask(1)] == [expected] * 3, "one is asked, the other takes part"
        assert list(both.map(ask, range(2))) == [expected] * 2
        server.idle()
        loaded = [server.metric("hit_tokens", tier="memory", engine=replica) for replica in "01"]
        assert loaded == [2 * whole_blocks(BLOCK, 300, 140), whole_blocks(BLOCK, 300, 140)]
        assert server.metric("hit_tokens") == sum(loaded)
        assert server.stated.count("experts lie in other engines") == 2
        logged = re.findall(
            r"^host EngineCore_DP(\d) WARNING vllm\.kvpipe: weights_not_known", server.stated, re.MULTILINE
        )
        assert sorted(logged) == ["0", "1"], "the host's configuration has the lines, with level and process"
    assert not list((tmp_path / "kv").rglob("*-g0-*"))
    hits = Counter[str]()
    for event in Trace(trace_file):
        if isinstance(event, RequestAdmitted):
            hits[event.engine[-3:]] += event.hit_tokens.get("memory", 0)
    assert [hits["dp0"], hits["dp1"]] == loaded
