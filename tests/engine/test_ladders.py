"""Kinds of engines that users run, but no other test file has: runner V2, other vLLM releases, and a compiled model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from vllm.config import CompilationConfig, CompilationMode

from kvpipe.connectors.vllm.tiny.engine import Engine
from tests.engine.ladder import ANSWER, climb

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 1500
FETCH_SECONDS_MAX = 1800


def _run(*module: str, seconds_max: int = SECONDS_MAX, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Run one of the tests' programs, and return the lines that it prints."""
    ran = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds_max,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    return ran.stdout.splitlines()


def _climb(version: str, *kinds: str, **environment: str) -> None:
    """Run the ladder test with engines of one release of vLLM, in another process."""
    printed = _run("tests.engine.ladder", version, *kinds, environment=os.environ | environment)
    assert [f"{version} {kind}: climbed" for kind in kinds] == [one for one in printed if one.endswith(": climbed")]


@pytest.mark.timeout(SECONDS_MAX + 30)
def test_runner_v2_answers_from_loaded_kv_as_without_kvpipe() -> None:
    """The ladder test passes without drafts and with EAGLE."""
    import vllm

    _climb(vllm.__version__.split("+")[0], "runner-v2", "eagle")


@pytest.mark.timeout(FETCH_SECONDS_MAX + SECONDS_MAX + 30)
def test_other_releases_answer_from_loaded_kv_as_without_kvpipe() -> None:
    """The ladder test passes with each supported release that is not installed, with the installed compiled modules.

    With EAGLE the runner is V2. With drafts, runner V2 ends the connector's step later than without drafts.
    """
    releases = [line.split(" ", 1) for line in _run("tests.contract.fetch", "--others", seconds_max=FETCH_SECONDS_MAX)]
    assert releases
    for version, folder in releases:
        path = os.pathsep.join((folder, str(ROOT)))
        _climb(version, "runner-v1", "eagle", PYTHONPATH=path, VLLM_TARGET_DEVICE="cpu")


def test_compiled_model_answers_from_loaded_kv_as_without_kvpipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ladder test passes with a model that Dynamo traces.

    The traced graph contains the attention of every layer.
    """
    calls: list[GraphModule] = []

    def eager(graph: GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Run a graph like Dynamo's backend `eager`, and record each call."""

        def call(*arguments: Any) -> Any:
            calls.append(graph)
            return graph(*arguments)

        return call

    def check(live: Engine) -> None:
        compilation = live.core.vllm_config.compilation_config
        assert compilation.mode is CompilationMode.DYNAMO_TRACE_ONCE
        assert len(calls) >= 2 * ANSWER
        (graph,) = {*calls}
        attention = [node for node in graph.graph.nodes if "unified_attention_with_output" in str(node.target)]
        assert len(attention) == len(compilation.static_forward_context)
        calls.clear()

    # vLLM sets this variable for the whole process, so the test restores the old value
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(CompilationConfig, "init_backend", lambda *_, **__: eager)
    compilation = {"mode": CompilationMode.DYNAMO_TRACE_ONCE, "backend": "eager"}
    climb(tmp_path, check, enforce_eager=False, compilation_config=compilation)
    torch._dynamo.reset()
