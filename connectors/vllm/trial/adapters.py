"""The fake LoRA adapters of a trial: their files, and what each rank has loaded.

The files have no bytes: a version number stands for the bytes of an adapter's files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpipe.worker.adapters import HeldAdapters, Loaded

CHANGES: Final = ("loaded in place", "overwritten on disk", "evicted")
NUMBERS: Final = (1,)


class AdapterFake:
    """Fake adapters. All ranks load the same adapters in the same steps, and hold every adapter from the start."""

    def __init__(self) -> None:
        """Give every adapter its first version."""
        self.files = dict.fromkeys(NUMBERS, 0)
        self._ranks: dict[int, tuple[HeldAdapters, dict[int, int]]] = {}

    def join(self, rank: int, held: HeldAdapters) -> None:
        """Connect `held`, the adapters that `rank` holds, with these fake adapters, and load all fake adapters."""
        self._ranks[rank] = held, {}
        held.now = lambda: {number: version_digest(number, version) for number, version in self._ranks[rank][1].items()}
        self.load(rank, NUMBERS)

    def load(self, rank: int, numbers: Iterable[int], *, anew: bool = False) -> None:
        """Load the adapters of `numbers` that the rank does not hold, or all of `numbers` if `anew` is true."""
        if rank in self._ranks:
            held, there = self._ranks[rank]
            for number in numbers:
                if number and (anew or number not in there):
                    there[number] = self.files[number]
                    held.loaded(
                        Loaded(number, adapter_name(number), path(number), version_digest(number, there[number]))
                    )

    def change(self, kind: str) -> dict[int, dict[int, bytes]]:
        """Change all adapters in the way `kind`, one of `CHANGES`.

        Returns, by rank, the digests of the adapters that the rank holds now.
        """
        if kind != "evicted":
            self.files = {number: 1 - version for number, version in self.files.items()}
        for rank, (held, there) in self._ranks.items():
            if kind == "evicted":
                there.clear()
                held.changes += 1
            elif kind == "loaded in place":
                self.load(rank, NUMBERS, anew=True)
        return {rank: dict.fromkeys(NUMBERS, b"") | held.now() for rank, (held, _) in self._ranks.items()}

    def version(self, number: int) -> int:
        """Return the version with which a request that arrives now is computed."""
        there = next((there for _, there in self._ranks.values()), {})
        return there.get(number, self.files.get(number, 0))

    def key(self, block_hash: bytes, number: int) -> bytes:
        """Return the key of a block of a request that arrives now and uses the adapter `number`; 0: no adapter."""
        return block_hash + version_digest(number, self.version(number)) if number else block_hash

    def other_keys(self, block_hash: bytes, number: int) -> list[bytes]:
        """Return all keys that the block may have before the ranks have reported their adapters.

        A trial accepts each of these keys, because ranks refuse jobs with wrong keys.
        """
        return [block_hash + version_digest(number, version) for version in (0, 1)] if number else []

    # ---- in place of `AdapterReader` ------------------------------------------------------------------------------

    def digest(self, where: str, since_s: float) -> bytes:  # noqa: ARG002  (the files are always read at once)
        """Return the digest of the files of the adapter whose path is `where`, as `AdapterReader.digest` does."""
        number = next(number for number in NUMBERS if path(number) == where)
        return version_digest(number, self.files[number])

    def stop(self) -> None:
        """Do nothing: there is no thread as in `AdapterReader`."""


def adapter_name(number: int) -> str:
    """Return the name of the adapter `number`."""
    return f"lora{number}"


def path(number: int) -> str:
    """Return the path of the files of the adapter `number`."""
    return f"/{adapter_name(number)}"


def version_digest(number: int, version: int) -> bytes:
    """Return the digest of the bytes of one version of the adapter `number`."""
    return b"%016d" % (number * 10 + version)


PATHS: Final = {adapter_name(number): path(number) for number in NUMBERS}
"""The path of each adapter, by the adapter's name."""
