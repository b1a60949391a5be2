"""The GPU benchmark runs from end to end on a simulated device, so that no typo waits for the first GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

import benchmarks.gpu.__main__ as plane_benchmark
from benchmarks.gpu.race import Hunt
from benchmarks.gpu.rig import Gpu
from benchmarks.report import Figure
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.transfer_worlds import NO_GPU
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover

PATIENCE_MS = 3
ROOT = Path(__file__).parents[2]
BLOCKED = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "msgspec", "anyio", "vllm"}:
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
    """All parts end, no race is found, and the JSON has that nothing was measured on a GPU."""
    ran = run("-m", "benchmarks.gpu", "--simulated", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    message = json.loads((tmp_path / "gpu.json").read_text())
    assert message["gpu"] == {"gpu": "none: simulated on the host"}
    assert message["troubles"] == ["wake-ups: needs a GPU"]
    figures = {figure["name"]: figure for figure in message["figures"]}
    assert len(figures) == len(message["figures"])
    assert sum(name.startswith("race hunt") and figure["holds"] for name, figure in figures.items()) == 2 * len(Mover)
    for part in ("Llama-3-8B: save, staged", "Llama-3-70B TP4: both ways at once, auto", "host time of save_kv_layer",
                 "from event to transition", "from event to transition, blocking events",
                 "decode step of 64 while saving, dma"):  # fmt: skip
        assert part in figures


def test_torch_and_triton_are_enough(tmp_path: Path) -> None:
    """Without kvpipe's other needs the data plane is measured, and what is not is named, with the reason."""
    ran = run("-c", BLOCKED, "--simulated", "--only", "races", "--only", "hooks", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    message = json.loads((tmp_path / "gpu.json").read_text())
    assert message["troubles"] == ["hooks: not measured, for want of anyio, pydantic, msgspec"]
    assert sum(figure["name"].startswith("race hunt") for figure in message["figures"]) == 2 * len(Mover)


def test_without_a_gpu_that_is_reported() -> None:
    """Nothing is measured by mistake."""
    ran = run("-m", "benchmarks.gpu", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 2
    assert "no GPU is here" in ran.stderr


@pytest.mark.parametrize("mover", Mover)
def test_the_hunt_finds_a_forgotten_guard(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loads are not queued before their readers read, the hunt finds it."""
    monkeypatch.setattr(CudaEngine, "guard_read", lambda *_: True)
    assert Hunt(Gpu(simulated=True), mover, 0).run(3).wrong > 0


def test_a_hunt_ends_when_its_time_is_over() -> None:
    """And reports how many rounds it did, at least one."""
    found = Hunt(Gpu(simulated=True), Mover.DMA, 0).run(1000, time.monotonic())
    assert found == (1, 0, 0)


def test_figures_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in the file before the next is measured; one that cannot be measured is a trouble."""
    path, seen = tmp_path / "gpu.json", list[str]()

    def measured() -> Iterator[Figure]:
        for name in ("first", "second"):
            yield Figure(name, 1, 1, "x")
            seen.extend(figure["name"] for figure in json.loads(path.read_text())["figures"])
        raise RuntimeError("lost")

    monkeypatch.setattr(plane_benchmark, "parts", lambda *_: [("some", measured)])
    assert plane_benchmark.main(["--simulated", "--json", str(path)]) == 0
    message = json.loads(path.read_text())
    assert seen == ["first", "first", "second"]
    assert [figure["name"] for figure in message["figures"]] == ["first", "second"]
    assert message["troubles"] == ["some: RuntimeError('lost')"]


class LoadsFirst(FakeDevice):
    """A device that runs by itself, and saves only when there is nothing else to do, for a while."""

    def __enter__(self) -> Self:
        """Begin."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        idle = 0
        while not self._stop.is_set():
            with self.lock:
                ready = [stream for stream in self.streams if stream.ready]
                first = [stream for stream in ready if not stream.name.startswith("save")]
                for stream in first or (ready if idle > PATIENCE_MS else ()):
                    stream.run_head()
            idle = 0 if first else idle + 1
            if not first:
                time.sleep(0.001)


@pytest.mark.parametrize("wave_bytes", [0, 1 << 20])
@pytest.mark.parametrize("mover", Mover)
def test_the_hunt_accuses_nobody_who_is_right(mover: Mover, wave_bytes: int) -> None:
    """On a device whose saves are late whenever they may be: slots are ordered by the host, which waits for them."""
    with LoadsFirst() as device:
        found = Hunt(Gpu(simulated=True, device=device), mover, wave_bytes).run(5)
    assert (found.wrong, found.failed) == (0, 0)


@NO_GPU
@pytest.mark.parametrize("mover", Mover)
@pytest.mark.parametrize("wave_bytes", [0, 1 << 20])
def test_no_race_on_the_device(mover: Mover, wave_bytes: int) -> None:
    """Thousands of steps whose compute overwrites what was just saved and reads what is just being loaded."""
    found = Hunt(Gpu(simulated=False), mover, wave_bytes).run(2000)
    assert (found.wrong, found.failed) == (0, 0)
