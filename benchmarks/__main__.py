"""Run the benchmarks: `python -m benchmarks [NAME …]`: `PARTS`, or agents, chunks, prefill_decode, ranges, traces."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from benchmarks.replay import __main__ as replay
from benchmarks.report import show

PARTS = [
    "host", "calls", "catalog", "throughput", "turns", "warm", "hybrids", "pressure", "admission", "fuzz", "trace",
    "timeline", "tiers", "layouts", "tier_disk", "tier_redis", "tier_s3", "tier_mooncake",
]  # fmt: skip
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(names: list[str]) -> int:
    """Each part prints its table and writes `docs/results/NAME.json`."""
    for name in names or PARTS:
        if len(names) != 1:  # each in a process of its own: they bind threads and leave memory behind
            subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)  # noqa: S603
            continue
        if name == "traces":
            return replay.main([])
        if name == "agents":
            return importlib.import_module("benchmarks.agents").main()
        module = importlib.import_module(f"benchmarks.{name}")
        figures = module.run()
        if figures:  # else its baseline is missing, as it has said
            show(f"{name} benchmarks", figures, RESULTS / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
