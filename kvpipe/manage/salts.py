"""What salts are called where they are not to be shown. Needs no extra."""

from __future__ import annotations

import hashlib
import hmac


def salt_digest(token: bytes, salt: str) -> str:
    """Return what a salt is called where it is not to be shown: only who has the token can compute it."""
    if not salt:
        return ""
    said = b"kvpipe cache_salt\0" + salt.encode("utf-8", "surrogatepass")
    return hmac.new(token, said, hashlib.sha256).hexdigest()[:16]
