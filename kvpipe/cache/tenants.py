"""The owner of a chunk: its `cache_salt`, and the LoRA adapter that it was computed with."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Request


SALT_KEPT_CHARS_MAX: Final = 256
"""A salt with more characters than this is kept as its hash. Servers accept salts of at most 128 characters."""


_HASHED: Final = re.compile("sha256:[0-9a-f]{64}")


class HashedSalt(str):
    """A salt that is kept as its hash. Such a salt never equals a salt that is kept unchanged."""

    __slots__ = ()


def kept_salt(salt: str) -> str:
    """Return a salt in the form that is kept beyond its request: unchanged, or a `HashedSalt` if the salt is long.

    A `HashedSalt` is returned unchanged. A short salt that looks like a hash is hashed too, so that it never shares a
    tenant with the salt that has this hash.
    """
    if isinstance(salt, HashedSalt) or (len(salt) <= SALT_KEPT_CHARS_MAX and not _HASHED.fullmatch(salt)):
        return salt
    return HashedSalt(f"sha256:{hashlib.sha256(salt.encode('utf-8', 'surrogatepass')).hexdigest()}")


class AdapterIdentity(NamedTuple):
    """A LoRA adapter as a part of keys.

    `digest` is the digest of the files' bytes that the ranks hold, or b"" if it is unknown.
    """

    name: str
    path: str
    digest: bytes


class Tenant:
    """A pair of salt and adapter. A chunk has one tenant, which never changes.

    `salt` is the `cache_salt` of the requests (`kept_salt`), or "" for requests without a salt. `adapter` is the
    requests' adapter, or None.

    Salt and adapter are part of every key under which a chunk is found. vLLM's hash of each block includes the hash of
    the block before, and the adapter's name and path. The hash of the first block includes the salt. kvpipe appends the
    adapter's digest. Therefore equal keys always belong to one tenant. While a tenant is referenced, its catalog
    creates no second object for the same pair. Therefore tenants are compared with `is`.
    """

    __slots__ = ("__weakref__", "adapter", "salt")

    def __init__(self, salt: str = "", adapter: AdapterIdentity | None = None) -> None:
        """Keep `salt` and `adapter`. Only `Tenants` creates tenants, except `ANYBODY` and `UNKNOWN`."""
        self.salt, self.adapter = salt, adapter


ANYBODY: Final = Tenant()
"""The tenant of requests with neither salt nor adapter, the same in every catalog."""

UNKNOWN: Final = Tenant()
"""The tenant of chunks of a node's memory that another engine has saved. Their records have no salt and no adapter."""


class Tenants:
    """The tenants of one catalog. A tenant is kept only as long as a chunk or a request refers to it."""

    def __init__(self) -> None:
        """Start with `ANYBODY` only."""
        self._known: WeakValueDictionary[tuple[str, AdapterIdentity | None], Tenant] = WeakValueDictionary()

    def of(self, request: Request, digest: bytes = b"") -> Tenant:
        """Return the tenant of `request`. `digest` is the digest of the request's adapter, as in the request's keys."""
        salt: str = getattr(request, "cache_salt", None) or ""  # requests of older engines may lack the attribute
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
        """Return the number of tenants, without `ANYBODY`."""
        return len(self._known)
