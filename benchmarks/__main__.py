"""Run the benchmarks: `python -m benchmarks [host] [engine] [chunks]`; default: host and engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.report import show

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main(names: list[str]) -> int:
    """Each part prints its table and writes `docs/results/NAME.json`."""
    for name in names or ["host", "engine"]:
        module = importlib.import_module(f"benchmarks.{name}")
        show(f"{name} benchmarks", module.run(), RESULTS / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
