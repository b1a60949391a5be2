"""Runs the named benchmarks, or without a name all benchmarks in `PARTS`: `python -m benchmarks [NAME …]`.

A name is one of `PARTS`, or agents, chunks, node_pool, prefill_decode, ranges or traces.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from benchmarks.replay import __main__ as replay
from benchmarks.report import show

PARTS = [
    "host", "steps", "decode", "calls", "catalog", "numerics", "units", "throughput", "turns",
    "warm", "hybrids", "pressure", "admission", "fuzz", "trace",
    "timeline", "tiers", "layouts", "whole_blocks", "tier_disk", "tier_redis", "tier_s3", "tier_mooncake",
]  # fmt: skip
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(names: list[str]) -> int:
    """Run the named benchmarks. Each benchmark prints its table and writes `docs/results/NAME.json`."""
    for name in names or PARTS:
        if len(names) != 1:  # each benchmark has its own process, because a benchmark binds threads and keeps memory
            subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)  # noqa: S603
            continue
        if name == "traces":
            return replay.main([])
        if name == "agents":
            return importlib.import_module("benchmarks.agents").main()
        module = importlib.import_module(f"benchmarks.{name}")
        figures = module.run()
        if figures:  # no figures: the benchmark's baseline is missing, which it has printed
            show(f"{name} benchmarks", figures, RESULTS / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
