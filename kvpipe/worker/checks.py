"""The checks of the shared slots that a rank's jobs read, and the marks of the slots that the jobs have written.

vLLM's thread calls `refused`, `begin` and `wait`. The thread that handles the loop's inbox calls the other methods. If
slots have digests, a separate thread reads the slots. This thread changes only the attribute `damaged` of a batch,
before it sends the batch to the inbox. `Batch.checked` is made before this thread gets the batch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from kvpipe.machine.cores import bind_this_thread
from kvpipe.protocol.messages import LOAD_ASYNC, LOAD_SYNC, SAVE, Job
from kvpipe.trace.log import Counters, log
from kvpipe.transfer.base import NO_JOBS, Ticket
from kvpipe.transfer.marks import STAMP_BYTES, SlotMarks
from kvpipe.worker.batch import Batch

STOP_S: Final = 5.0
LOOK_S: Final = 0.05
"""The time in seconds after which a waiting thread looks again whether the digests' thread is alive."""
SLOTS_WAITING_MAX: Final = 1024
"""The number of saved slots that may wait for a digest. Slots beyond this number get a mark without a digest."""
CHANGED: Final = "the bytes of a slot have changed"


class SlotChecks:
    """The checks of one rank. The digests' thread calls `on_checked` with each batch whose slots it has read."""

    def __init__(self, marks: SlotMarks, counters: Counters, *, saves: bool, cpus: frozenset[int]) -> None:
        """Start the digests' thread if `marks` have digests. Without `saves`, another rank writes the same marks."""
        self._marks, self._counters, self._saves, self._cpus = marks, counters, saves, cpus
        self.on_checked: Callable[[Batch], object] = id
        self._news = threading.Condition()
        # A step waits for its sync loads, so the thread reads their slots first.
        self._urgent, self._others = deque[Batch](), deque[Batch]()
        self._latest: dict[int, Batch] = {}  # the last save of each slot that has no digest yet
        self._slots_waiting, self._stopping = 0, False
        self._thread = threading.Thread(target=self._run, name="kvpipe-digests", daemon=True) if marks.digests else None
        if self._thread is not None:
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the digests' thread runs, if digests are computed."""
        return self._thread is None or self._thread.is_alive()

    def refused(self, jobs: tuple[Job, ...], known: Mapping[int, str]) -> dict[int, str]:
        """Return the reasons why loads must not begin, by index in `jobs`. The jobs in `known` are refused already."""
        refused = dict(known)
        loads = [(place, job) for place, job in enumerate(jobs) if job.kind != SAVE and job.stamps]
        for place, job in loads:
            if place not in known and (why := self._marks.other_chunk(job.stamps)):
                refused[place] = why
                self._counters.fault("slot_damaged", job=job.id, why=why)
        return refused

    def begin(self, batch: Batch) -> None:
        """Begin the checks of a batch, before the batch's first copy is submitted.

        The digests of sync loads are compared beside the copies, because the step waits for both.
        """
        batch.stamps = b"".join([job.stamps for job in batch.jobs])
        if not batch.stamps:
            return
        if batch.kind is SAVE:
            if self._saves:
                self._marks.clear(batch.stamps)
                if self._thread is not None:
                    with self._news:
                        self._latest.update(dict.fromkeys(_slots(batch), batch))
        elif self._thread is not None:
            batch.checked = threading.Event()
            if batch.kind is LOAD_SYNC:
                self._queue(batch)

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """Wait until the slots of the ticket's batch are compared.

        Returns False after `timeout_s` seconds, or if the digests' thread has ended.
        """
        batch = ticket.batch
        if not isinstance(batch, Batch) or batch.checked is None:
            return True
        until_s = time.monotonic() + timeout_s
        while not batch.checked.wait(max(0.0, min(LOOK_S, until_s - time.monotonic()))):
            if time.monotonic() >= until_s or not self.alive:
                return False
        return True

    # ---- the thread that handles the inbox ------------------------------------------------------------------------

    def holds(self, batch: Batch, ticket: Ticket, *, layers: int) -> bool:
        """Return whether the landing of `ticket` has to wait for the digests, because `ticket` is a load's last ticket.

        A load has `layers` layers. The digests of async loads are compared now, because their copies may begin long
        after `begin`.
        """
        is_last = ticket.ordinal + len(ticket.layers) == layers
        if batch.kind is SAVE or not is_last or batch.checked is None or batch.checked.is_set():
            return False
        if batch.kind is LOAD_ASYNC and batch.held is None:
            self._queue(batch)
        batch.held = ticket
        return True

    def failed(self, batch: Batch) -> frozenset[int]:
        """Return the ids of the loads whose slots have changed. The copies of the batch have landed."""
        if batch.kind is SAVE or not batch.stamps:
            return NO_JOBS
        bad = set(batch.damaged)
        if self._marks.other_chunk(batch.stamps):
            bad.update(job.id for job in batch.jobs if job.stamps and self._marks.other_chunk(job.stamps))
        for job_id in bad:
            self._counters.fault("slot_damaged", job=job_id)
        return frozenset(bad)

    def is_marked(self, batch: Batch) -> bool:
        """Return whether the marks of a batch of saves are written. The first call begins to write the marks.

        The batch's copies touch no slot any more. A batch without marks needs none.
        """
        if batch.kind is not SAVE or not batch.stamps or not self._saves:
            return True
        if batch.checked is None:
            if self._thread is None:
                return self._mark_now(batch)
            if self._slots_waiting >= SLOTS_WAITING_MAX:
                self._counters["digests_left_out"] += len(batch.stamps) // STAMP_BYTES
                return self._mark_now(batch)
            batch.checked = threading.Event()
            self._queue(batch)
        return batch.checked is not None and batch.checked.is_set()

    def give_up(self, batch: Batch) -> None:
        """Wait for the digests of `batch` no longer. A save is marked without digests."""
        if batch.checked is not None and not batch.checked.is_set():
            if batch.kind is SAVE:
                self._take_latest(batch)
                self._marks.write(batch.stamps, digests=False)
            batch.checked.set()

    def _take_latest(self, batch: Batch) -> list[bool]:
        """Return, for each stamp of a batch of saves, whether no later save of the slot has begun."""
        with self._news:
            latest = [self._latest.get(slot) is batch for slot in _slots(batch)]
            for slot in itertools.compress(_slots(batch), latest):
                self._latest.pop(slot, None)  # absent if two jobs of the batch save this slot
        return latest

    def _mark_now(self, batch: Batch) -> bool:
        self._take_latest(batch)
        self._marks.write(batch.stamps, digests=False)
        batch.stamps = b""
        return True

    # ---- the digests' thread --------------------------------------------------------------------------------------

    def _queue(self, batch: Batch) -> None:
        with self._news:
            (self._urgent if batch.kind is LOAD_SYNC else self._others).append(batch)
            if batch.kind is SAVE:
                self._slots_waiting += len(batch.stamps) // STAMP_BYTES
            self._news.notify()

    def _next(self) -> Batch | None:
        """Return the next batch, or None at the end. After `stop`, the queued batches are still returned."""
        with self._news:
            self._news.wait_for(lambda: self._urgent or self._others or self._stopping)
            queue = self._urgent or self._others
            return queue.popleft() if queue else None

    def _run(self) -> None:
        if self._cpus:
            bind_this_thread(self._cpus)
        while (batch := self._next()) is not None:
            try:
                if batch.kind is SAVE:
                    self._write(batch)
                else:
                    self._compare(batch)
                self.on_checked(batch)
            except Exception:
                log.exception("check_failed", jobs=sorted(batch.ids))

    def _compare(self, batch: Batch) -> None:
        try:
            batch.damaged = frozenset(job.id for job in batch.jobs if job.stamps and self._marks.damage(job.stamps))
        except Exception:
            log.exception("digests_failed", jobs=sorted(batch.ids))
            batch.damaged = batch.ids

    def _write(self, batch: Batch) -> None:
        with self._news:
            self._slots_waiting -= len(batch.stamps) // STAMP_BYTES
        if batch.checked is not None and batch.checked.is_set():
            return  # given up, so the slots may already belong to other chunks
        try:
            whole = np.frombuffer(batch.stamps, np.uint8).reshape(-1, STAMP_BYTES)
            latest = np.array(self._take_latest(batch))
            self._marks.write(whole[~latest].tobytes(), digests=False)  # the later save writes the digest
            self._marks.write(whole[latest].tobytes())
        except Exception:
            log.exception("digests_failed", jobs=sorted(batch.ids))
            self._marks.write(batch.stamps, digests=False)

    def stop(self) -> None:
        """Finish the queued work and end the thread. Idempotent."""
        if self._thread is not None:
            with self._news:
                self._stopping = True
                self._news.notify()
            self._thread.join(STOP_S)


def _slots(batch: Batch) -> list[int]:
    """Return the slots of the batch's stamps. A slot of several jobs is returned several times."""
    slots: list[int] = np.frombuffer(batch.stamps, np.uint64)[::2].tolist()
    return slots
