"""Parts that a connector's two roles share. vLLM makes one connector for its scheduler, and one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config.settings import Settings
    from kvpipe.node.attach import Attached
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.tiers.guard import MadeTier
    from kvpipe.transfer.base import TransferEngine
    from kvpipe.worker.caches import Hooks


class Door(Protocol):
    """The methods of a connector that its role calls. Tests replace these methods."""

    def make_engine(self) -> TransferEngine | None:
        """Return a transfer engine, or None to let the worker side choose one that fits the device."""

    def make_tiers(self, *, writes: bool) -> Sequence[MadeTier]:
        """Return the configured tiers, which are not opened yet."""

    def hooks(self, kv_caches: dict[str, torch.Tensor]) -> Hooks[str]:
        """Return which hooks vLLM's runner calls, and at which point of a step."""

    def unregister_kv_caches(self) -> None:
        """End every copy, because vLLM is about to release the memory of the caches."""

    def restore_kv_caches(self) -> None:
        """Use the caches again, because vLLM has restored their memory."""


class RoleFacts(NamedTuple):
    """The checked configuration of an engine.

    `engine` is the engine's name in traces. `node` is the memory of the engine's node.
    """

    config: VllmConfig
    transfer: KVTransferConfig
    cache: KVCacheConfig
    settings: Settings
    geometry: Geometry
    engine: str
    node: Attached | None = None


class WrongRoleError(RuntimeError):
    """A method was called that belongs to the connector's other role."""


class OtherRole:
    """Takes the place of the role that a connector does not have. Every use raises `WrongRoleError`."""

    def __init__(self, has: str, lacks: str) -> None:
        """Keep the connector's role `has`, and the role `lacks` for which this object stands in."""
        self.__dict__["_why"] = f"the connector with the role {has} was called; this belongs to the role {lacks}"

    def __getattr__(self, name: str) -> object:
        """Raise `WrongRoleError`."""
        raise WrongRoleError(f"{name}: {self.__dict__['_why']}")
