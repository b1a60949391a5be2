"""The checks of the shared slots that a rank's jobs read, and the marks of the slots that the jobs have written.

vLLM's thread calls `refused`, `begin` and `wait`. The thread that handles the loop's inbox calls the other methods.
With digests, a thread of its own reads the slots. This thread sets `Batch.damaged` before it sends the batch to the
inbox, and nothing else of a batch. `Batch.checked` is made before this thread gets the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Final

from kvpipe.machine.cores import bind_this_thread
from kvpipe.protocol.messages import SAVE, Job
from kvpipe.trace.log import Counters, log
from kvpipe.transfer.base import NO_JOBS, Ticket
from kvpipe.transfer.marks import SlotMarks
from kvpipe.worker.batch import Batch

STOP_S: Final = 5.0
CHANGED: Final = "the bytes of a slot have changed"
_Work = tuple[Callable[[Batch], object], Batch]


class SlotChecks:
    """The checks of one rank. The digests' thread calls `on_checked` with each batch whose slots it has read."""

    def __init__(self, marks: SlotMarks, counters: Counters, *, saves: bool, cpus: frozenset[int]) -> None:
        """Start the digests' thread if `marks` have digests. Without `saves`, another rank writes the same marks."""
        self._marks, self._counters, self._saves, self._cpus = marks, counters, saves, cpus
        self.on_checked: Callable[[Batch], object] = id
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpipe-digests", daemon=True) if marks.digests else None
        if self._thread is not None:
            self._thread.start()

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
        """Begin the checks of a batch, before the batch's first copy is submitted."""
        batch.stamps = b"".join([job.stamps for job in batch.jobs])
        if not batch.stamps:
            return
        if batch.kind is SAVE:
            if self._saves:
                self._marks.clear(batch.stamps)
        elif self._thread is not None:
            self._queue_work(self._compare, batch)

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """Wait until the slots of the ticket's batch are compared. Returns False after `timeout_s` seconds."""
        batch = ticket.batch
        return not isinstance(batch, Batch) or batch.checked is None or batch.checked.wait(timeout_s)

    # ---- the thread that handles the inbox ------------------------------------------------------------------------

    def holds(self, batch: Batch, ticket: Ticket, *, layers: int) -> bool:
        """Return whether the landing of `ticket` has to wait for the digests, because `ticket` is a load's last ticket.

        A load has `layers` layers.
        """
        is_last = ticket.ordinal + len(ticket.layers) == layers
        if batch.kind is SAVE or not is_last or batch.checked is None or batch.checked.is_set():
            return False
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
                self._marks.write(batch.stamps)
                batch.stamps = b""
                return True
            self._queue_work(self._write, batch)
        return batch.checked is not None and batch.checked.is_set()

    # ---- the digests' thread --------------------------------------------------------------------------------------

    def _queue_work(self, work: Callable[[Batch], object], batch: Batch) -> None:
        batch.checked = threading.Event()
        self._queue.put((work, batch))

    def _run(self) -> None:
        if self._cpus:
            bind_this_thread(self._cpus)
        while (item := self._queue.get()) is not None:
            work, batch = item
            try:
                work(batch)
            except Exception:
                log.exception("digests_failed", jobs=sorted(batch.ids))
                batch.damaged = batch.ids
            self.on_checked(batch)

    def _compare(self, batch: Batch) -> None:
        batch.damaged = frozenset(job.id for job in batch.jobs if job.stamps and self._marks.damage(job.stamps))

    def _write(self, batch: Batch) -> None:
        self._marks.write(batch.stamps)

    def stop(self) -> None:
        """Finish the queued work and end the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(STOP_S)
