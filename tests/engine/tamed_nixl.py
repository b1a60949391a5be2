"""vLLM's NixlConnector for machines with few cores.

An engine uses this version if `kv_connector_module_path` names this module.

NIXL's progress thread never sleeps and inherits the affinity of the worker's thread, so the thread takes half of the
core on which the worker computes. vLLM passes no delay to NIXL. This module sets a delay, and changes nothing else.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.distributed.nixl_utils import NixlWrapper

__all__ = ["NixlConnector"]

DELAY_US: Final = 100

_bindings: Any = sys.modules[NixlWrapper.__module__].nixlBind
_Config: Any = _bindings.nixlAgentConfig


class TamedConfig(_Config):  # type: ignore[misc]
    """An agent's configuration with a progress thread that sleeps."""

    @property
    def pthrDelay(self) -> int:  # noqa: N802  (NIXL's name)
        """The delay between two rounds of the progress thread, in microseconds."""
        return DELAY_US

    @pthrDelay.setter
    def pthrDelay(self, _: int) -> None:  # noqa: N802
        _Config.pthrDelay.fset(self, DELAY_US)


_bindings.nixlAgentConfig = TamedConfig
