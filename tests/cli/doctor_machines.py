"""Machines of facts that a test names, for the checks of `kvpipe doctor`."""

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
    """A fact that must not be asked for."""
    pytest.fail("a fact that this check does not need was asked for")


def machine_of(tmp_path: Path, **facts: Any) -> HostFacts:
    """A machine of `facts` only: what is not given is absent, or must not be asked for."""
    made = HostFacts(
        environ={},
        proc=tmp_path / "proc",
        cgroups=tmp_path / "cgroup",
        cpu_topology=tmp_path / "cpu",
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
    """A fact that cannot be had."""

    def fact(*_: object, **__: object) -> Any:
        raise error

    return fact


def broken(tmp_path: Path) -> HostFacts:
    """A machine where every question fails."""
    facts = {name: raising(OSError("no")) for name, value in HostFacts()._asdict().items() if callable(value)}
    return machine_of(tmp_path, **facts)


def write(path: Path, text: str) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def answer_of(answer: PendingFinding | None) -> PendingFinding:
    """Return a finding that there is; it has a remedy unless all is well."""
    assert answer is not None
    assert bool(answer.remedy) == (answer.status != "ok")
    return answer


def free_bytes_of(size: int) -> Any:
    """So many bytes are free, everywhere."""
    return lambda _: size
