"""The GPU benchmark runs from end to end on a simulated device, so that no typo waits for the first GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.race import Hunt
from benchmarks.gpu.rig import Gpu
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from tests.transfer.worlds import NO_GPU

ROOT = Path(__file__).parents[2]
BLOCKED = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"structlog", "pydantic", "msgspec", "anyio", "vllm"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["benchmarks.gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root, with these variables in its environment."""
    command = (sys.executable, *command)
    environment = os.environ | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_every_part_runs(tmp_path: Path) -> None:
    """All parts end, no race is found, and the JSON says that nothing was measured on a GPU."""
    ran = run("-m", "benchmarks.gpu", "--simulated", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert said["gpu"] == {"gpu": "none: simulated on the host"}
    assert said["troubles"] == ["wake-ups: needs a GPU"]
    figures = {figure["name"]: figure for figure in said["figures"]}
    assert len(figures) == len(said["figures"])
    assert sum(name.startswith("race hunt") and figure["holds"] for name, figure in figures.items()) == 2 * len(Mover)
    for part in ("Llama-3-8B: save, staged", "Llama-3-70B TP4: both ways at once, auto", "host time of save_kv_layer",
                 "from event to transition", "decode step of 64 while saving, dma"):  # fmt: skip
        assert part in figures


def test_torch_and_triton_are_enough(tmp_path: Path) -> None:
    """Without kvpipe's other needs the data plane is measured, and what is not is said, with the reason."""
    ran = run("-c", BLOCKED, "--simulated", "--only", "races", "--only", "hooks", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert said["troubles"] == ["hooks: not measured, for want of anyio, pydantic, msgspec, structlog"]
    assert sum(figure["name"].startswith("race hunt") for figure in said["figures"]) == 2 * len(Mover)


def test_without_a_gpu_it_says_so() -> None:
    """Nothing is measured by mistake."""
    ran = run("-m", "benchmarks.gpu", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 2
    assert "no GPU is here" in ran.stderr


@pytest.mark.parametrize("mover", Mover)
def test_the_hunt_finds_a_forgotten_guard(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loads are not queued before their readers read, the hunt says so."""
    monkeypatch.setattr(CudaEngine, "guard_read", lambda *_: True)
    assert Hunt(Gpu(simulated=True), mover, 0).run(3).wrong > 0


@NO_GPU
@pytest.mark.parametrize("mover", Mover)
@pytest.mark.parametrize("wave_bytes", [0, 1 << 20])
def test_no_race_on_the_device(mover: Mover, wave_bytes: int) -> None:
    """Thousands of steps whose compute overwrites what was just saved and reads what is just being loaded."""
    found = Hunt(Gpu(simulated=False), mover, wave_bytes).run(2000)
    assert (found.wrong, found.failed) == (0, 0)
