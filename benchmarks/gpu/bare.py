"""Finds which of kvpipe's requirements are missing on a machine that has torch and Triton."""

from __future__ import annotations

import importlib


def missing(*names: str) -> list[str]:
    """Return the named packages that cannot be imported."""
    absent = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            absent.append(name)
    return absent


ABSENT = missing("anyio", "pydantic", "msgspec")
"""The packages that the pipeline's figures need and that cannot be imported on this machine."""
