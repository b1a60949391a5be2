"""Whose a chunk is: of which `cache_salt`, computed with which LoRA adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request


class AdapterIdentity(NamedTuple):
    """A LoRA adapter as its KV's keys know it. `digest`: of the bytes that the ranks hold; b"" if nobody knows them."""

    name: str
    path: str
    digest: bytes


class Tenant:
    """One pair of salt and adapter: `Chunk.tenant` is whose a chunk is, from its reservation on, and never changes.

    `salt`: the `cache_salt` of the requests, "" for those without one. `adapter`: theirs, None for those without one.

    Both are part of every key under which a chunk is found: the salt is in the hash of the first block, from which all
    others chain, name and path in each, and the digest behind it. So equal keys are of one tenant, whoever writes.

    There is one object per pair and catalog while a chunk or a request holds it: compare by `is`, and keep none.
    """

    __slots__ = ("__weakref__", "adapter", "salt")

    def __init__(self, salt: str = "", adapter: AdapterIdentity | None = None) -> None:
        """See the class. `Tenants` makes them."""
        self.salt, self.adapter = salt, adapter


ANYBODY: Final = Tenant()
"""The tenant of requests with neither salt nor adapter, the same in every catalog."""


class Tenants:
    """Those of one catalog. Knows no more of them than there are chunks and requests."""

    def __init__(self) -> None:
        """Nobody is known but `ANYBODY`."""
        self._known: WeakValueDictionary[tuple[str, AdapterIdentity | None], Tenant] = WeakValueDictionary()

    def of(self, request: Request, digest: bytes = b"") -> Tenant:
        """Return whose the KV of `request` is. `digest`: of its adapter's bytes, as its keys have it."""
        salt: str = getattr(request, "cache_salt", None) or ""  # engines made before it was asked for lack it
        lora, adapter = request.lora_request, None
        if lora is not None:
            adapter = AdapterIdentity(getattr(lora, "lora_name", ""), lora.lora_path, digest)
        return self.named(salt, adapter)

    def named(self, salt: str, adapter: AdapterIdentity | None) -> Tenant:
        """Return who has this salt and this adapter."""
        if not salt and adapter is None:
            return ANYBODY
        key = salt, adapter
        tenant = self._known.get(key)
        if tenant is None:
            tenant = self._known[key] = Tenant(*key)
        return tenant

    def __len__(self) -> int:
        """How many are known beside `ANYBODY`."""
        return len(self._known)
