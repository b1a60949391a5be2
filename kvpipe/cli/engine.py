"""The connector that the commands work with. Modules that need vLLM are imported here, and only when they are used."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final, Literal

CONNECTOR: Final = "kvpipe.connectors.vllm"
Part = Literal["doctor_facts", "demo", "trial.conformance"]


def connector_part(part: Part) -> ModuleType:
    """Import a module of the connector.

    `doctor_facts` can be imported without vLLM; for the others `ImportError` is raised if it is not installed.
    """
    return importlib.import_module(f"{CONNECTOR}.{part}")
