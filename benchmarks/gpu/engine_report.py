"""Runs sections one by one, also after a failed section. A section for which no time is left is skipped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine

Figures = dict[str, float | int | str]

TRACEBACK_LINES: Final = 12
NOTE_CHARACTERS: Final = 300
WIDTH: Final = 150
QUERY_S_MAX: Final = 20


class Skip(Exception):  # noqa: N818  (not an error)
    """Raised by a section that cannot run on this machine. The text is the reason."""


@dataclass
class Section:
    """The result of one section."""

    name: str
    outcome: str  # passed, failed or skipped
    note: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    traceback: list[str] = field(default_factory=list)


class Ledger:
    """Runs sections and keeps their results. JSON is written after each section, so a killed run leaves results."""

    def __init__(self, seconds_max: float, path: Path | None, head: dict[str, Any], begin: float) -> None:
        """`head` is copied into the JSON. `begin` is the run's start, in seconds of the monotonic clock."""
        self.sections: list[Section] = []
        self._begin, self._seconds_max, self._path, self._head = begin, seconds_max, path, head

    @property
    def spent_s(self) -> float:
        """The seconds since the run's start."""
        return time.monotonic() - self._begin

    @property
    def failed(self) -> bool:
        """Whether any section failed."""
        return any(section.outcome == "failed" for section in self.sections)

    def run(self, name: str, call: Callable[[], Figures | None], *, always: bool = False) -> bool:
        """Run one section, and return whether the section passed.

        With `always`, run the section even if no time is left.
        """
        if self.spent_s > self._seconds_max and not always:
            self.skip(name, f"no time left: {self.spent_s:.0f} s of {self._seconds_max:.0f} s are spent")
            return False
        begin, section = time.monotonic(), Section(name, "passed")
        try:
            section.figures = call() or {}
        except Skip as why:
            section.outcome, section.note = "skipped", str(why)
        except Exception as error:  # noqa: BLE001  (the error is the result)
            lines = traceback.format_exc().strip().splitlines()
            section.outcome, section.traceback = "failed", lines[-TRACEBACK_LINES:]
            section.note = f"{type(error).__name__}: {' '.join(str(error).split())}"[:NOTE_CHARACTERS]
        section.seconds = round(time.monotonic() - begin, 3)
        self._add(section)
        return section.outcome == "passed"

    def skip(self, name: str, why: str) -> None:
        """Record a section that does not run, with the reason `why`."""
        self._add(Section(name, "skipped", why))

    def _add(self, section: Section) -> None:
        self.sections.append(section)
        message = section.note or _listed(section.figures)
        print(f"{self.spent_s:6.1f} s  {section.outcome:8}{section.name}  {message}", file=sys.stderr, flush=True)
        for line in section.traceback:
            print(f"          | {line}", file=sys.stderr, flush=True)
        self.write(complete=False)

    def write(self, *, complete: bool) -> None:
        """Write the JSON, if a file was named."""
        if self._path is None:
            return
        content = self._head | {
            "complete": complete,
            "seconds": round(self.spent_s, 1),
            "sections": [asdict(section) for section in self.sections],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def show(self, title: str) -> None:
        """Print the table of all sections."""
        table = Table(title=title, box=box.SIMPLE_HEAD)
        table.add_column("section", no_wrap=True)
        table.add_column("outcome")
        table.add_column("s", justify="right")
        table.add_column("figures, or why not")
        colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
        for section in self.sections:
            outcome = f"[{colours[section.outcome]}]{section.outcome}[/]"
            message = (section.note or _listed(section.figures)).replace("[", "\\[")
            table.add_row(section.name, outcome, f"{section.seconds:.1f}", message)
        Console(width=WIDTH).print(table)


def _listed(figures: Figures) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )


def described(commit: str | None) -> dict[str, Any]:
    """Return the machine, its GPU and driver, and the versions of packages. Facts that are not found are left out."""
    try:
        facts: dict[str, Any] = machine()
    except OSError as error:  # no git
        facts = {"torch": torch.__version__, "commit": "", "why": repr(error)}
    if commit:
        facts["commit"] = commit
    facts |= {name: _version(name) for name in ("vllm", "triton", "transformers")}
    facts |= {"cuda": torch.version.cuda, "gpu": None, "gpu_bytes": None, "driver": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "gpu_bytes": properties.total_memory, "driver": _driver()}
    return facts


def _version(name: str) -> str | None:
    try:
        return str(__import__(name).__version__)
    except Exception as error:  # noqa: BLE001  (the engine reports a missing package)
        return f"not importable: {error!r}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_S_MAX)  # noqa: S603
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"unknown: {error!r}"
