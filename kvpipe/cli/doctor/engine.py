"""Imports the parts of the connector that commands need.

Modules that need vLLM are imported only when a command uses them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final, Literal

CONNECTOR: Final = "kvpipe.connectors.vllm"
ConnectorModule = Literal["asked_engine", "doctor_facts", "tiny.demo", "trial.conformance"]


def connector_part(part: ConnectorModule) -> ModuleType:
    """Import a module of the connector.

    `asked_engine` and `doctor_facts` can be imported without vLLM. The other modules raise `ImportError` if vLLM is not
    installed.
    """
    return importlib.import_module(f"{CONNECTOR}.{part}")
