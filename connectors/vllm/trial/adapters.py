"""LoRA adapters of a trial: what their files are, and what each rank has loaded of them. Versions stand for bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpipe.worker.adapters import HeldAdapters, Loaded

CHANGES: Final = ("loaded in place", "overwritten on disk", "evicted")
NUMBERS: Final = (1,)


class AdapterFake:
    """All ranks load the same, in the same steps; from the start they hold every adapter."""

    def __init__(self) -> None:
        """Every adapter has its first version."""
        self.files = dict.fromkeys(NUMBERS, 0)
        self._ranks: dict[int, tuple[HeldAdapters, dict[int, int]]] = {}

    def join(self, rank: int, held: HeldAdapters) -> None:
        """Let `rank` hold what it loads from here."""
        self._ranks[rank] = held, {}
        held.now = lambda: {number: digest(number, version) for number, version in self._ranks[rank][1].items()}
        self.load(rank, NUMBERS)

    def load(self, rank: int, numbers: Iterable[int], *, anew: bool = False) -> None:
        """Load what of `numbers` the rank does not hold, or all of them `anew`."""
        if rank in self._ranks:
            held, there = self._ranks[rank]
            for number in numbers:
                if number and (anew or number not in there):
                    there[number] = self.files[number]
                    held.loaded(Loaded(number, name(number), path(number), digest(number, there[number])))

    def change(self, kind: str) -> dict[int, dict[int, bytes]]:
        """Change all adapters, in one of the ways of `CHANGES`. Returns, by rank, what is held now."""
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
        """Return the version that a request which comes now is computed with."""
        there = next((there for _, there in self._ranks.values()), {})
        return there.get(number, self.files.get(number, 0))

    def key(self, block_hash: bytes, number: int) -> bytes:
        """Return what a block of a request that comes now is known by."""
        return block_hash + digest(number, self.version(number)) if number else block_hash

    def other_keys(self, block_hash: bytes, number: int) -> list[bytes]:
        """Return the keys that it may have before ranks have reported what they hold: they refuse those jobs."""
        return [block_hash + digest(number, version) for version in (0, 1)] if number else []

    # ---- in place of `AdapterReader` ------------------------------------------------------------------------------

    def digest(self, where: str, since_s: float) -> bytes:  # noqa: ARG002  (the files are always read at once)
        """See `AdapterReader.digest`."""
        number = next(number for number in NUMBERS if path(number) == where)
        return digest(number, self.files[number])

    def stop(self) -> None:
        """See `AdapterReader.stop`."""


def name(number: int) -> str:
    """Return what the adapter is called."""
    return f"lora{number}"


def path(number: int) -> str:
    """Return where its files are."""
    return f"/{name(number)}"


def digest(number: int, version: int) -> bytes:
    """Return what a version's bytes come to."""
    return b"%016d" % (number * 10 + version)


PATHS: Final = {name(number): path(number) for number in NUMBERS}
"""Where adapters are, by their names."""
