"""The OpenAI-compatible server with kvpipe on, found by its registered name: the README's one flag."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.metrics import METRICS
from kvpipe.testing.models import make_model
from tests.engine.common import baseline, prompt

pytestmark = pytest.mark.engine


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _ask(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return str(answer.read().decode())


def test_served_with_one_flag(tmp_path: Path) -> None:
    """The server with the README's flag answers as an engine without kvpipe; the second time, from loaded KV."""
    tokens = prompt(300, 41)
    expected = baseline([tokens], 12, enable_prefix_caching=False)[0]
    port = _free_port()
    flag = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both"}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(make_model("llama")),
        "--host", "127.0.0.1",
        "--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "1024", "--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(flag),
    ]  # fmt: skip
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    log = tmp_path / "server.log"
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            limit = time.monotonic() + 300
            while True:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < limit, log.read_text()[-3000:]
                try:
                    _ask(port, "/health")
                    break
                except OSError:
                    time.sleep(0.5)
            body = {
                "model": str(make_model("llama")), "prompt": tokens, "max_tokens": 12, "temperature": 0,
                "ignore_eos": True, "detokenize": False, "return_token_ids": True,
            }  # fmt: skip
            for _ in range(2):
                answer = json.loads(_ask(port, "/v1/completions", body))
                assert answer["choices"][0]["token_ids"] == expected
                time.sleep(0.5)
            metrics = _ask(port, "/metrics")
            served = log.read_text()
        finally:
            server.terminate()
            server.wait(60)
    hits = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    assert sum(hits) == 288, metrics[:2000]
    for line in (
        'vllm:kvpipe_hit_tokens_total{engine="0",model_name="MODEL",tier="memory"} 288.0',
        'vllm:kvpipe_misses_total{engine="0",model_name="MODEL",reason="not_saved"} 1.0',
        'vllm:kvpipe_jobs_in_flight{engine="0",model_name="MODEL"} 0.0',
        'vllm:kvpipe_leases{engine="0",model_name="MODEL"} 0.0',
    ):
        assert line.replace("MODEL", str(make_model("llama"))) in metrics, metrics[-6000:]
    for name, metric in METRICS.items():
        assert f"\nvllm:kvpipe_{name}{'_total' if metric.kind == 'counter' else ''}{{" in metrics or metric.label, name
    assert "EngineDeadError" not in served, served[-3000:]  # while it served: vLLM kills its engine to stop at once
    for trouble in ("contained_error", "illegal_transition"):
        assert trouble not in log.read_text(), log.read_text()[-3000:]
