"""Whose a chunk is: of which `cache_salt`, computed with which LoRA adapter."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request


SALT_KEPT_CHARS_MAX: Final = 256
"""The most characters of a salt that chunks and what is learned refer to. Servers take no longer ones than 128."""


_HASHED: Final = re.compile("sha256:[0-9a-f]{64}")


class HashedSalt(str):
    """A salt that is kept as its hash. No salt of a request is kept as the same text."""

    __slots__ = ()


def kept_salt(salt: str) -> str:
    """Return a salt as it is kept beyond its request: as it is, or as a `HashedSalt` if it is long. Idempotent.

    A salt that looks like a hash is hashed, too: else its tenant would be that of the salt with this hash.
    """
    if isinstance(salt, HashedSalt) or (len(salt) <= SALT_KEPT_CHARS_MAX and not _HASHED.fullmatch(salt)):
        return salt
    return HashedSalt(f"sha256:{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}")


class AdapterIdentity(NamedTuple):
    """A LoRA adapter as it is part of keys. `digest`: of the files' bytes that the ranks hold; b"" if not known."""

    name: str
    path: str
    digest: bytes


class Tenant:
    """One pair of salt and adapter. A chunk has one tenant, from its reservation on.

    `salt`: the `cache_salt` of the requests (`kept_salt`), "" for those without one. `adapter`: theirs, or None.

    Both are part of every key under which a chunk is found: vLLM hashes the salt into the first block, from which all
    others chain, and the adapter's name and path into each block; kvpipe appends the digest. So equal keys always are
    of one tenant.

    There is one object per pair and catalog as long as it is referred to: compare with `is`.
    """

    __slots__ = ("__weakref__", "adapter", "salt")

    def __init__(self, salt: str = "", adapter: AdapterIdentity | None = None) -> None:
        """See the class. `Tenants` makes them."""
        self.salt, self.adapter = salt, adapter


ANYBODY: Final = Tenant()
"""The tenant of requests with neither salt nor adapter, the same in every catalog."""


class Tenants:
    """The tenants of one catalog, each kept only as long as a chunk or a request refers to it."""

    def __init__(self) -> None:
        """Start with `ANYBODY` only."""
        self._known: WeakValueDictionary[tuple[str, AdapterIdentity | None], Tenant] = WeakValueDictionary()

    def of(self, request: Request, digest: bytes = b"") -> Tenant:
        """Return the tenant of `request`. `digest`: of its adapter's bytes, as in its keys."""
        salt: str = getattr(request, "cache_salt", None) or ""  # engines made before it was asked for lack it
        lora, adapter = request.lora_request, None
        if lora is not None:
            adapter = AdapterIdentity(getattr(lora, "lora_name", ""), lora.lora_path, digest)
        return self.named(salt, adapter)

    def named(self, salt: str, adapter: AdapterIdentity | None) -> Tenant:
        """Return the tenant with this salt and this adapter."""
        if not salt and adapter is None:
            return ANYBODY
        key = kept_salt(salt), adapter
        tenant = self._known.get(key)
        if tenant is None:
            tenant = self._known[key] = Tenant(*key)
        return tenant

    def __len__(self) -> int:
        """Return how many there are, without `ANYBODY`."""
        return len(self._known)
