"""Removes from an ELF file the CUDA code of all architectures except one: `fatprune.py IN OUT 90`.

A fat binary (section ``.nv_fatbin``) holds the same kernels for many GPUs. Sizes and offsets in the ELF do not change.
Removed code is replaced by zeros, which compress well. A fat binary without code for the wanted architecture keeps its
smallest entry, so that the ELF still loads.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

MAGIC: Final = 0xBA55ED50
SECTION: Final = b".nv_fatbin"
CUBIN: Final = 2  # the kind of an entry of machine code; 1 is PTX
ALIGN: Final = 8


class Entry(NamedTuple):
    """One architecture's code in a fat binary."""

    kind: int
    arch: int
    data: bytes


def sections(elf: bytearray) -> Iterator[tuple[int, int]]:
    """Yield the (offset, end) of every section that contains fat binaries."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        at = names + header[0]
        if bytes(elf[at : elf.index(0, at)]) == SECTION:
            yield header[4], header[4] + header[5]


def entries(elf: bytearray, begin: int, end: int) -> Iterator[Entry]:
    """Yield the entries of the fat binary whose body is `elf[begin:end]`."""
    while begin < end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", elf, begin)
        (arch,) = struct.unpack_from("<I", elf, begin + 28)
        yield Entry(kind, arch, bytes(elf[begin : begin + header + payload]))
        begin += header + payload


def prune(elf: bytearray, arch: int) -> tuple[int, int]:
    """Prune `elf` in place, and return the numbers of fat binaries with and without code for `arch`."""
    with_code = without = 0
    for begin, end in sections(elf):
        at = begin
        while at < end:
            if struct.unpack_from("<I", elf, at)[0] != MAGIC:
                at += ALIGN
                continue
            header, body = struct.unpack_from("<HQ", elf, at + 6)
            found = list(entries(elf, at + header, at + header + body))
            kept = [e for e in found if e.kind == CUBIN and e.arch == arch]
            with_code, without = with_code + bool(kept), without + (not kept)
            data = b"".join(e.data for e in kept or [min(found, key=lambda e: len(e.data))])
            elf[at + header : at + header + body] = data + bytes(body - len(data))
            struct.pack_into("<Q", elf, at + 8, len(data))
            at = -(-(at + header + body) // ALIGN) * ALIGN
    return with_code, without


def main(source: str, target: str, arch: str) -> None:
    """Write the pruned copy of `source` to `target`."""
    elf = bytearray(Path(source).read_bytes())
    with_code, without = prune(elf, int(arch))
    Path(target).write_bytes(elf)
    sys.stdout.write(f"{Path(source).name}: {with_code} fat binaries with sm_{arch}, {without} without\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
