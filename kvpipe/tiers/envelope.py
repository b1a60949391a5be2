"""The format of a value in a tier: a header (key, lengths, checksums) and the body.

This module checks every value that a tier returns. A value is damaged if it differs from the value that was stored
under its key. A damaged value is a miss. The header has HEADER_BYTES bytes, so that the body after it is aligned:

    fields    magic, version, cipher, units, length of the body, mark of the encryption key, salt, the whole name
    zeros
    check     xxh3-128 of the stored body, or the tag of AES-256-GCM, which also covers the fields and zeros
    checksum  xxh3-64 of all earlier bytes of the header

With an encryption key, a value's name is not its key, but a keyed hash of the key (`keyring.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import xxhash

from kvpipe.errors import TransferError
from kvpipe.tiers.base import ALIGN_BYTES, Key
from kvpipe.tiers.keyring import MARK_BYTES, SALT_BYTES, EncryptionKey, ring

HEADER_BYTES: Final = 4096
VERSION: Final = 2
"""The version of the format. A namespace is a hash that includes this version."""
_MAGIC = b"kvpipe\r\n"
# The module's docstring lists the fields. The `B` before `I` is the length of the name.
_FIELDS = struct.Struct(f"<8sHBBIQ{MARK_BYTES}s{SALT_BYTES}s192s")
_CHECK_AT, _SUM_AT = HEADER_BYTES - 24, HEADER_BYTES - 8


class DamagedError(TransferError):
    """This error means that a value differs from the stored value. The message is the reason, in one or two words."""


class UnjudgedError(DamagedError):
    """This error means that the reader cannot check a value: its version, key, format or namespace differs.

    An engine treats such a value as damaged. A command that searches for damaged values does not delete such a value.
    """


class Cipher(IntEnum):
    """The encryption of a body."""

    PLAIN = 0
    AES_256_GCM = 1


_CIPHERS = frozenset(Cipher)


class Header(NamedTuple):
    """A value's header.

    `check` has 16 bytes, which the module's docstring describes. `mark` and `salt` are zeros if the cipher is PLAIN.
    """

    key: Key
    units: int
    body_bytes: int
    cipher: Cipher
    mark: bytes
    salt: bytes
    check: bytes


def describe(header: bytes | memoryview) -> Header:
    """Parse a header of HEADER_BYTES bytes.

    Raises:
        UnjudgedError: the header has another version or an unknown format.
        DamagedError: the bytes are not a header.

    """
    if len(header) != HEADER_BYTES:
        raise DamagedError("length")
    magic, version, cipher, key_length, units, body_bytes, mark, salt, text = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise UnjudgedError("unknown format") if any(magic) else DamagedError("zeros")
    if version != VERSION:
        raise UnjudgedError("newer version" if version > VERSION else "older version")
    if xxhash.xxh3_64_digest(header[:_SUM_AT]) != header[_SUM_AT:]:
        raise DamagedError("header checksum")
    try:
        key = Key.parse(text[:key_length].decode("ascii"))
    except ValueError:
        raise DamagedError("key") from None
    if cipher not in _CIPHERS:
        raise UnjudgedError("unknown format")
    if body_bytes % ALIGN_BYTES:
        raise DamagedError("length")
    return Header(key, units, body_bytes, Cipher(cipher), mark, salt, bytes(header[_CHECK_AT:_SUM_AT]))


def version_of(header: bytes | memoryview) -> int:
    """Return the format version in `header`, or 0 if the bytes are not a header.

    A header has HEADER_BYTES bytes in all versions.
    """
    magic, version, *_ = _FIELDS.unpack_from(header)
    whole = magic == _MAGIC and xxhash.xxh3_64_digest(header[:_SUM_AT]) == header[_SUM_AT:]
    return version if whole else 0


class Sealer:
    """Makes and checks values. If the sealer has secrets, values are encrypted. Any thread may call a sealer.

    `seal` and `unseal` release the GIL.
    """

    def __init__(self, secrets: Sequence[bytes] = ()) -> None:
        """Make a sealer that encrypts with the first of `secrets` and decrypts with any of `secrets`.

        Raises `ConfigError` if the package for encryption is not installed.
        """
        self._ring = ring(secrets)
        self._first = next(iter(self._ring.values()), None)

    @property
    def ways(self) -> int:
        """The number of names of a key: one per secret, or 1 without secrets."""
        return max(1, len(self._ring))

    def names(self, key: Key) -> tuple[Key, ...]:
        """Return the names that `key` may have in the tier, one per encryption key. New values get the first name."""
        return tuple(one.name(key) for one in self._ring.values()) or (key,)

    def seal(self, name: Key, units: int, body: memoryview) -> tuple[memoryview, memoryview]:
        """Return the aligned (`ALIGN_BYTES`) buffers (header, body) of a value.

        `name` is the first of the key's `names`. `units` is the number of units of the chunk. The length of `body` is a
        multiple of ALIGN_BYTES. Without secrets, the returned body is `body` itself. With secrets, the returned body is
        a new buffer with the encrypted bytes.
        """
        text, key = name.text.encode(), self._first
        room = pages(HEADER_BYTES if key is None else HEADER_BYTES + body.nbytes)
        header = room[:HEADER_BYTES]
        cipher, mark = (Cipher.PLAIN, b"") if key is None else (Cipher.AES_256_GCM, key.mark)
        salt = b"" if key is None else os.urandom(SALT_BYTES)
        _FIELDS.pack_into(header, 0, _MAGIC, VERSION, cipher, len(text), units, body.nbytes, mark, salt, text)
        if key is None:
            header[_CHECK_AT:_SUM_AT] = xxhash.xxh3_128_digest(body)
        else:
            plain, body = body, room[HEADER_BYTES:]
            work = key.sealing(salt)
            work.authenticate_additional_data(header[:_CHECK_AT])
            work.update_into(plain, body)
            work.finalize()
            header[_CHECK_AT:_SUM_AT] = work.tag
        header[_SUM_AT:] = xxhash.xxh3_64_digest(header[:_SUM_AT])
        return header, body

    def unseal(self, name: Key, units: int, header: memoryview, body: memoryview) -> None:
        """Check that a value equals the value stored under `name` with `units` units, and decrypt `body` in place.

        Raises:
            UnjudgedError: the value has another version, format or namespace, or was encrypted with another secret.
                UnjudgedError is also raised if only the value or only this sealer uses encryption.
            DamagedError: the value differs from the stored value. In this case the content of `body` is undefined.

        """
        found = describe(header)
        if found.key.namespace != name.namespace:
            raise UnjudgedError("another namespace")
        if found.key != name:
            raise DamagedError("key")
        if found.units != units:
            raise DamagedError("units")
        if found.body_bytes != body.nbytes:
            raise DamagedError("length")
        if (found.cipher is Cipher.PLAIN) != (not self._ring):
            raise UnjudgedError("not encrypted" if self._ring else "encrypted")
        if self._ring:
            _decrypt(self._ring.get(found.mark), found, header[:_CHECK_AT], body)
        elif xxhash.xxh3_128_digest(body) != found.check:
            raise DamagedError("checksum")


def _decrypt(key: EncryptionKey | None, found: Header, known: memoryview, body: memoryview) -> None:
    """Decrypt `body` in place. Raises `UnjudgedError` if `key` is None, `DamagedError` if the tag does not match."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an optional package; a key exists only if it is installed)

    if key is None:
        raise UnjudgedError("another encryption key")
    work = key.opening(found.salt, found.check)
    work.authenticate_additional_data(known)
    work.update_into(body, body)
    try:
        work.finalize()
    except InvalidTag:
        raise DamagedError("decryption") from None


def pages(size: int) -> memoryview:
    """Return a new buffer of `size` zero bytes, aligned to pages."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
        # Page faults of small pages would take as much time as the encryption. Huge pages cause fewer faults.
        made.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(made)
