"""What a value in a tier is: a header that says whose bytes follow and what they come to, and the body.

Whatever a tier returns is checked here: bytes that are not those which were stored under this very key are damaged, and
damaged is a miss. The header is HEADER_BYTES long, so that the body stays aligned behind it:

    fields    magic, version, cipher, units, length of the body, nonce, the whole key
    zeros
    check     of the body as it is stored: xxh3-128, or the tag of AES-256-GCM, which covers all before it too
    checksum  of all before it: xxh3-64
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from kvpipe.errors import ConfigError, TransferError
from kvpipe.tiers.base import ALIGN_BYTES, Key
from kvpipe.tiers.spec import TierSpec, secret

HEADER_BYTES: Final = 4096
SECRET_BYTES: Final = 32
_MAGIC, _VERSION = b"kvpipe\r\n", 1
_FIELDS = struct.Struct("<8sHBBIQ12s192s")  # magic, version, cipher, length of key, units, bytes, nonce, key
_CHECK_AT, _SUM_AT = HEADER_BYTES - 24, HEADER_BYTES - 8
_NONCE_BYTES = 12


class DamagedError(TransferError):
    """A value is not what was stored under its key. The message is the reason, in one or two words."""


class Cipher(IntEnum):
    """How a body is stored."""

    PLAIN = 0
    AES_256_GCM = 1


_CIPHERS = frozenset(Cipher)


class Header(NamedTuple):
    """What a header says. `check`: 16 bytes, see the module; `nonce`: 12 bytes, zeros where the cipher is PLAIN."""

    key: Key
    units: int
    body_bytes: int
    cipher: Cipher
    nonce: bytes
    check: bytes


def describe(header: bytes | memoryview) -> Header:
    """Read any bytes as a header. Raises `DamagedError`, and nothing else, where they are none."""
    if len(header) != HEADER_BYTES:
        raise DamagedError("length")
    magic, version, cipher, key_length, units, body_bytes, nonce, text = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise DamagedError("magic")
    if version != _VERSION:
        raise DamagedError("version")
    if xxhash.xxh3_64_digest(header[:_SUM_AT]) != header[_SUM_AT:]:
        raise DamagedError("header checksum")
    try:
        key = Key.parse(text[:key_length].decode("ascii"))
    except ValueError:
        raise DamagedError("key") from None
    if cipher not in _CIPHERS:
        raise DamagedError("cipher")
    if body_bytes % ALIGN_BYTES:
        raise DamagedError("length")
    return Header(key, units, body_bytes, Cipher(cipher), nonce, bytes(header[_CHECK_AT:_SUM_AT]))


class Sealer:
    """Makes values and checks them, encrypted if it has a secret. Any thread may use it; both ways release the GIL."""

    def __init__(self, secret: bytes | None) -> None:
        """`secret`: what the keys of namespaces are derived from. Raises `ConfigError` where the extra is not there."""
        self._gcm = None if secret is None else _Gcm(secret)

    def seal(self, key: Key, units: int, body: memoryview) -> tuple[memoryview, memoryview]:
        """Return the two parts of a value: its header and its body, both aligned.

        `body`: a multiple of ALIGN_BYTES long; returned as it is, or encrypted into a new buffer of the same length.
        """
        text, gcm = key.text.encode(), self._gcm
        nonce = b"" if gcm is None else os.urandom(_NONCE_BYTES)
        room = pages(HEADER_BYTES if gcm is None else HEADER_BYTES + body.nbytes)
        header = room[:HEADER_BYTES]
        cipher = Cipher.PLAIN if gcm is None else Cipher.AES_256_GCM
        _FIELDS.pack_into(header, 0, _MAGIC, _VERSION, cipher, len(text), units, body.nbytes, nonce, text)
        if gcm is None:
            header[_CHECK_AT:_SUM_AT] = xxhash.xxh3_128_digest(body)
        else:
            plain, body = body, room[HEADER_BYTES:]
            header[_CHECK_AT:_SUM_AT] = gcm.encrypt(key.namespace, nonce, header[:_CHECK_AT], plain, body)
        header[_SUM_AT:] = xxhash.xxh3_64_digest(header[:_SUM_AT])
        return header, body

    def unseal(self, key: Key, units: int, header: memoryview, body: memoryview) -> None:
        """Check that a value is what was stored under `key`, and decrypt `body` in place.

        Raises:
            DamagedError: it is not, or it was stored with another secret, or with one where this has none. What `body`
                holds then is undefined.

        """
        found = describe(header)
        if found.key != key:
            raise DamagedError("key")
        if found.units != units:
            raise DamagedError("units")
        if found.body_bytes != body.nbytes:
            raise DamagedError("length")
        if (found.cipher is Cipher.PLAIN) != (self._gcm is None):
            raise DamagedError("cipher")
        if self._gcm is not None:
            self._gcm.decrypt(key.namespace, found, header[:_CHECK_AT], body)
        elif xxhash.xxh3_128_digest(body) != found.check:
            raise DamagedError("checksum")


class _Gcm:
    """AES-256-GCM with a key per namespace. Nonces are random: one namespace is good for 2**32 values."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an extra)
            from cryptography.hazmat.primitives import ciphers  # noqa: PLC0415
            from cryptography.hazmat.primitives.ciphers import algorithms, modes  # noqa: PLC0415
            from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415
        except ImportError:
            msg = "kvpipe: encryption needs the package cryptography; pip install 'kvpipe[encryption]'"
            raise ConfigError(msg) from None

        def aes(namespace: str, nonce: bytes, tag: bytes | None = None) -> ciphers.Cipher[modes.GCM]:
            """Return the cipher of one value."""
            key = HKDF(SHA256(), SECRET_BYTES, None, b"kvpipe tier " + namespace.encode()).derive(secret)
            return ciphers.Cipher(algorithms.AES(key), modes.GCM(nonce, tag))

        self._aes, self._invalid = aes, InvalidTag

    def encrypt(self, namespace: str, nonce: bytes, known: memoryview, plain: memoryview, into: memoryview) -> bytes:
        """Write `plain` to `into`; return the tag, which covers `known` too."""
        work = self._aes(namespace, nonce).encryptor()
        work.authenticate_additional_data(known)
        work.update_into(plain, into)
        work.finalize()
        return work.tag

    def decrypt(self, namespace: str, found: Header, known: memoryview, body: memoryview) -> None:
        """Decrypt `body` in place. Raises `DamagedError` where the tag is not that of `known` and `body`."""
        work = self._aes(namespace, found.nonce, found.check).decryptor()
        work.authenticate_additional_data(known)
        work.update_into(body, body)
        try:
            work.finalize()
        except self._invalid:
            raise DamagedError("decryption") from None


def secret_of(spec: TierSpec) -> bytes | None:
    """Return the secret that a tier's values are encrypted with, None if they are not.

    Raises:
        ConfigError: what `encryption_key_env` or `encryption_key_file` names cannot be read, or does not hold
            SECRET_BYTES in base64.

    """
    name = "encryption_key_env" if spec.encryption_key_env else "encryption_key_file"
    try:
        found = secret(spec.encryption_key_env, spec.encryption_key_file, name)
    except ValueError as error:
        raise ConfigError(f"kvpipe: {spec.kind} tier: {error}") from None
    if found is None:
        return None
    try:
        decoded = base64.b64decode(found.get_secret_value(), validate=True)
    except ValueError:
        decoded = b""
    if len(decoded) != SECRET_BYTES:
        msg = (
            f"kvpipe: {spec.kind} tier: {name}={str(getattr(spec, name))!r} does not hold {SECRET_BYTES} bytes in "
            f"base64; make some with `openssl rand -base64 {SECRET_BYTES}`"
        )
        raise ConfigError(msg)
    return decoded


def pages(size: int) -> memoryview:
    """Return `size` bytes of zeros, aligned."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # kernels without huge pages refuse: fine
        made.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, which cost as much as the encryption
    return memoryview(made)
