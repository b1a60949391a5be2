"""The figures of a benchmark, with their limits, as a table and as a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass
class Figure:
    """One measured figure. `limit` is its largest acceptable value, or, with `at_least`, its smallest."""

    name: str
    value: float
    limit: float
    unit: str
    baseline: str = ""
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the limit holds."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def median_s(call: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Return the median seconds of one call, over `repeats` samples of `inner` calls each, after one warm-up."""
    call()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        samples.append((time.perf_counter() - begin) / inner)
    return median(samples)


def machine() -> dict[str, object]:
    """Return the machine and the versions that the figures were measured with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],  # averages over the last 1, 5 and 15 minutes
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(title: str, figures: list[Figure], path: Path, **more: object) -> None:
    """Print the table of figures, and write a JSON file of the figures and `more`."""
    tabulate(title, figures)
    write(figures, path, **more)


def tabulate(title: str, figures: list[Figure]) -> None:
    """Print the table of figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("figure")
    for heading in ("median", "limit", "unit"):
        table.add_column(heading, justify="right")
    table.add_column("holds", justify="center")
    table.add_column("beside")
    for f in figures:
        sign = ">=" if f.at_least else "<="
        mark = "[green]yes[/]" if f.ok else "[red]no[/]"
        table.add_row(f.name, f"{f.value:.3g}", f"{sign} {f.limit:g}", f.unit, mark, f.baseline)
    Console(width=132).print(table)


def write(figures: list[Figure], path: Path, **more: object) -> None:
    """Write a JSON file of the figures and `more`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(f) | {"holds": f.ok} for f in figures]
    path.write_text(json.dumps({"machine": machine(), **more, "figures": rows}, indent=1) + "\n", encoding="utf-8")
