"""Parsing accepts any bytes that a tier returns: they are either the stored value, or reported as damaged."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.testing.buffers import aligned, content, filled
from kvpipe.tiers.base import ALIGN_BYTES, Key
from kvpipe.tiers.envelope import HEADER_BYTES, VERSION, DamagedError, Sealer, describe
from property_tests.profiles import examples

PLAIN, ENCRYPTED = Sealer(), Sealer([bytes(32)])
BODY = ALIGN_BYTES

keys = st.builds(
    Key,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=16, max_size=64),
    st.integers(0, 9999),
    st.integers(0, 999_999),
    st.integers(0, 999_999),
)
units = st.integers(0, 2**32 - 1)
sealers = st.sampled_from([PLAIN, ENCRYPTED])


def outcome(sealer: Sealer, key: Key, count: int, header: bytes, body: bytes) -> bool:
    """Return whether these bytes are accepted as the value. Any exception except `DamagedError` is a bug."""
    parts = filled(header + body, (HEADER_BYTES, len(body)))
    try:
        sealer.unseal(key, count, *parts)
    except DamagedError:
        return False
    return True


@examples(300)
@given(sealers, keys, units, st.integers(1, 3), st.integers(0, 99))
def test_sealed_value_is_restored(sealer: Sealer, key: Key, count: int, pages: int, seed: int) -> None:
    """Every key, number of units and body is restored, and the header contains key and units."""
    body = content(seed, pages * ALIGN_BYTES)
    header, stored = sealer.seal(key, count, filled(body, (len(body),))[0])
    assert describe(header)[:3] == (key, count, len(body))
    sealer.unseal(key, count, header, stored)
    assert bytes(stored) == body


@examples(500)
@given(sealers, st.binary(max_size=256), st.booleans())
def test_random_bytes_are_damaged(sealer: Sealer, start: bytes, sign: bool) -> None:  # noqa: FBT001
    """Random bytes are no header: neither alone, nor after the right magic, nor with a valid checksum."""
    key = Key("0" * 32, bytes(16), 0, 0, 1)
    for begin in (b"", struct.pack("<8sH", b"kvpipe\r\n", VERSION)):
        header = (begin + start).ljust(HEADER_BYTES, b"\0")
        if sign:
            header = header[:-8] + xxhash.xxh3_64_digest(header[:-8])
        assert not outcome(sealer, key, 0, header, bytes(BODY))


@examples(500)
@given(
    sealers, st.lists(st.tuples(st.integers(0, HEADER_BYTES + BODY - 1), st.integers(1, 255)), min_size=1, max_size=8)
)
def test_changed_bytes_are_noticed(sealer: Sealer, changes: list[tuple[int, int]]) -> None:
    """A changed value is accepted if and only if the changes restore the original bytes."""
    key = Key("1" * 32, bytes(range(32)), 1, 2, 3)
    parts = sealer.seal(key, 7, filled(content(7, BODY), (BODY,))[0])
    good = b"".join(parts)
    bad = bytearray(good)
    for at, mask in changes:
        bad[at] ^= mask
    assert outcome(sealer, key, 7, bytes(bad[:HEADER_BYTES]), bytes(bad[HEADER_BYTES:])) == (bytes(bad) == good)


@examples(300)
@given(sealers, st.integers(0, 71), st.binary(min_size=1, max_size=8))
def test_forged_fields_are_damaged(sealer: Sealer, at: int, forged: bytes) -> None:
    """A header with overwritten fields and a valid checksum is accepted only if the fields have their old content."""
    key = Key("1" * 32, bytes(range(32)), 1, 2, 3)
    header, body = sealer.seal(key, 7, aligned(BODY))
    good = bytes(header)
    header[at : at + len(forged)] = forged
    header[-8:] = xxhash.xxh3_64_digest(header[:-8])
    changed = bytes(header) != good
    # the fields `mark` and `salt`
    unused = sealer is PLAIN and header[:24] == good[:24] and header[72:-24] == good[72:-24]
    assert outcome(sealer, key, 7, bytes(header), bytes(body)) == (not changed or unused)


@examples(200)
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_value_of_any_length_is_parsed_or_damaged(data: bytes) -> None:
    """Bytes of any length are either parsed or damaged."""
    with pytest.raises(DamagedError):
        describe(data)
