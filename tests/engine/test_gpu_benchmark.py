"""The GPU benchmark of whole engines runs on vLLM's CPU build.

Each section works, or reports the reason why it cannot run on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CASES = ("layerwise-sync", "step-async")  # the two cases include each mode and each kind of load
SCENARIOS = (
    "start",
    "batch, cold and warm",
    "conversation",
    "abort",
    "preemption",
    "bytes of the cache",
    "corrupted chunk",
    "nothing left over",
    "shutdown",
)
SPEED = ("start", "first token, 512 tokens", "overhead of saving", "shutdown")
ALONE = ("start", "decode", "shutdown")


@pytest.mark.timeout(1700)
def test_the_engine_benchmark_runs(tmp_path: Path) -> None:
    """A case runs half of the benchmark in one process, as on a GPU. Sizes that only a GPU can hold are left out."""
    path = tmp_path / "engine.json"
    command = [sys.executable, "-m", "benchmarks.gpu.engine", "--device", "cpu", "--shapes", "tiny"]
    command += ["--cases", ",".join(CASES), "--seconds-max", "1500", "--json", str(path)]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1600)
    assert path.is_file(), done.stderr[-4000:]
    found = json.loads(path.read_text(encoding="utf-8"))
    sections = {section["name"]: section for section in found["sections"]}
    odd = {
        name: (section["note"], section["traceback"])
        for name, section in sections.items()
        if section["outcome"] != "passed" and section["note"] != "needs CUDA"
    }
    assert not odd, odd
    assert done.returncode == 0, done.stderr[-4000:]
    assert found["complete"]
    wanted = {f"{case}: {scenario}" for case in CASES for scenario in SCENARIOS}
    wanted |= {f"tiny {mode}: {label}" for mode in ("auto", "layerwise", "step") for label in SPEED}
    wanted |= {f"tiny no connector: {label}" for label in ALONE}
    passed = {name for name, section in sections.items() if section["outcome"] == "passed"}
    assert wanted | {"reference float32"} <= passed, wanted - passed
    assert {"cpu", "commit", "torch", "vllm", "triton", "gpu", "driver", "date"} <= found["machine"].keys()
    for case in CASES:
        assert sections[f"{case}: batch, cold and warm"]["figures"]["loaded tokens"] == 288 + 608 + 128
        assert sections[f"{case}: bytes of the cache"]["figures"]["flipped bytes found"] == 1
    for mode in ("auto", "layerwise", "step"):
        figures = sections[f"tiny {mode}: overhead of saving"]["figures"]
        assert {f"decode throughput, {message}/no connector" for message in ("saving", "without")} <= figures.keys()
    assert "nothing left over" in done.stdout  # the benchmark's table is printed
