"""Fake machines, whose facts a test sets, for the checks of `kvpipe doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli.doctor.facts import DeviceFacts, HostFacts
from kvpipe.cli.doctor.findings import PendingFinding

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
CUDA, CPU = DeviceFacts("cuda", "CUDA, 1 x GPU"), DeviceFacts("cpu", "CPU")


def unasked(*_: object) -> Any:
    """Return a fact that makes the test fail if a check asks for the fact."""
    pytest.fail("a fact that this check does not need was asked for")


def machine_of(tmp_path: Path, **facts: Any) -> HostFacts:
    """Return a machine with `facts`. Other facts are absent, or make the test fail if a check asks for them."""
    made = HostFacts(
        environ={},
        proc=tmp_path / "proc",
        cgroups=tmp_path / "cgroup",
        cpu_topology=tmp_path / "cpu",
        huge_pages=tmp_path / "huge",
        torch_version=unasked,
        vllm_version=unasked,
        plugins=unasked,
        connector_known=unasked,
        has_module=unasked,
        hash_seeds=unasked,
        first_hash=unasked,
        device=unasked,
        locked_bytes_max=unasked,
        pin=unasked,
        cpus=unasked,
        free_bytes=unasked,
    )
    return made._replace(**facts)


def raising(error: Exception) -> Any:
    """Return a fact that raises `error` if a check asks for the fact."""

    def fact(*_: object, **__: object) -> Any:
        raise error

    return fact


def broken(tmp_path: Path) -> HostFacts:
    """Return a machine on which every fact raises an error."""
    facts = {name: raising(OSError("no")) for name, value in HostFacts()._asdict().items() if callable(value)}
    return machine_of(tmp_path, **facts)


def write(path: Path, text: str) -> None:
    """Create the folder of a file, and write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def answer_of(answer: PendingFinding | None) -> PendingFinding:
    """Return `found`. Check that it is not None, and that it has a remedy unless its status is ok."""
    assert answer is not None
    assert bool(answer.remedy) == (answer.status != "ok")
    return answer


def free_bytes_of(size: int) -> Any:
    """Return a function that reports the same number of free bytes for every folder."""
    return lambda _: size
