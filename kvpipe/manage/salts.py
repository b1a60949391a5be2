"""Digests that stand for salts where a salt must not be shown. This module needs none of the optional packages."""

from __future__ import annotations

import hashlib
import hmac

from kvpipe.cache.tenants import kept_salt


def salt_digest(token: bytes, salt: str) -> str:
    """Return the digest of a salt in 16 hex digits, keyed with the operators' token, or "" for an empty salt."""
    if not salt:
        return ""
    message = b"kvpipe cache_salt\0" + kept_salt(salt).encode("utf-8", "surrogatepass")
    return hmac.new(token, message, hashlib.sha256).hexdigest()[:16]
