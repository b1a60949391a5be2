"""Lets the data plane run on a machine that has torch and Triton and none of kvpipe's other needs."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Log:
    """What the data plane asks of a logger, on stderr."""

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: print(level, event, fields, file=sys.stderr)


def missing(*names: str) -> list[str]:
    """Return those of the named packages that cannot be imported."""
    absent = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            absent.append(name)
    return absent


ABSENT = missing("anyio", "pydantic", "msgspec", "structlog")
"""What the pipeline's figures need and this machine lacks."""

if "structlog" in ABSENT:
    stub = types.ModuleType("structlog")
    stub.get_logger = lambda *_: _Log()  # type: ignore[attr-defined]
    sys.modules["structlog"] = stub
