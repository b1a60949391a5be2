"""All that is to be measured on a GPU, in the order of its worth: `python -m benchmarks.gpu.runs [--part N]`.

The first three parts together fit into 25 minutes, each part into one call of at most 10; the others are run where they
are asked for. The first asks `benchmarks.gpu.probe`'s
questions, and where pinning or batches of copies are refused nothing more is run. Each run is a process of its own
with a limit of time, and leaves a file of JSON and its output; one that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.probe import REFUSED

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "docs" / "results" / "gpu"
PART_S_MAX, TOTAL_S_MAX = 600, 1500
NOTHING: Final = 2  # the exit status of our own modules where there is no device; pytest's, of tests it cannot read
GRACE_S: Final = 20  # of a run's limit: it ends by itself before, if it looks at the clock
PLANE, ENGINE = "benchmarks.gpu", "benchmarks.gpu.engine"
SIMULATED: Final = {
    "benchmarks.gpu.probe": ("--simulated",),
    PLANE: ("--simulated",),
    ENGINE: ("--device", "cpu", "--shapes", "tiny"),
}
"""What a module is asked for besides, where there is no GPU."""


class Run(NamedTuple):
    """One process: `module` with `arguments`, for at most `seconds_max`."""

    name: str
    seconds_max: int
    module: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, folder: Path, *, simulated: bool) -> list[str]:
        """Return the command line; what it finds out goes into `folder`."""
        more = SIMULATED.get(self.module, ()) if simulated else ()
        if self.module != "pytest":
            more += ("--json", str(folder / f"{self.name}.json"))
        if self.module in {PLANE, ENGINE}:
            more += ("--seconds-max", str(self.seconds_max - GRACE_S))
        return [sys.executable, "-m", self.module, *self.arguments, *more]


QUEUES: Final = (("CUDA_DEVICE_MAX_CONNECTIONS", "32"),)
HIDING: Final = ("--only", "hidden load", "--only", "decode")
PARTS: Final[tuple[tuple[Run, ...], ...]] = (
    (
        Run("probe", 90, "benchmarks.gpu.probe", ()),
        Run("movers", 150, "pytest", ("tests/transfer", "-q", "-k", "cuda_")),
        Run("races", 90, PLANE, ("--only", "races")),
        Run("throughput", 150, PLANE, ("--only", "Llama-3-8B", "--only", "Llama-3-70B TP4")),
    ),
    (
        Run("speed-1b", 270, ENGINE, ("--shapes", "mid", "--modes", "no connector,auto")),
        Run("engine", 240, ENGINE, ("--shapes", "tiny", "--cases", "auto-sync,auto-async,layerwise-sync")),
    ),
    (
        Run("hiding", 120, PLANE, HIDING),
        Run("host", 120, PLANE, ("--only", "hooks", "--only", "wake-ups", "--only", "latency")),
        Run("engine-full", 120, ENGINE, ("--shapes", "tiny", "--graphs", "full", "--cases", "auto-sync,step-async")),
        Run("engine-v1", 120, ENGINE, ("--shapes", "tiny", "--runner", "v1", "--cases", "auto-sync,step-async")),
    ),
    (
        Run("speed-1b-modes", 300, ENGINE, ("--shapes", "mid", "--modes", "no connector,layerwise,step")),
        Run("speed-8b", 300, ENGINE, ("--shapes", "big")),
    ),
    (
        Run("engine-flash", 150, ENGINE, ("--shapes", "tiny", "--attn", "FLASH_ATTN", "--cases", "auto-sync")),
        Run("engine-eager", 120, ENGINE, ("--shapes", "tiny", "--graphs", "none", "--cases", "auto-sync")),
        Run("hiding-32-queues", 120, PLANE, HIDING, QUEUES),
    ),
)
"""What each is for: 1 does it work, is anything wrong, the bus; 2 time to first token and decoding of a 1 B model, a
whole engine; 3 what the forward notices, the host, other graphs and runners. If asked for: 4 the other modes, an 8 B
model; 5 what else may differ."""
PARTS_MAIN: Final = 3


def run(one: Run, folder: Path, *, simulated: bool, more: tuple[str, ...] = ()) -> int:
    """Run one; return its exit status, 124 for one that was ended. `more`: for the engine."""
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
    """Run what was asked for; print a line for each."""
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
