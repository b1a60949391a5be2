"""The lock of the CPU environment lists every package that its packages need."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"nixl-cu13", "torchaudio", "torchcodec", "torchvision"}
"""Packages that are not installed. `requirements/README.md` has the reasons."""


def test_lock_lists_every_dependency() -> None:
    """The lock must be complete, because its packages are installed without dependency resolution."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").split()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    wanted = [
        (name, need)
        for name in pinned
        for need in map(Requirement, distribution(name).requires or ())
        if need.name not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""}))
    ]
    assert len(wanted) > len(pinned)
    assert [
        f"{name} needs {need}"
        for name, need in wanted
        if not need.specifier.contains(pinned.get(canonicalize_name(need.name), "0"), prereleases=True)
        or canonicalize_name(need.name) not in pinned
    ] == []
