"""Measures fetches of chunks from an engine with another number of ranks, and the size of MLA chunks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.report import Figure
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import TierOrder
from kvpipe.tiers.base import Tier
from kvpipe.tiers.carrier import Carrier
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.guard import READ, WRITE, guarded
from kvpipe.tiers.parts import RankParts, Share, kept_splits, split_of
from kvpipe.tiers.spec import TierSpec
from kvpipe.trace.log import Counters
from kvpipe.transfer.pool import HostPool

HEADS, LAYERS, BLOCK_TOKENS, CHUNK_TOKENS = 8, 16, 16, 256
HEAD_BYTES = 2 * 128 * 2  # bytes of a token's keys and values in a head, in bfloat16
CHUNKS, ROUNDS = 12, 9
LATENT_BYTES = 576 * 2
IN_HALVES = "1, with share_ranks_max=2,"
ORDERS = {"heads first": 1, "tokens first": BLOCK_TOKENS}


class Ranks:
    """The carriers of an engine's ranks over one tier."""

    def __init__(
        self, spec: TierSpec, ranks: int, most: int, heads: int, rows: int, head_bytes: int, count: int = LAYERS
    ) -> None:
        """`most` is `share_ranks_max`.

        `heads` is the number of heads (1 for latents). `rows` is the number of runs per page in which a head's bytes
        lie.

        `count` is the number of layers.
        """
        self.ranks, (self.split,) = ranks, kept_splits((heads,), ranks, most)
        page = heads // split_of(heads, ranks) * BLOCK_TOKENS * head_bytes
        layers = tuple(Layer(str(i), page) for i in range(count))
        chunk = page * count * CHUNK_TOKENS // BLOCK_TOKENS
        geometry = Geometry((Group(layers, BLOCK_TOKENS),), CHUNK_TOKENS, CHUNKS * (chunk + (1 << 16)))
        self.carriers = []
        for rank in range(ranks):
            tier: Tier = spec.make("disk")
            pool = HostPool(geometry)
            pool.tensor.fill_(rank + 1)
            shares = (Share(heads, (rows,) * count),)
            tiers = guarded([("disk", spec, tier)], (READ, WRITE))
            self.carriers.append(
                Carrier(
                    tiers,
                    geometry,
                    pool,
                    RankParts(rank, ranks, shares, most),
                    counters=Counters(),
                )
            )
        self._ids = 0

    def carry(self, *, stores: bool, names: list[bytes], split: int) -> float:
        """Store or fetch a chunk for each of `names` on every rank, and return the seconds until all have ended."""
        orders = []
        for slot, name in enumerate(names):
            self._ids += 1
            orders.append(TierOrder(self._ids, stores, 0, slot, 0, CHUNK_TOKENS // BLOCK_TOKENS, name, split))
        begin, ended = time.perf_counter(), 0
        for carrier in self.carriers:
            carrier.carry_out(orders, "c" * 32, 1)
        while ended < len(orders) * self.ranks:
            for carrier in self.carriers:
                got = carrier.collect()
                assert all(one.ok for one in got)
                ended += len(got)
            time.sleep(0.0002)
        return time.perf_counter() - begin

    def bytes_written(self) -> int:
        """Return the number of bytes that all ranks have written."""
        return sum(carrier.bytes["disk", WRITE] for carrier in self.carriers)


@contextmanager
def _engines(folder: Path, heads: int, rows: int, head_bytes: int) -> Iterator[dict[str, Ranks]]:
    kinds = {"1": (1, 1), "2": (2, 1), IN_HALVES: (1, 2)}
    with ExitStack() as stack:
        spec = DiskSpec.model_validate({"path": folder, "bytes_max": 8 << 30})
        made = {kind: Ranks(spec, *ranks, heads, rows, head_bytes) for kind, ranks in kinds.items()}
        for engine in made.values():
            for carrier in engine.carriers:
                stack.callback(carrier.shutdown)
        yield made


def run() -> list[Figure]:
    """Return all figures. They are measured on the disk of the repository."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path(__file__).parents[1]))
    try:
        figures = [one for order, rows in ORDERS.items() for one in _fetches(folder / order.split()[0], order, rows)]
        return [*figures, _latents(folder / "latents")]
    finally:
        shutil.rmtree(folder)


def _fetches(folder: Path, order: str, rows: int) -> list[Figure]:
    """Compare fetches of chunks of another layout with fetches of the engine's own chunks.

    The fetches alternate, because a disk's rate changes within seconds.
    """
    took: dict[tuple[str, str], list[float]] = {}
    with _engines(folder, HEADS, rows, HEAD_BYTES) as engines:
        names = {kind: [os.urandom(32) for _ in range(CHUNKS)] for kind in engines}
        for kind, engine in engines.items():
            engine.carry(stores=True, names=names[kind], split=engine.split)
        for _ in range(ROUNDS):
            for reader in ("1", "2"):
                for writer in engines:
                    one = engines[reader].carry(stores=False, names=names[writer], split=engines[writer].split)
                    took.setdefault((writer, reader), []).append(one)
    out = []
    for writer, reader in (("1", "2"), ("2", "1"), (IN_HALVES, "2"), (IN_HALVES, "1")):
        other, own = median(took[writer, reader]), median(took[reader, reader])
        beside = f"{other / CHUNKS * 1e3:.1f} of {own / CHUNKS * 1e3:.1f} ms a chunk of 16 MiB, disk"
        name = f"fetch by {reader} of what {writer} stored, {order}"
        out.append(Figure(name, other / own, 1.15, "of its own", beside))
    return out


def _latents(folder: Path) -> Figure:
    with _engines(folder, 1, 1, LATENT_BYTES) as engines:
        for engine in engines.values():
            names = [os.urandom(32) for _ in range(CHUNKS)]
            engine.carry(stores=True, names=names, split=engine.split)
        written = {kind: engine.bytes_written() for kind, engine in engines.items()}
    beside = f"{written['2'] / CHUNKS / 1e6:.2f} MB a chunk"
    return Figure("bytes of an MLA chunk by 2 ranks in a tier", written["2"] / written["1"], 1.0, "of 1 rank's", beside)
