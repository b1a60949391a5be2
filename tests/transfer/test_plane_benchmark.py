"""The GPU benchmark runs from end to end on a simulated device, so that errors are found before a run on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import torch

import benchmarks.gpu.__main__ as plane_benchmark
from benchmarks.gpu.race import Hunt
from benchmarks.gpu.rig import Gpu
from benchmarks.report import Figure
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.transfer_worlds import NO_GPU
from kvpipe.testing.waiting import WAIT_S
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


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root."""
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * WAIT_S, check=False)


def test_every_part_runs(tmp_path: Path) -> None:
    """All sections of the benchmark end, no race is found, and the JSON states that the device was simulated."""
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
    """With only torch and Triton, the data plane is measured.

    The benchmark names the sections that need other packages, with the reason.
    """
    ran = run("-c", BLOCKED, "--simulated", "--only", "races", "--only", "hooks", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    message = json.loads((tmp_path / "gpu.json").read_text())
    assert message["troubles"] == ["hooks: not measured, for want of anyio, pydantic, msgspec"]
    assert sum(figure["name"].startswith("race hunt") for figure in message["figures"]) == 2 * len(Mover)


def test_without_a_gpu_that_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the benchmark measures nothing and reports this."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plane_benchmark.main([]) == 2
    assert "no GPU is here" in capsys.readouterr().err


@pytest.mark.parametrize("mover", Mover)
def test_the_hunt_finds_a_forgotten_guard(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the guard before a read is missing, the hunt for races finds the wrong bytes."""
    monkeypatch.setattr(CudaEngine, "guard_read", lambda *_: True)
    assert Hunt(Gpu(simulated=True), mover, 0).run(3).wrong > 0


def test_a_hunt_ends_when_its_time_is_over() -> None:
    """The hunt makes at least one round, ends at its time limit, and reports the number of rounds."""
    found = Hunt(Gpu(simulated=True), Mover.DMA, 0).run(1000, time.monotonic())
    assert found == (1, 0, 0)


def test_figures_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure is written before the next measurement.

    A figure that cannot be measured is reported under "trouble".
    """
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
    """A device that runs on its own thread, and delays saves while it has other work."""

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
def test_hunt_finds_no_race_when_copies_are_ordered(mover: Mover, wave_bytes: int) -> None:
    """If a device delays saves as long as CUDA allows, the hunt finds no race, because the host orders all copies."""
    with LoadsFirst() as device:
        found = Hunt(Gpu(simulated=True, device=device), mover, wave_bytes).run(5)
    assert (found.wrong, found.failed) == (0, 0)


@NO_GPU
@pytest.mark.parametrize("mover", Mover)
@pytest.mark.parametrize("wave_bytes", [0, 1 << 20])
def test_no_race_on_the_device(mover: Mover, wave_bytes: int) -> None:
    """On a real device, thousands of steps overwrite blocks being saved and read blocks being loaded."""
    found = Hunt(Gpu(simulated=False), mover, wave_bytes).run(2000)
    assert (found.wrong, found.failed) == (0, 0)
