"""Checks and measures the CUDA data plane on one GPU: `python -m benchmarks.gpu [--simulated] [--seconds-max 480]`.

This needs torch and Triton. The figures of the pipeline's hooks also need anyio, pydantic and msgspec. vLLM is not
needed; `benchmarks.gpu.engine` runs vLLM.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu import (
    bare,  # imported first: finds the packages that a bare machine lacks
    hooks,
    plane,
    race,
)
from benchmarks.gpu.rig import Gpu
from benchmarks.report import Figure, show, write
from kvpipe.transfer.movers import Mover

Part = tuple[str, Callable[[], Iterable[Figure]] | str]
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def hunts(gpu: Gpu, rounds: int, until: float) -> Iterator[Figure]:
    """Hunt for races in every mover, with and without waves. Each hunt gets an equal share of the remaining time."""
    kinds = [(mover, wave_bytes) for mover in Mover for wave_bytes in (0, 1 << 20)]
    for number, (mover, wave_bytes) in enumerate(kinds):
        now = time.monotonic()
        found = race.Hunt(gpu, mover, wave_bytes).run(rounds, now + (until - now) / (len(kinds) - number))
        name = f"race hunt: {mover.value}, {'waves' if wave_bytes else 'layer by layer'}"
        message = f"{found.rounds} of {rounds} rounds of {race.SHAPE.layers} layers"
        yield Figure(name, found.wrong + found.failed, 0, "wrong", message)


def parts(gpu: Gpu, until: float = math.inf) -> list[Part]:
    """Return the parts, the most important part first. A part that cannot run has the reason instead of a function.

    `until` is the time at which the race hunts end (as for `Hunt.run`).
    """
    small = gpu.simulated
    rounds, pairs = (6, 2) if small else (2000, 15)
    width = (32, 64) if small else (4096, 14336)
    limit: list[plane.Limit] = []

    def measure_limit() -> Iterator[Figure]:
        limit.append(plane.Limit(gpu, 1 << 20 if small else 512 << 20))
        for direction, rate in limit[0].one.items():
            yield Figure(
                f"one large pinned copy, {direction.name.lower()}", rate, 0, "GB/s", "the limit", at_least=True
            )
        yield Figure("one large pinned copy each way at once", limit[0].both, 0, "GB/s", "the limit", at_least=True)

    def of(shape_number: int) -> Callable[[], Iterator[Figure]]:
        shape, chunks, asked = plane.SHAPES[shape_number]
        return lambda: plane.throughput(gpu, limit[0], gpu.sized(shape), 2 if small else chunks, asked)

    needs = ", ".join(bare.ABSENT)
    unmeasured = f"not measured, for want of {needs}"
    return [
        ("limit", measure_limit),
        ("races", lambda: hunts(gpu, rounds, until)),
        ("Llama-3-8B", of(0)),
        ("Llama-3-70B TP4", of(1)),
        ("hidden load", lambda: plane.hidden_load(gpu, 16 if small else 2048, 512 if small else 2048, pairs, width)),
        ("decode", lambda: plane.decode_saving(gpu, 64, pairs, width)),
        ("hooks", unmeasured if needs else lambda: hooks.hooks(gpu, 3 if small else 30)),
        ("wake-ups", "needs a GPU" if small else lambda: hooks.wakeups(gpu, 100)),
        ("latency", unmeasured if needs else lambda: hooks.latency(gpu, 20 if small else 200)),
    ]


def main(arguments: list[str]) -> int:
    """Run the parts, write JSON after each figure, and print a table. A failed part does not stop the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="run everything on the host, to see that it runs")
    parser.add_argument("--seconds-max", type=float, default=480, help="begin no part after so long")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="where figures go")
    parser.add_argument("--only", action="append", help="this part; may be repeated")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    options = parser.parse_args(arguments)
    if not options.simulated and not torch.cuda.is_available():
        print(
            "kvpipe: no GPU is here (torch.cuda.is_available() is False); --simulated runs without one", file=sys.stderr
        )
        return 2
    gpu = Gpu(simulated=options.simulated)
    on = device(gpu, options.commit)
    began, figures, troubles = time.monotonic(), list[Figure](), list[str]()
    for name, run in parts(gpu, began + options.seconds_max):
        if options.only and name not in {"limit", *options.only}:
            continue
        part_began = time.monotonic()
        if part_began - began > options.seconds_max:
            troubles.append(f"{name}: not run, {options.seconds_max:g} s were over")
            continue
        if isinstance(run, str):
            troubles.append(f"{name}: {run}")
            continue
        try:
            for figure in run():
                figures.append(figure)
                write(figures, options.json, gpu=on, troubles=troubles)
        except Exception as error:  # noqa: BLE001  (the other parts are worth having)
            traceback.print_exc()
            troubles.append(f"{name}: {error!r}")
        print(f"{name}: {time.monotonic() - part_began:.1f} s", file=sys.stderr)
    title = "CUDA data plane, simulated: the times mean nothing" if options.simulated else "CUDA data plane"
    show(title, figures, options.json, gpu=on, troubles=troubles)
    print(*troubles, sep="\n")
    return int((bool(troubles) and not gpu.simulated) or any(f.name.startswith("race") and not f.ok for f in figures))


def device(gpu: Gpu, commit: str) -> dict[str, object]:
    """Return the device, and the versions of its driver and libraries. `machine` of the report has the host's."""
    if gpu.simulated:
        return {"gpu": "none: simulated on the host"}
    import triton

    properties = torch.cuda.get_device_properties(gpu.where)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20).stdout.split("\n")[0]  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    versions = {"cuda": torch.version.cuda, "triton": triton.__version__, "driver": driver.strip()}
    return {"gpu": properties.name, "gpu_bytes": properties.total_memory, "commit": commit, **versions}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
