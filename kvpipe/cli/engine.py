"""The engine whose connector the commands work with. What needs vLLM is imported here, and only when it is wanted."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final, Literal

CONNECTOR: Final = "kvpipe.connectors.vllm"
Part = Literal["doctor_facts", "demo", "trial.conformance"]


def connector_part(part: Part) -> ModuleType:
    """Import a module of the connector.

    `doctor_facts` can be imported without the engine. Raises `ImportError` for the others where it is not installed.
    """
    return importlib.import_module(f"{CONNECTOR}.{part}")
