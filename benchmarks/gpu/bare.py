"""Lets the data plane run on a machine that has torch and Triton and none of kvpipe's other needs."""

from __future__ import annotations

import importlib


def missing(*names: str) -> list[str]:
    """Return those of the named packages that cannot be imported."""
    absent = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            absent.append(name)
    return absent


ABSENT = missing("anyio", "pydantic", "msgspec")
"""What the pipeline's figures need and this machine lacks."""
