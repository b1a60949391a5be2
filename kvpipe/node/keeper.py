"""Makes the holder's decisions: which client gets which slot, which chunk can be found, which chunk is evicted.

`holder.py` calls the keeper, which has no sockets and no clock. Another holder can rebuild the keeper's state from the
segment.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

from kvpipe.cache.policy.base import Policy
from kvpipe.node.clients import NodeChunk, NodeClient, RefusedError
from kvpipe.node.evictor import Evictor
from kvpipe.node.fence import fence
from kvpipe.node.layout import (
    FREE_ROW,
    KEY_BYTES_MAX,
    LINK_BYTES,
    PROCESSES_MAX,
    ClientRow,
    Process,
    SlotRecord,
)
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import BATCH_MAX, BatchAnswer, Hello, Publish, SlotBatch, SlotGrant
from kvpipe.node.namespaces import NodeNamespaces
from kvpipe.node.slots import NEVER, RegionSlots
from kvpipe.node.usage import NodeUsage, usage_of
from kvpipe.statemachine import node_client as c
from kvpipe.statemachine import node_slot as m
from kvpipe.statemachine.cursors import Cursor, IllegalTransition, Watch

STOCK_SHARE: Final = 4
"""The unused stocks of all clients together may hold 1 / `STOCK_SHARE` of the slots."""
GRANTED_SHARE: Final = 2
"""One engine may write or stock at most 1 / `GRANTED_SHARE` of the slots."""
NAME_CHARS_MAX: Final = 128


class Keeper(RegionSlots):
    """The bookkeeping of one region. `counts` maps each kind of event to the number of events since this holder began.

    `NodeMemory.share` reads and clears `short`, which is None if no slot was missing. Otherwise `short` is the last use
    of the latest victim. If leases kept all chunks, `short` is the last use of the first leased chunk. If the region
    had no chunk, `short` is infinite.
    """

    def __init__(
        self, ledger: Ledger, policy: Policy, *, stock_max: int = 256, fence: Callable[[], None] = fence,
        watch: Watch | None = None, owns: Callable[[int], bool] = lambda _: True,
        tick: Callable[[], float] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Restore the state from the segment. `stock_max` is the largest number of slots in a client's stock.

        `owns` returns whether this region owns all bytes of a slot. `tick` returns the number of the next use. `clock`
        returns the policy's seconds, which never decrease.
        """
        own = weakref.proxy(self)  # without a reference cycle, the memory is freed as soon as it is replaced
        by_use, is_leased = lambda: own._by_use(), lambda slot: own._is_leased(slot)  # noqa: PLW0108, SLF001
        self.evictor = Evictor(policy, clock, by_use, is_leased)
        super().__init__(ledger, owns, tick or itertools.count(1).__next__)
        self._fence, self._watch = fence, watch
        self._stock_max = stock_max
        self.short: float | None = None
        self._client_machine = c.NODE_CLIENT.compile()
        self.counts: Counter[str] = Counter()
        self.clients: dict[int, NodeClient] = {}
        self._index: dict[tuple[int, int, bytes], NodeChunk] = {}
        self._chunks: dict[int, NodeChunk] = {}
        self._draining: set[int] = set()
        self._namespaces = NodeNamespaces(ledger)
        self._recover()

    def _recover(self) -> None:
        for row in range(self._ledger.layout.rows):
            known = self._ledger.row(row)
            if known.token:
                self.clients[row] = NodeClient(self._client_machine, row, known, self._watch)
        machine = m.NODE_SLOT.compile()
        for record in self._ledger.beating(sorted(self._records, key=lambda record: record.slot)):
            cursor = Cursor(machine, record.slot, self._watch)
            cursor.state = machine.states[record.state]
            self._slots.append(cursor)
        by_use = sorted(self._records, key=lambda record: record.seq)  # the oldest use first
        for age, record in enumerate(self._ledger.beating(by_use)):
            self._set_unused(record.slot, record.state)
            self._adopt(record)
            if record.state == m.PUBLISHED:
                self.evictor.published(self._chunks[record.slot], over=True)  # its request counts as ended
                self.used[record.slot] = age / len(self._records) - 1  # below all ticks, on one scale for all regions
        for client in self.clients.values():
            if any(self._slots[slot].state.name == m.QUARANTINE for slot in client.granted):
                client.fire(c.LEAVE)  # an earlier holder has noticed the exit of a process

    def _adopt(self, record: SlotRecord) -> None:
        owner = self.clients.get(record.owner)
        if record.state == m.FREE and record.slot in self._usable:
            self._free.append(record.slot)
        elif record.state == m.PUBLISHED:
            self._remember(record)
        elif record.state == m.EVICTING:
            self._draining.add(record.slot)
        elif record.state in {m.GRANTED, m.QUARANTINE} and owner is not None:
            owner.granted[record.slot] = record.generation

    def _remember(self, record: SlotRecord) -> NodeChunk:
        chunk = NodeChunk(record)
        self._index[chunk.found_by] = self._chunks[record.slot] = chunk
        self._namespaces.use(record.namespace)
        self.used[record.slot] = self._tick()
        return chunk

    def _by_use(self) -> list[NodeChunk]:
        return sorted(self._chunks.values(), key=lambda chunk: float(self.used[chunk.slot]))

    def _show_usable(self) -> None:
        super()._show_usable()
        self.evictor.sized(len(self._usable))

    def use_policy(self, policy: Policy) -> None:
        """Evict by another policy from now on. All chunks stay, as chunks whose requests have ended."""
        self.evictor.use(policy)
        self.evictor.sized(len(self._usable))
        for chunk in self._ledger.beating(self._by_use()):
            chunk.place = 0  # the place in the earlier policy
            self.evictor.published(chunk, over=True)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def _move(self, slot: int, event: str, add: int, record: SlotRecord | None = None) -> SlotRecord:
        """Fire `event` and write the slot's record. `add` is added to the generation. `record` names owner or chunk."""
        edge = self._slots[slot].fire(event)
        was = self._records[slot]
        generation = was.generation + add
        made = self._ledger.commit((record or was)._replace(slot=slot, state=edge.to.name, generation=generation))
        self._records[slot] = made
        self._set_unused(slot, made.state)
        return made

    def _set_unused(self, slot: int, state: str) -> None:
        """Set the last use of a slot without a published chunk. For a published chunk, `_remember` records the use."""
        self.used[slot] = NEVER if state == m.FREE else math.inf

    def may_give(self, slots: Collection[int]) -> bool:
        """Whether no client has a grant or a lease of any of `slots`.

        This call records a use of each leased chunk, so that later searches do not find the chunk's slot again.
        """
        leased, names = {slot for slot in slots if self._is_leased(slot)}, {m.FREE, m.PUBLISHED}
        for slot in leased & self._chunks.keys():
            self.used[slot] = self._tick()
        return not leased and all(self._slots[slot].state.name in names for slot in slots)

    def give(self, slots: set[int]) -> bool:
        """Evict the chunks of `slots`, and stop granting `slots`, because another region gets the memory of `slots`.

        If a client has leased one of these chunks meanwhile, return False. In this case `slots` can still be granted.
        """
        self._evict_chunks([self._chunks[slot] for slot in slots if slot in self._chunks])
        if any(self._slots[slot].state.name != m.FREE for slot in slots):
            return False
        self._use_no_more(slots)
        return True

    def _is_leased(self, slot: int) -> bool:
        width, leases = self._ledger.layout.lease_row_bytes // 4, self._ledger.segment.leases
        return any(leases[row * width + slot] for row in self.clients)

    def _evict(self, wanted: int) -> None:
        """Evict chunks without a lease, until `wanted` slots are free or no victim is left."""
        victims, leased = self.evictor.victims(wanted)
        looked = victims[-1:] or leased[:1]
        self.short = float(self.used[looked[0].slot]) if looked else math.inf
        for chunk in leased:
            self.used[chunk.slot] = self._tick()
        self._drop(victims)

    def _drop(self, chunks: Iterable[NodeChunk]) -> None:
        """Evict chunks that the policy has removed. A leased chunk's slot becomes free when the lease ends."""
        for chunk in self._ledger.beating(chunks):
            del self._index[chunk.found_by], self._chunks[chunk.slot]
            self._move(chunk.slot, m.EVICT, 1)
            self._draining.add(chunk.slot)
            self.counts["evicted"] += 1
        self.drain()

    def drain(self) -> None:
        """Free evicted slots that no client leases any more."""
        if not self._draining:
            return
        self._fence()  # makes all leases visible that were taken before the generation was raised
        for slot in [slot for slot in self._ledger.beating(self._draining) if not self._is_leased(slot)]:
            self._draining.remove(slot)
            self._move(slot, m.DRAINED, 0)
            self._free.append(slot)

    @property
    def is_draining(self) -> bool:
        """Whether an evicted slot still has a lease."""
        return bool(self._draining)

    def _evict_chunks(self, chunks: list[NodeChunk]) -> None:
        self.evictor.forget(chunks)
        self._drop(chunks)

    # ---- clients -------------------------------------------------------------------------------------------------

    def greet(self, hello: Hello, process: Process) -> NodeClient:
        """Accept a process of a client. The client may be new, or may reconnect.

        Raises:
            RefusedError: the process has another memory, or there is no room for a client.
        """
        if hello.segment and hello.segment != self._ledger.layout.token:
            raise RefusedError("the node has another memory than the one this engine uses")
        client = next((one for one in self.clients.values() if one.token == hello.client), None)
        if client is None:
            client = self._new_client(hello)
        if process not in client.processes and len(client.processes) >= PROCESSES_MAX:
            raise RefusedError(f"a client has at most {PROCESSES_MAX} processes")
        client.name = hello.name[:NAME_CHARS_MAX] or client.name
        try:
            client.fire(c.ATTACH if hello.role == "scheduler" else c.JOIN)
        except IllegalTransition as error:
            raise RefusedError(error.why) from None
        client.processes.add(process)
        if hello.role == "helper":
            client.helpers.add(process)
        self._write_row(client)
        if hello.role == "scheduler":
            client.begun = b""  # the rest of a use that an earlier connection has begun was lost
            held = set(hello.held)
            for grant in [one for one in client.granted.items() if one not in held]:
                self._take_back(client, grant[0], m.GIVE_BACK)  # granted in an answer that was never received
        return client

    def _new_client(self, hello: Hello) -> NodeClient:
        row = next((row for row in range(self._ledger.layout.rows) if row not in self.clients), None)
        if row is None:
            raise RefusedError(
                f"{self._ledger.layout.rows} engines use the node's memory already, its most; stop one", again=True
            )
        record = ClientRow(0, hello.client, self._namespace(hello.namespace), ())
        client = self.clients[row] = NodeClient(self._client_machine, row, record, self._watch)
        return client

    def _namespace(self, digest: bytes) -> int:
        """Return the number of a namespace, which may be new.

        A new namespace gets a number that no client and no chunk uses. If all numbers are used, the least recently used
        namespace without a client loses its chunks. Such a namespace exists, because there are fewer clients than
        numbers.
        """
        names = self._namespaces
        number = names.numbers.get(digest)
        if number is None:
            clients = {one.namespace for one in self.clients.values()}
            number = names.unused({namespace for namespace, _, _ in self._index} | clients)
            if number is None:
                number = names.oldest(clients)
                self._evict_chunks([chunk for chunk in self._chunks.values() if chunk.found_by[0] == number])
            names.give(digest, number)
        names.use(number)
        return number

    def _write_row(self, client: NodeClient) -> None:
        processes, helpers = tuple(sorted(client.processes)), tuple(sorted(client.helpers))
        self._ledger.set_row(client.row, ClientRow(0, client.token, client.namespace, processes, helpers))

    def _take_back(self, client: NodeClient, slot: int, event: str) -> None:
        """Take a slot back. The slot's generation changes, so that a report of the old grant is detected."""
        del client.granted[slot]
        self._move(slot, event, 2)
        self._free.append(slot)

    def batch(self, client: NodeClient, batch: SlotBatch) -> BatchAnswer:
        """Carry out the batch of one step."""
        client.fire(c.BATCH)
        if client.state.name != c.ATTACHED:
            return BatchAnswer(batch.boot, late=tuple(one.slot for one in batch.published))
        if batch.namespace:
            self._rename(client, batch.namespace)
        late = tuple(one.slot for one in batch.published if self._publish(client, one))
        named = [(self._chunks.get(slot), generation) for slot, generation in batch.evicted]
        self._evict_chunks([one for one, number in named if one and self._records[one.slot].generation == number])
        for slot, generation in batch.returned:
            if client.granted.get(slot) == generation:
                self._take_back(client, slot, m.GIVE_BACK)
            else:
                self.counts["stale"] += 1
        for use in batch.used:
            self._use_now(self.evictor.used(client, use, self._chunks, self._ledger.segment.generations))
        granted = self._grant(client, batch.want, batch.stock)
        client.stock = batch.stock + len(late) + len(granted)
        return BatchAnswer(batch.boot, granted, late, client.namespace)

    def _rename(self, client: NodeClient, digest: bytes) -> None:
        """Move a client to another namespace, because its weights have changed, or because its cache was reset."""
        if (number := self._namespace(digest)) != client.namespace:
            self._namespaces.use(client.namespace)
            client.namespace = number
            self._write_row(client)

    def _publish(self, client: NodeClient, one: Publish) -> bool:
        """Publish a chunk. Returns whether another slot already has the chunk's key."""
        namespace = self._namespace(one.namespace) if one.namespace else client.namespace
        found_by = (namespace, one.group, one.key)
        if client.granted.get(one.slot) != one.generation or len(one.key) > KEY_BYTES_MAX:
            self.counts["stale"] += 1  # an earlier holder has published the chunk, which may be evicted by now
            return False
        if (known := self._index.get(found_by)) is not None:
            self._slots[one.slot].fire(m.LATE)
            self.evictor.same(known)
            self.used[known.slot] = self._tick()
            self.counts["late"] += 1
            return True
        del client.granted[one.slot]
        made = self._move(
            one.slot, m.PUBLISH, 1,
            SlotRecord(
                0, one.slot, m.PUBLISHED, 0, client.row, namespace, one.group, one.units, one.key,
                one.behind[:LINK_BYTES],
            ),
        )  # fmt: skip
        self.evictor.published(self._remember(made), over=one.over)
        self.counts["published"] += 1
        client.published += 1
        return False

    def _grant(self, client: NodeClient, want: int, stock: int) -> tuple[SlotGrant, ...]:
        """Grant slots to a client that has `stock` unused slots."""
        share = min(self._stock_max, max(1, len(self._usable) // (STOCK_SHARE * len(self.clients)))) - stock
        want = min(want, BATCH_MAX, share, max(1, len(self._usable) // GRANTED_SHARE) - len(client.granted))
        if want > len(self._free):
            self._evict(want - len(self._free))
        grants = []
        for _ in range(min(want, len(self._free))):
            slot = self._free.pop()
            made = self._move(slot, m.GRANT, 0, SlotRecord(0, slot, m.GRANTED, 0, client.row))
            client.granted[slot] = made.generation
            grants.append((slot, made.generation))
        return tuple(grants)

    def hung_up(self, client: NodeClient) -> None:
        """Note that the scheduler's connection has ended. The client keeps its slots: the process may still run."""
        client.fire(c.HANGUP)

    def died(self, client: NodeClient, process: Process) -> None:
        """Note that the pidfd of a process has fired.

        When an engine's last process has exited, the engine's slots are freed. The exit of a helper does not end the
        engine.
        """
        if process in client.helpers and client.processes - client.dead > {process}:
            client.helpers.remove(process)
            client.processes.remove(process)
            self._write_row(client)
        elif process in client.processes - client.dead:
            client.dead.add(process)
            self._lost(client, c.DIED, c.LAST_DIED)

    def left(self, client: NodeClient, process: Process) -> None:
        """Note that a process will not access the memory again."""
        if process in client.processes - client.dead:
            client.processes.remove(process)
            if client.processes:
                self._write_row(client)  # so that a later holder does not wait for this process
            self._lost(client, c.LEAVE, c.LAST_LEFT)

    def _lost(self, client: NodeClient, event: str, last: str) -> None:
        is_last = client.processes <= client.dead
        client.fire(last if is_last else event)
        for slot in [slot for slot in client.granted if self._slots[slot].state.name == m.GRANTED]:
            client.granted[slot] = self._move(slot, m.OWNER_LOST, 2).generation
        if not is_last:
            return
        for slot in list(client.granted):
            self._take_back(client, slot, m.OWNER_GONE)
        leases = self._ledger.segment.leases_of(client.row)
        leases[:] = memoryview(bytes(leases.nbytes)).cast("I")
        self._ledger.set_row(client.row, FREE_ROW)  # last, so that after a crash the next holder repeats these steps
        del self.clients[client.row]
        self._namespaces.use(client.namespace)
        self.drain()

    def usage(self) -> NodeUsage:
        """Return how many slots are in each state."""
        return usage_of(self._ledger.segment)
