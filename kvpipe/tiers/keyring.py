"""The encryption keys of a tier. Each key derives unguessable names, and a separate encryption key for every value.

HKDF-SHA256 derives a mark, a key for names and a key for values from each secret. The mark is stored in each value that
is encrypted with the secret. Each value has its own AES-256-GCM key, derived from the key for values and from 32 random
bytes that are stored with the value. So each AES-256-GCM key encrypts only one value, and GCM's limits do not bound the
number of values.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.errors import ConfigError
from kvpipe.tiers.base import Key
from kvpipe.tiers.spec import TierSpec, secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

SECRET_BYTES: Final = 32
MARK_BYTES, SALT_BYTES = 16, 32
KEYS_MAX: Final = 8
"""The largest number of keys of a tier. Each key makes a lookup ask for one more name per value."""
_NONCE = bytes(12)  # a constant nonce is safe, because each key encrypts one value only


class EncryptionKey(NamedTuple):
    """The mark and the keys that are derived from one secret. The mark does not reveal the secret.

    `mark` has MARK_BYTES bytes, which are equal in all values of the secret. `name(key)` returns the name of a key's
    value in the tier. `sealing(salt)` and `opening(salt, tag)` return the cipher that encrypts or decrypts one value.
    """

    mark: bytes
    name: Callable[[Key], Key]
    sealing: Callable[[bytes], AEADEncryptionContext]
    opening: Callable[[bytes, bytes], AEADDecryptionContext]


def encryption_key(secret: bytes) -> EncryptionKey:
    """Derive an encryption key from `secret`. Raises `ConfigError` if the package cryptography is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415  (an extra)
        from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415
    except ImportError:
        msg = "kvpipe: encryption needs the package cryptography; pip install 'kvpipe[encryption]'"
        raise ConfigError(msg) from None

    def derive(what: bytes, size: int) -> bytes:
        return HKDF(SHA256(), size, None, b"kvpipe tier 2 " + what).derive(secret)

    names, values = derive(b"names", SECRET_BYTES), derive(b"values", SECRET_BYTES)

    def keyed(text: str, size: int) -> bytes:
        return hashlib.blake2b(text.encode(), key=names, digest_size=size).digest()

    def name(key: Key) -> Key:
        """Return the name. The hash covers group and rank, so that names do not show which parts form one chunk."""
        return Key(keyed(key.namespace, 16).hex(), keyed(key.text, 32), 0, 0, 1)

    def aes(salt: bytes) -> algorithms.AES:
        return algorithms.AES(HKDF(SHA256(), SECRET_BYTES, salt, b"kvpipe tier 2 value").derive(values))

    return EncryptionKey(
        derive(b"mark", MARK_BYTES),
        name,
        lambda salt: Cipher(aes(salt), modes.GCM(_NONCE)).encryptor(),
        lambda salt, tag: Cipher(aes(salt), modes.GCM(_NONCE, tag)).decryptor(),
    )


def secrets_of(spec: TierSpec) -> tuple[bytes, ...]:
    """Return the secrets of a tier. The first secret encrypts values, and each secret decrypts values.

    If there are no secrets, values are not encrypted.

    Raises:
        ConfigError: the variable or file with the keys cannot be read, or other users may read the file. ConfigError is
            also raised if the text does not have 1 to KEYS_MAX keys of SECRET_BYTES bytes in base64.

    """
    key = "encryption_key_env" if spec.encryption_key_env else "encryption_key_file"
    where = f"kvpipe: {spec.kind} tier: "
    try:
        _check_mode(spec)
        found = secret(spec.encryption_key_env, spec.encryption_key_file, key)
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from None
    if found is None:
        return ()
    # safe to show: a variable or file of this name exists, so the name is not the secret itself
    named = f"{key}={str(getattr(spec, key))!r}"
    secrets = [_decoded(text) for text in found.get_secret_value().split()]
    remedy = f"make one with `openssl rand -base64 {SECRET_BYTES}`"
    if len(secrets) > KEYS_MAX:
        raise ConfigError(f"{where}{named} holds {len(secrets)} keys; {KEYS_MAX} are allowed: remove old keys")
    for at, one in enumerate(secrets, 1):
        which = f"{named}: key {at}" if len(secrets) > 1 else named
        if len(one) != SECRET_BYTES:
            raise ConfigError(f"{where}{which} does not hold {SECRET_BYTES} bytes in base64; {remedy}")
        if one in secrets[: at - 1]:
            raise ConfigError(f"{where}{which} equals an earlier key; remove it, or {remedy}")
    return tuple(secrets)


def _check_mode(spec: TierSpec) -> None:
    """Raise ValueError if other users may read the key file. For a symbolic link, the mode of its target is checked."""
    file = spec.encryption_key_file
    try:
        mode = 0 if file is None else file.stat().st_mode
    except (OSError, ValueError):
        return  # `secret` reports the error
    if mode & 0o077:
        msg = f"encryption_key_file: other users may read the file (mode {mode & 0o777:04o}); run chmod 0600 on it"
        raise ValueError(msg)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def ring(secrets: Sequence[bytes]) -> dict[bytes, EncryptionKey]:
    """Return the encryption keys of `secrets` by mark, in the order of `secrets`. Raises as `encryption_key` does."""
    return {one.mark: one for one in map(encryption_key, secrets)}
