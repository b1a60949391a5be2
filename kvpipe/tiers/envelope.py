"""The format of a value in a tier: a header (key, lengths, checksums) and the body.

Everything that a tier returns is checked here. A value that differs from what was stored under its key is damaged, and
a damaged value is a miss. The header is HEADER_BYTES long, so that the body stays aligned behind it:

    fields    magic, version, cipher, units, length of the body, mark of the encryption key, salt, the whole name
    zeros
    check     of the body as it is stored: xxh3-128, or the tag of AES-256-GCM, which covers all before it too
    checksum  of all before it: xxh3-64

With an encryption key, a value's name is not its key but a keyed hash of it: see `keyring.py`.
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
"""Version of the format. Namespaces depend on it."""
_MAGIC = b"kvpipe\r\n"
_FIELDS = struct.Struct(f"<8sHBBIQ{MARK_BYTES}s{SALT_BYTES}s192s")  # see the module; before units the name's length
_CHECK_AT, _SUM_AT = HEADER_BYTES - 24, HEADER_BYTES - 8


class DamagedError(TransferError):
    """A value differs from what was stored under its key. The message is the reason, in one or two words."""


class UnjudgedError(DamagedError):
    """This reader cannot tell whether a value is whole: its version, key, format or namespace is another.

    To an engine that asked for the value this is damage like any other. A command that looks for damage keeps it.
    """


class Cipher(IntEnum):
    """The encryption of a body."""

    PLAIN = 0
    AES_256_GCM = 1


_CIPHERS = frozenset(Cipher)


class Header(NamedTuple):
    """A value's header. `check`: 16 bytes, see the module; `mark` and `salt`: zeros where the cipher is PLAIN."""

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
        UnjudgedError: it is of another version or of a format that is not known here.
        DamagedError: it is no header.

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
    """Return the format version of a value with this header, which has HEADER_BYTES in all versions; 0: no header."""
    magic, version, *_ = _FIELDS.unpack_from(header)
    whole = magic == _MAGIC and xxhash.xxh3_64_digest(header[:_SUM_AT]) == header[_SUM_AT:]
    return version if whole else 0


class Sealer:
    """Makes and checks values, encrypted if it has secrets. On any thread; sealing and unsealing release the GIL."""

    def __init__(self, secrets: Sequence[bytes] = ()) -> None:
        """The first of `secrets` encrypts, all decrypt. Raises `ConfigError` if the extra is not installed."""
        self._ring = ring(secrets)
        self._first = next(iter(self._ring.values()), None)

    @property
    def ways(self) -> int:
        """The number of names of a key: one per secret, at least 1."""
        return max(1, len(self._ring))

    def names(self, key: Key) -> tuple[Key, ...]:
        """Return the names that `key` may have in the tier, one per encryption key. It is stored under the first."""
        return tuple(one.name(key) for one in self._ring.values()) or (key,)

    def seal(self, name: Key, units: int, body: memoryview) -> tuple[memoryview, memoryview]:
        """Return (header, body) of a value, both aligned (`ALIGN_BYTES`). `name`: of `names`. `units`: of the chunk.

        `body`: its length is a multiple of ALIGN_BYTES. Returned as it is, or encrypted into a new buffer.
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
        """Check that a value is what was stored under `name` with `units` units, and decrypt `body` in place.

        Raises:
            UnjudgedError: it is of another version, format or namespace, or was stored with another secret; or with
                one, and this sealer has none, or the other way round.
            DamagedError: it is not what was stored. The content of `body` is undefined then.

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
    """Decrypt `body` in place. Raises `UnjudgedError` without a key, `DamagedError` if the tag does not fit."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (an extra, which is there where a key is)

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
    with contextlib.suppress(OSError):  # kernels without huge pages refuse: fine
        made.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults, which cost as much as the encryption
    return memoryview(made)
