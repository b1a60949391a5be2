"""The laws, as checks of a trial: one function each, and the sentence that it holds.

A check returns what is wrong, or nothing. Those marked *outside* hold for any connector, the others look into kvpipe.
`after_update` runs them all after each step that the scheduler has digested; `after_drain` when nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from kvpipe.catalog import Chunk
from kvpipe.connectors.vllm.scheduler import SAVE_RETRIES_MAX
from kvpipe.testing.trial import Trial

Check = Callable[["Watched"], Iterator[str]]


class Invariant(NamedTuple):
    """One law's check. `law` is its number in the design; `drained`: it holds only when nothing is left to do."""

    name: str
    law: int
    sentence: str
    check: Check
    outside: bool
    drained: bool


INVARIANTS: dict[str, Invariant] = {}


def invariant(law: int, sentence: str, *, outside: bool = False, drained: bool = False) -> Callable[[Check], Check]:
    """Register a check under its function's name."""

    def register(check: Check) -> Check:
        INVARIANTS[check.__name__] = Invariant(check.__name__, law, sentence, check, outside, drained)
        return check

    return register


class Watched:
    """A trial under watch, from step to step: remembers what was checked already, and what was broken."""

    def __init__(self, trial: Trial) -> None:
        """Watch `trial` from now on."""
        self.trial = trial
        self._faults = self._wrong = 0
        self.findable: dict[tuple[int, bytes], tuple[int, int]] = {}
        self.broken: list[str] = []
        trial.on_update = self.after_update

    def after_update(self) -> list[str]:
        """Check everything that holds at any time; return and remember what is broken."""
        return self._check(drained=False)

    def after_drain(self) -> list[str]:
        """Check everything, when nothing is left to do. After a shutdown much is."""
        if self.trial.is_down:
            return []
        return self._check(drained=False) + self._check(drained=True)

    def _check(self, *, drained: bool) -> list[str]:
        found = []
        for one in INVARIANTS.values():
            if one.drained == drained and (one.outside or self.trial.kvpipe is not None):
                found += [f"{one.name}: {what}" for what in one.check(self)]
        found += self.trial.violations
        self.trial.violations = []
        self.broken += found
        return found

    def new_faults(self) -> list[str]:
        """Return the faults since the last call."""
        new, self._faults = self.trial.faults[self._faults :], len(self.trial.faults)
        return new

    def new_wrong(self) -> list[str]:
        """Return the wrong reads since the last call."""
        new, self._wrong = self.trial.wrong[self._wrong :], len(self.trial.wrong)
        return [str(one) for one in new]


@invariant(1, "Nothing raises into vLLM, and no fault is counted that nobody has caused.")
def only_faults_that_were_caused(watched: Watched) -> Iterator[str]:
    """Fault counters against the disturbances of the trial."""
    for fault in watched.new_faults():
        if fault.split(" ", 1)[0] not in watched.trial.excused:
            yield fault


@invariant(2, "A chunk that can be found holds, on every rank and layer, the KV of exactly the prefix of its key.")
def findable_chunks_are_whole_and_true(watched: Watched) -> Iterator[str]:
    """Every byte of what became findable since the last check."""
    catalog, geometry = watched.trial.side.catalog, watched.trial.side.geometry
    now: dict[tuple[int, bytes], tuple[int, int]] = {}
    for group in range(len(geometry.groups)):
        for key, chunk in catalog.index(group).items():
            units = next(mark.units for mark in chunk.marks if mark.key == key)
            now[group, key] = (chunk.slot, units)
            if watched.findable.get((group, key)) != (chunk.slot, units):
                yield from _false_bytes(watched, group, key, chunk, units)
    watched.findable = now


def _false_bytes(watched: Watched, group: int, key: bytes, chunk: Chunk, units: int) -> Iterator[str]:
    known = watched.trial.prefixes.get(key)
    if known is None:
        yield f"a key that no request has: slot {chunk.slot}, group {group}"
        return
    sequence, stop = known
    geometry = watched.trial.side.geometry
    first, tokens = stop - units * geometry.unit_tokens, units * geometry.unit_tokens
    for rank in watched.trial.ranks:
        pool = watched.trial.engines[rank.index]._pool  # noqa: SLF001
        layers = [layer for layer in rank.layers if layer.group == group]
        for layer, offset in zip(layers, geometry.layer_offsets[group], strict=True):
            held = pool.slot(chunk.slot)[offset : offset + tokens * 8].numpy().view(np.uint64)
            differs = np.flatnonzero(held != (sequence.upto(stop)[first:stop] ^ layer.key))
            if len(differs):
                yield f"slot {chunk.slot}, rank {rank.index}, layer {layer.name}: {len(differs)} of {tokens} tokens"


@invariant(3, "Whatever attention reads is what belongs there, unless vLLM was told in the same step.", outside=True)
def every_read_is_right(watched: Watched) -> Iterator[str]:
    """The content oracle on the paged caches."""
    yield from watched.new_wrong()


@invariant(4, "Only tokens that are final have keys in the catalog, being written or written.")
def confirmed_tokens_only(watched: Watched) -> Iterator[str]:
    """Keys of pieces in flight against the hashes of true prefixes."""
    for flight in watched.trial.side._flights.values():  # noqa: SLF001
        for piece in flight.pieces:
            if piece.key not in watched.trial.prefixes:
                yield f"a piece of {flight.job.request} is written under a key of no prefix"


@invariant(6, "Every lease belongs to a load in flight, by request and epoch.")
def leases_have_owners(watched: Watched) -> Iterator[str]:
    """Owners in the catalog against flights."""
    side = watched.trial.side
    owners = {flight.owner for flight in side._flights.values() if flight.owner is not None}  # noqa: SLF001
    for owner in side.catalog._leases:  # noqa: SLF001
        if owner not in owners:
            yield f"{owner} has leases and no load"


@invariant(2, "Slots, index, leases, writers and the policy agree.")
def catalog_is_consistent(watched: Watched) -> Iterator[str]:
    """`Catalog.check_integrity`."""
    try:
        watched.trial.side.catalog.check_integrity()
    except AssertionError as e:
        yield str(e)


@invariant(8, "No machine meets an event that its table calls a bug.")
def no_illegal_transition(watched: Watched) -> Iterator[str]:
    """Counters of all sides."""
    for counters in _counters(watched):
        for name in ("illegal_transition", "contained_error", "loop_lost", "loop_did_not_settle"):
            if counters[name]:
                yield f"{counters[name]} x {name}"
    for rank in watched.trial.ranks:
        if errors := rank.connector.worker.pipeline._loop.errors:  # type: ignore[attr-defined]  # noqa: SLF001
            yield f"{errors} errors on the loop thread of rank {rank.index}"


@invariant(9, "Retries, jobs and slots are bounded.")
def everything_is_bounded(watched: Watched) -> Iterator[str]:
    """Sizes against their limits."""
    trial, side = watched.trial, watched.trial.side
    for tracked in side._tracked.values():  # noqa: SLF001
        if tracked.retries > SAVE_RETRIES_MAX:
            yield f"{tracked.request.request_id} retried its save {tracked.retries} times"
    if side.catalog.used > side.catalog.slots:
        yield f"{side.catalog.used} slots used of {side.catalog.slots}"
    if len(side._flights) > 64 * (trial.shape.seqs_max + len(trial.live)):  # noqa: SLF001
        yield f"{len(side._flights)} jobs in flight"  # noqa: SLF001


@invariant(6, "When nothing is left to do nothing is held: no lease, piece, job, cursor.", drained=True)
def nothing_is_held(watched: Watched) -> Iterator[str]:
    """Gauges of both sides."""
    stats = watched.trial.side.stats()
    for name in ("leases", "pieces_writing", "jobs_in_flight", "requests"):
        if stats[name]:
            yield f"{stats[name]} {name}"
    for rank in watched.trial.ranks:
        pipeline = rank.connector.worker.pipeline  # type: ignore[attr-defined]
        if pipeline.in_flight:
            yield f"{pipeline.in_flight} jobs on rank {rank.index}"


@invariant(6, "When nothing is left to do every block is back in vLLM's pool.", outside=True, drained=True)
def all_blocks_are_back(watched: Watched) -> Iterator[str]:
    """VLLM's block pool and tables."""
    scheduler = watched.trial.scheduler
    manager = scheduler.kv_cache_manager
    if missing := manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks():
        yield f"{missing} blocks"
    if tables := sum(len(m.req_to_blocks) for m in manager.coordinator.single_type_managers):
        yield f"{tables} block tables"
    if scheduler.requests:
        yield f"requests {sorted(scheduler.requests)}"


def _counters(watched: Watched) -> Iterator[dict[str, int]]:
    for side in (watched.trial.scheduler.connector, *(rank.connector for rank in watched.trial.ranks)):
        yield side.counters  # type: ignore[union-attr]
