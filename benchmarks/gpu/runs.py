"""Makes all measurements on a GPU, the most important first: `python -m benchmarks.gpu.runs [--part N]`.

The first three parts together take at most 25 minutes, and each part takes at most 10 minutes. The other parts run only
on request. The first run is `benchmarks.gpu.probe`. If the driver refuses pinning or batches of copies, no other run
follows. Each run is a process with a time limit, and writes a JSON file and a file with its output. A failed run does
not stop the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.engine import MOVER_CASES
from benchmarks.gpu.probe import REFUSED

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "docs" / "results" / "gpu"
PART_S_MAX, TOTAL_S_MAX = 600, 1500
# the exit status of our modules if there is no device, and of pytest if a test file cannot be imported
NOTHING: Final = 2
GRACE_S: Final = 20  # a run that checks its time ends by itself this many seconds before its limit
PLANE, ENGINE = "benchmarks.gpu", "benchmarks.gpu.engine"
SIMULATED: Final = {
    "benchmarks.gpu.probe": ("--simulated",),
    PLANE: ("--simulated",),
    ENGINE: ("--device", "cpu", "--shapes", "tiny"),
}
"""Additional arguments of a module on a machine without a GPU."""


class Run(NamedTuple):
    """One process: `module` with `arguments`, for at most `seconds_max`."""

    name: str
    seconds_max: int
    module: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, folder: Path, *, simulated: bool) -> list[str]:
        """Return the command line of the run. The run writes its results into `folder`."""
        more = SIMULATED.get(self.module, ()) if simulated else ()
        if self.module != "pytest":
            more += ("--json", str(folder / f"{self.name}.json"))
        if self.module in {PLANE, ENGINE}:
            more += ("--seconds-max", str(self.seconds_max - GRACE_S))
        return [sys.executable, "-m", self.module, *self.arguments, *more]


QUEUES: Final = (("CUDA_DEVICE_MAX_CONNECTIONS", "32"),)
FA3: Final = ("--shapes", "tiny", "--attn", "FLASH_ATTN", "--graphs", "full", "--modes", "")
"""Arguments for FlashAttention 3, the usual attention on an H100, without torch.compile and without speed tests."""
HIDING: Final = ("--only", "hidden load", "--only", "decode")
PARTS: Final[tuple[tuple[Run, ...], ...]] = (
    (
        Run("probe", 90, "benchmarks.gpu.probe", ()),
        Run("fa3-movers", 240, ENGINE, (*FA3, "--cases", ",".join(MOVER_CASES))),
        Run("movers", 150, "pytest", ("tests/transfer", "-q", "-k", "cuda_")),
        Run("races", 90, PLANE, ("--only", "races")),
    ),
    (
        Run("speed-1b", 270, ENGINE, ("--shapes", "mid", "--modes", "no connector,auto")),
        Run("engine", 240, ENGINE, ("--shapes", "tiny", "--cases", "auto-sync,auto-async,layerwise-sync")),
    ),
    (
        Run("hiding", 120, PLANE, HIDING),
        Run("host", 120, PLANE, ("--only", "hooks", "--only", "wake-ups", "--only", "latency")),
        Run("throughput", 150, PLANE, ("--only", "Llama-3-8B", "--only", "Llama-3-70B TP4")),
    ),
    (
        Run("speed-1b-modes", 300, ENGINE, ("--shapes", "mid", "--modes", "no connector,layerwise,step")),
        Run("speed-8b", 300, ENGINE, ("--shapes", "big")),
    ),
    (
        Run("engine-full", 120, ENGINE, ("--shapes", "tiny", "--graphs", "full", "--cases", "auto-sync,step-async")),
        Run("engine-v1", 120, ENGINE, ("--shapes", "tiny", "--runner", "v1", "--cases", "auto-sync,step-async")),
        Run("engine-eager", 120, ENGINE, ("--shapes", "tiny", "--graphs", "none", "--cases", "auto-sync")),
        Run("hiding-32-queues", 120, PLANE, HIDING, QUEUES),
    ),
)
"""The parts, by number:

1. Tests of each mover, with FlashAttention 3 and alone, and the race hunt.
2. Time to first token and decoding of a 1 B model, and tests of a whole engine.
3. Effects on the forward, the host and the bus.
4. On request: the other modes, and an 8 B model.
5. On request: other graphs, runners and settings whose results may differ.
"""
PARTS_MAIN: Final = 3


def run(one: Run, folder: Path, *, simulated: bool, more: tuple[str, ...] = ()) -> int:
    """Run the process `one`, and return its exit status, or 124 after a timeout. `more` has the engine's arguments."""
    command = one.command(folder, simulated=simulated) + list(more if one.module == ENGINE else ())
    environment = os.environ | dict(one.variables)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / f"{one.name}.txt").open("w", encoding="utf-8") as output:
        try:
            return subprocess.run(  # noqa: S603
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=one.seconds_max, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def main(arguments: list[str]) -> int:
    """Run the requested parts, and print a line for each run. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.runs", description=__doc__)
    parser.add_argument(
        "--part", type=int, action="append", choices=range(1, len(PARTS) + 1), help="may be repeated; else 1 to 3"
    )
    parser.add_argument("--only", action="append", help="this run; may be repeated")
    parser.add_argument("--breakable", action="store_true", help="engines without torch.compile, where that fails")
    parser.add_argument("--simulated", action="store_true", help="run everything without a GPU, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON and output")
    options = parser.parse_args(arguments)
    if not options.simulated:
        import torch

        if not torch.cuda.is_available():
            why = "no GPU is here (torch.cuda.is_available() is False)"
            print(f"kvpipe: {why}; --simulated runs without one", file=sys.stderr)
            return 2
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    numbers = options.part or range(1, (len(PARTS) if options.only else PARTS_MAIN) + 1)
    wanted = [one for number in numbers for one in PARTS[number - 1] if not options.only or one.name in options.only]
    failed = False
    for one in wanted:
        began = time.monotonic()
        status = run(one, folder, simulated=options.simulated, more=("--breakable",) if options.breakable else ())
        message = {0: "good", 124: "ended: too long"}.get(status, f"failed ({status})")
        if status == NOTHING and one.module != "pytest":
            message = "nothing to run"
        print(f"{one.name}: {message}, {time.monotonic() - began:.0f} s; {folder / one.name}.txt", flush=True)
        failed |= status != 0
        if one.name == "probe" and status == REFUSED:
            print((folder / "probe.txt").read_text(encoding="utf-8").strip().splitlines()[-1])
            return REFUSED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
