"""A value in a tier is an envelope. A value of any other form is reported."""

from __future__ import annotations

import base64
import hashlib
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvpipe.errors import ConfigError, TransferError
from kvpipe.testing.buffers import aligned, content, filled, some_key
from kvpipe.testing.held_tier import DictSpec
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import ALIGN_BYTES, Key
from kvpipe.tiers.envelope import HEADER_BYTES, VERSION, Cipher, DamagedError, Sealer, describe, version_of
from kvpipe.tiers.keyring import KEYS_MAX, secrets_of
from kvpipe.tiers.spec import TierSpec

SECRET, OTHER = bytes(range(32)), bytes(32)
SECRETS = pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
BODY = 3 * ALIGN_BYTES
LONGEST = Key("f" * 32, bytes(range(64)), 9999, 999_998, 999_999)


def sealer_of(secret: bytes | None) -> Sealer:
    """Return a sealer that encrypts with `secret`, or one that does not encrypt."""
    return Sealer(() if secret is None else (secret,))


def sealed(secret: bytes | None, key: Key | None = None) -> tuple[Key, memoryview, memoryview]:
    """Return a key, and the two parts of the value that is stored under it."""
    key = key or some_key(1)
    return (key, *sealer_of(secret).seal(key, 16, filled(content(1, BODY), (BODY,))[0]))


def why(secret: bytes | None, key: Key, header: memoryview, body: memoryview, units: int = 16) -> str:
    """Return the reason for which a value is damaged."""
    with pytest.raises(DamagedError) as caught:
        sealer_of(secret).unseal(key, units, header, body)
    return str(caught.value)


def address(of: memoryview) -> int:
    """Return the address at which a buffer begins."""
    import numpy as np

    return int(np.frombuffer(of, np.uint8).ctypes.data)


def signed(header: memoryview) -> memoryview:
    """Correct the checksum of a changed header, as an attacker could."""
    header[-8:] = xxhash.xxh3_64_digest(header[:-8])
    return header


@SECRETS
@pytest.mark.parametrize("key", [some_key(1), LONGEST], ids=["usual", "longest"])
def test_another_sealer_restores_a_sealed_body(secret: bytes | None, key: Key) -> None:
    """Another sealer with the same secret restores the body, and the header describes the body."""
    _, header, body = sealed(secret, key)
    found = describe(header)
    cipher = Cipher.PLAIN if secret is None else Cipher.AES_256_GCM
    assert found[:4] == (key, 16, BODY, cipher)
    sealer_of(secret).unseal(key, 16, header, body)
    assert bytes(body) == content(1, BODY)


@SECRETS
def test_parts_are_aligned(secret: bytes | None) -> None:
    """Direct I/O accepts header and body, because both begin at pages and have the lengths that tiers expect."""
    _, header, body = sealed(secret)
    assert (header.nbytes, body.nbytes) == (HEADER_BYTES, BODY)
    assert address(header) % ALIGN_BYTES == address(body) % ALIGN_BYTES == 0


def test_a_plain_body_is_not_copied() -> None:
    """Without a secret, the tier gets the slot's own memory to write."""
    body = aligned(BODY)
    assert Sealer().seal(some_key(1), 16, body)[1] is body


def test_an_encrypted_body_shows_nothing() -> None:
    """With a secret, the slot stays unchanged.

    The encrypted bytes contain no part of the slot's content, and are different in each write.
    """
    body = filled(content(1, BODY), (BODY,))[0]
    sealer = Sealer([SECRET])
    first, second = (bytes(sealer.seal(some_key(1), 16, body)[1]) for _ in range(2))
    assert bytes(body) == content(1, BODY)
    assert first != second
    assert not set(pieces(first)) & set(pieces(bytes(body)))
    assert not set(pieces(first)) & set(pieces(second))


def pieces(data: bytes) -> list[bytes]:
    """Return a buffer's pieces of 16 bytes."""
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def test_the_format_is_fixed() -> None:
    """A header's bytes are those of version 2, so that later releases can read values that are stored today."""
    key, header, body = sealed(None)
    text = key.text.encode()
    fields = struct.pack("<8sHBBIQ48s", b"kvpipe\r\n", 2, 0, len(text), 16, BODY, b"") + text
    wanted = fields.ljust(HEADER_BYTES - 24, b"\0") + xxhash.xxh3_128_digest(body)
    assert bytes(header) == wanted + xxhash.xxh3_64_digest(wanted)


def test_version_is_read_from_a_whole_header_only() -> None:
    """The version distinguishes a value of an older release from a damaged value and from a file of another program."""
    _, header, _ = sealed(None)
    assert version_of(header) == VERSION
    for at in (0, 8, HEADER_BYTES - 1):  # the magic, the version, the checksum
        changed = bytearray(header)
        changed[at] ^= 1
        assert version_of(bytes(changed)) == 0
    header[8] = VERSION - 1
    assert version_of(signed(header)) == VERSION - 1


def test_the_ciphers_key_is_fixed() -> None:
    """An encrypted value is AES-256-GCM under HKDF-SHA256 of secret and salt, so that later releases can read it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    _, header, body = sealed(SECRET)
    found = describe(header)
    values = HKDF(SHA256(), 32, None, b"kvpipe tier 2 values").derive(SECRET)
    derived = HKDF(SHA256(), 32, found.salt, b"kvpipe tier 2 value").derive(values)
    plain = AESGCM(derived).decrypt(bytes(12), bytes(body) + found.check, bytes(header[:-24]))
    assert plain == content(1, BODY)
    assert found.mark == HKDF(SHA256(), 16, None, b"kvpipe tier 2 mark").derive(SECRET)
    names = HKDF(SHA256(), 32, None, b"kvpipe tier 2 names").derive(SECRET)
    key = some_key(1, group=2, rank=3, ranks=4)
    (name,) = Sealer([SECRET]).names(key)
    assert name.chunk == hashlib.blake2b(key.text.encode(), key=names, digest_size=32).digest()
    assert name.namespace == hashlib.blake2b(key.namespace.encode(), key=names, digest_size=16).hexdigest()
    assert name[2:] == (0, 0, 1)


@SECRETS
def test_every_changed_byte_of_a_header_is_noticed(secret: bytes | None) -> None:
    """Parsing detects a change of any byte of a header."""
    _, header, _ = sealed(secret)
    for at in range(HEADER_BYTES):
        header[at] ^= 0x40
        with pytest.raises(DamagedError):
            describe(header)
        header[at] ^= 0x40
    describe(header)


@SECRETS
def test_changed_bytes_of_a_body_are_noticed(secret: bytes | None) -> None:
    """A bit that flips anywhere in the body makes the value damaged."""
    for at in (0, 1, ALIGN_BYTES, BODY - 1):
        key, header, body = sealed(secret)
        body[at] ^= 1
        assert why(secret, key, header, body) == ("checksum" if secret is None else "decryption")


@SECRETS
@pytest.mark.parametrize(
    ("at", "wrong", "stated"),
    [
        (0, b"KVPIPE\r\n", "unknown format"),
        (0, bytes(8), "zeros"),
        (8, struct.pack("<H", 1), "older version"),
        (8, struct.pack("<H", 3), "newer version"),
        (10, b"\7", "unknown format"),
        (11, b"\0", "key"),
        (11, b"\xff", "key"),
        (12, struct.pack("<I", 17), "units"),
        (16, struct.pack("<Q", BODY - 1), "length"),
        (16, struct.pack("<Q", 1 << 62), "length"),
        (72, b"\xff", "key"),
        (72, b"F", "key"),
    ],
)
def test_a_field_that_is_wrong_is_named(secret: bytes | None, at: int, wrong: bytes, stated: str) -> None:
    """If a header's checksum is right, but one field has an unexpected value, the message names this field."""
    key, header, body = sealed(secret)
    header[at : at + len(wrong)] = wrong
    assert why(secret, key, signed(header), body) == stated


@pytest.mark.parametrize("at", [40, HEADER_BYTES - 24, 2000], ids=["salt", "tag", "behind the fields"])
def test_all_of_an_encrypted_header_is_authenticated(at: int) -> None:
    """The secret authenticates each byte of an encrypted value's header: a header with one changed byte is rejected."""
    key, header, body = sealed(SECRET)
    header[at] ^= 1
    assert why(SECRET, key, signed(header), body) == "decryption"


def test_value_of_another_key_or_length_is_damaged() -> None:
    """A value with another key, other units or another length is damaged.

    So a tier that mixes up its values is detected.
    """
    key, header, body = sealed(None)
    for other in (some_key(2), key._replace(group=1), key._replace(rank=1, ranks=2)):
        assert why(None, other, header, body) == "key"
    assert why(None, some_key(1, "0" * 32), header, body) == "another namespace"
    assert why(None, key, header, body, units=15) == "units"
    assert why(None, key, header, body[:-ALIGN_BYTES]) == "length"
    assert why(None, key, header[:-1], body) == "length"


@pytest.mark.parametrize(
    ("stored", "read", "stated"),
    [(None, SECRET, "not encrypted"), (SECRET, None, "encrypted"), (SECRET, OTHER, "another encryption key")],
    ids=["plain, wanted encrypted", "encrypted, wanted plain", "another secret"],
)
def test_another_secret_is_a_miss(stored: bytes | None, read: bytes | None, stated: str) -> None:
    """Reading raises DamagedError if a value was sealed with another secret, an unexpected secret, or none."""
    assert why(read, *sealed(stored)) == stated
    assert issubclass(DamagedError, TransferError)


def test_value_moved_to_another_namespace_is_not_decrypted() -> None:
    """A value that is moved to another namespace, with an adapted header, cannot be decrypted."""
    key, header, body = sealed(SECRET)
    moved = key._replace(namespace="0" * 32)
    header[72:104] = moved.namespace.encode()
    assert why(SECRET, moved, signed(header), body) == "decryption"


def spec(**given: Any) -> TierSpec:
    """Return a tier's configuration."""
    return DictSpec.model_validate(given)


def test_secrets_come_from_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is 32 bytes in base64, from the configured variable or file. With neither of the two there is no key."""
    text = base64.b64encode(SECRET).decode()
    monkeypatch.setenv("MY_KEY", text)
    (tmp_path / "key").write_text(text + "\n", encoding="ascii")
    (tmp_path / "key").chmod(0o600)
    assert secrets_of(spec()) == ()
    assert secrets_of(spec(encryption_key_env="MY_KEY")) == (SECRET,)
    assert secrets_of(spec(encryption_key_file=tmp_path / "key")) == (SECRET,)


@pytest.mark.parametrize("wrong", ["hunter2", "aHVudGVyMg==", "hünter2", "A" * 43, "A" * 44, ""])
def test_a_wrong_secret_is_refused_and_not_shown(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is not a base64 key of 32 bytes is refused.

    The message names the variable and the remedy, but does not show the value.
    """
    monkeypatch.setenv("MY_KEY", wrong)
    with pytest.raises(ConfigError, match="MY_KEY") as caught:
        secrets_of(spec(encryption_key_env="MY_KEY"))
    assert not wrong or wrong not in str(caught.value)
    assert not wrong or "openssl rand -base64 32" in str(caught.value)


def test_several_keys_are_read_and_the_first_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are separated by blanks or line breaks. A value of an older key is found under that key's name and read."""
    texts = [base64.b64encode(one).decode() for one in (OTHER, SECRET)]
    monkeypatch.setenv("MY_KEY", f" {texts[0]}\n{texts[1]}\n")
    secrets = secrets_of(spec(encryption_key_env="MY_KEY"))
    assert secrets == (OTHER, SECRET)
    old, new = Sealer([SECRET]), Sealer(secrets)
    key, body = some_key(1), filled(content(1, BODY), (BODY,))[0]
    (was,) = old.names(key)
    now, then = new.names(key)
    assert then == was != now
    header, value = old.seal(was, 16, body)
    new.unseal(then, 16, header, value)
    assert bytes(value) == content(1, BODY)
    header, value = new.seal(now, 16, body)
    with pytest.raises(DamagedError, match="another encryption key"):
        old.unseal(now, 16, header, value)


@pytest.mark.parametrize(
    ("texts", "stated"),
    [
        ([SECRET, SECRET], "encryption_key_env='MY_KEY': key 2 equals an earlier key"),
        ([SECRET, b"short"], "encryption_key_env='MY_KEY': key 2 does not hold 32 bytes"),
        ([bytes([i]) * 32 for i in range(KEYS_MAX + 1)], "holds 9 keys; 8 are allowed"),
    ],
    ids=["twice", "short", "many"],
)
def test_a_wrong_ring_is_refused(texts: list[bytes], stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the position of the wrong key, and shows no key."""
    monkeypatch.setenv("MY_KEY", "\n".join(base64.b64encode(one).decode() for one in texts))
    with pytest.raises(ConfigError, match=stated) as caught:
        secrets_of(spec(encryption_key_env="MY_KEY"))
    assert not any(base64.b64encode(one).decode() in str(caught.value) for one in texts)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
@pytest.mark.parametrize("link", [False, True])
def test_key_file_that_others_can_read_is_refused(mode: int, link: bool, tmp_path: Path) -> None:
    """A file that others can read is refused with the remedy, also if a link leads to it. A private file is read."""
    file, there = tmp_path / "key", tmp_path / "link"
    there.symlink_to(file)
    file.write_text(base64.b64encode(SECRET).decode(), encoding="ascii")
    file.chmod(mode)
    named = spec(encryption_key_file=there if link else file)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.; run chmod 0600 on it"):
        secrets_of(named)
    file.chmod(0o400)
    assert secrets_of(named) == (SECRET,)


def test_a_key_encrypts_one_value() -> None:
    """Each value is encrypted with a key of its own, so no key comes near a limit of the cipher.

    Two values with equal names and bodies have only their mark in common.
    """
    sealer, body = Sealer([SECRET]), filled(content(1, BODY), (BODY,))[0]
    values = [sealer.seal(some_key(1), 16, body) for _ in range(20)]
    headers = [describe(header) for header, _ in values]
    assert len({one.salt for one in headers}) == len({one.check for one in headers}) == 20
    assert {len(one.salt) for one in headers} == {32}
    assert len({one.mark for one in headers}) == 1
    pads = {bytes(a ^ b for a, b in zip(value[:64], content(1, 64), strict=True)) for _, value in values}
    assert len(pads) == 20, "a key stream was used twice"


def test_a_secret_is_in_no_repr() -> None:
    """Printing a sealer, or any object that it holds, shows no secret."""
    sealer = Sealer([SECRET])
    shown = repr(sealer) + repr(vars(sealer)) + repr(sealer._first)
    assert repr(SECRET) not in shown
    assert SECRET.hex() not in shown


WITHOUT = """
import sys
sys.modules["cryptography"] = None
from kvpipe.errors import ConfigError
from kvpipe.tiers.envelope import Sealer
Sealer()
try:
    Sealer([bytes(32)])
except ConfigError as error:
    print(error)
"""


def test_encryption_needs_its_extra_only_where_it_is_used() -> None:
    """Without the package, plain values work. A secret is refused, and the message names the package to install."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "kvpipe: encryption needs the package cryptography; pip install 'kvpipe[encryption]'\n"


@SECRETS
def test_threads_seal_beside_each_other(secret: bytes | None) -> None:
    """Many threads share one sealer. Each thread can read the values that it has sealed."""
    sealer = sealer_of(secret)

    def one(i: int) -> bool:
        key, (plain,) = some_key(i), filled(content(i, BODY), (BODY,))
        header, body = sealer.seal(key, i, plain)
        sealer.unseal(key, i, header, body)
        return bytes(body) == content(i, BODY)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(64)))
