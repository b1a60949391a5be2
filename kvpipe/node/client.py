"""An engine's side of a node's memory.

The scheduler's thread makes all calls, and no call waits: calls read shared memory, or a non-blocking socket. While the
engine has no holder, another thread searches for a holder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from kvpipe.errors import ConfigError
from kvpipe.node import fence, messages
from kvpipe.node.connect import KEEP_S, NoHolderError, Reached, RefusedByHolderError, reach
from kvpipe.node.layout import BEAT, OWNED, TOKEN_BYTES, VERSION, NodeLayout
from kvpipe.node.messages import BadMessageError, BatchAnswer, Goodbye, Hello
from kvpipe.node.processes import SOCKET, mark_client
from kvpipe.node.replica import NodeLeases
from kvpipe.node.segment import Segment
from kvpipe.node.stock import Stock
from kvpipe.node.usage import engines_of
from kvpipe.statemachine import node_link as m
from kvpipe.statemachine.core import Cursor, Watch

LOOK_S: Final = 0.3
"""The interval in seconds at which the engine checks the holder's clock and the connection.

The holder advances its clock more often.
"""
RETRY_S: Final = 0.2


@dataclass(frozen=True)
class NodePoolOptions:
    """The options of an engine.

    `slots` and `slot_bytes` are the size of the memory if this engine creates the memory. `namespace` is a digest of 32
    bytes. `stock` is the number of slots that are granted before saves need them. A holder whose clock stands still for
    `silent_s` seconds is killed. After `wait_s_max` seconds without a holder, the engine has to use a private pool.
    `name` is the engine's name for operators. `note_bytes` is the size of the note at the end of each slot (see
    `notes.py`). `policy` is the eviction policy that the engine requires, or "" if it accepts any policy.
    """

    folder: Path
    namespace: bytes
    slots: int
    slot_bytes: int
    stock: int = 32
    silent_s: float = 2.0
    wait_s_max: float = 20.0
    keep_s: float = KEEP_S
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    name: str = ""
    note_bytes: int = 0
    policy: str = ""


class NodePool:
    """One engine's view of a node's memory. `segment` and `leases` are None before the engine attaches."""

    def __init__(self, options: NodePoolOptions, watch: Watch | None = None) -> None:
        """Start to look for a holder in the background.

        Raises:
            ConfigError: the system has no `membarrier`.
        """
        fence.register_process()
        self._options = options
        self.link = Cursor(m.NODE_LINK.compile(), "pool", watch)
        self.stock = Stock(options.stock, watch)
        self.note_bytes = options.note_bytes
        self.segment: Segment | None = None
        self.leases: NodeLeases | None = None
        self.named = -1
        """The number of the namespace that `rename` has requested, or -1 until the holder has answered."""
        self._digest, self._naming = b"", b""
        self.why = ""
        """The reason why the engine was refused or stranded."""
        self.policy, self.takes_hints = "", False
        """The memory's eviction policy, and whether this policy takes hints."""
        self._reached: Reached | None = None
        self._news: SimpleQueue[Reached | NoHolderError | str] = SimpleQueue()
        self._closing = threading.Event()
        self._mark: int | None = None
        self._asks = False
        self._beat, self._beats_missed, self._looked_s = 0, 0, 0.0
        self._boot = self.takeovers = 0
        """The number of holders that have taken over the memory since this engine attached."""
        self._thread = self._look()

    @property
    def layout(self) -> NodeLayout:
        """The sizes of the memory. Only an attached engine may read this property."""
        assert self.segment is not None  # noqa: S101
        return self.segment.layout

    @property
    def answers(self) -> bool:
        """Whether the memory has a holder at present."""
        return self.state == m.ATTACHED

    @property
    def slots_usable(self) -> int:
        """The number of slots that the engines with this slot size may use now."""
        return 0 if self.segment is None else int(self.segment.words[OWNED])

    @property
    def slots_free(self) -> int:
        """The number of slots that were granted to this engine and that no chunk uses."""
        return self.stock.free

    @property
    def engines(self) -> int:
        """The number of engines with this slot size."""
        return 0 if self.segment is None else engines_of(self.segment)

    @property
    def state(self) -> str:
        """The state of the connection."""
        return self.link.state.name

    @property
    def silent_s(self) -> float:
        """The seconds since a check has found the holder alive, or 0 if the last check has found the holder alive."""
        missed_s = self._beats_missed * LOOK_S
        return missed_s if self.state == m.ATTACHED else missed_s + time.monotonic() - self._looked_s

    # ---- the thread that looks for a holder ----------------------------------------------------------------------

    def _look(self) -> threading.Thread:
        """Start the thread that looks for a holder."""
        offer = self.segment.fd if self.segment is not None else None
        hello = Hello(
            VERSION, "scheduler", self._options.token, self._options.namespace, self._options.slots,
            self._options.slot_bytes, self.segment.layout.token if self.segment is not None else b"", self.stock.held,
            self._options.name, self._options.policy,
        )  # fmt: skip
        thread = threading.Thread(target=self._find, args=(hello, offer), name="kvpipe-node", daemon=True)
        thread.start()
        return thread

    def _find(self, hello: Hello, offer: int | None) -> None:
        options = self._options
        try:
            while not self._closing.is_set():
                try:
                    reached = reach(
                        options.folder, hello, offer=offer, beat=None if offer is None else self._beat_now,
                        wait_s=options.wait_s_max, answer_s=options.silent_s, keep_s=options.keep_s,
                    )  # fmt: skip
                except NoHolderError as error:
                    self._news.put(error)
                    if offer is None:
                        return
                else:
                    self._news.put(reached)
                    if self._closing.is_set():
                        self._close_unheard()
                    return
                self._closing.wait(RETRY_S)
        except (RefusedByHolderError, ConfigError, OSError) as error:
            self._news.put(str(error))

    def _close_unheard(self) -> None:
        """Close a connection that was made after the last poll.

        Otherwise the holder would keep the memory for this engine.
        """
        with contextlib.suppress(Empty):
            while True:
                news = self._news.get_nowait()
                if isinstance(news, Reached):
                    if self.segment is None:
                        _leave(news)
                    else:
                        news.close()

    def _beat_now(self) -> int:
        assert self.segment is not None  # noqa: S101
        return int(self.segment.words[BEAT])

    # ---- the scheduler's thread ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Receive the holder's answer and send the next batch. Called in every step. Never waits."""
        while not self._news.empty():
            self._hear(self._news.get())
        if self._asks:
            self._receive()
        if self._reached is not None:
            self._look_at_holder()
        if self._reached is not None and not self._asks:
            self._send()

    def _hear(self, news: Reached | NoHolderError | str) -> None:
        if self.state in {m.CLOSED, m.REFUSED, m.STRANDED}:
            if isinstance(news, Reached):
                news.close()
            return
        if isinstance(news, NoHolderError):
            self.why = str(news)
            self.link.fire(m.GIVE_UP, self.why)
        elif isinstance(news, str):
            self.why = news
            self.link.fire(m.REFUSE, self.why)
        else:
            self._attach(news)

    def _attach(self, reached: Reached) -> None:
        if self.segment is None:
            fd = os.dup(reached.fd)
            try:
                self.segment = Segment(fd, region=reached.welcome.region)
            except (ConfigError, ValueError) as error:
                self.why = str(error)
                self.link.fire(m.REFUSE, self.why)
                os.close(fd)
                _leave(reached)
                return
            self._mark = mark_client(self._options.folder)
            self.leases = NodeLeases(self.segment, reached.welcome.row)
        elif self.leases is not None and self.leases.row != reached.welcome.row:
            self._strand(reached)
            return
        elif reached.welcome.boot != self._boot:
            self.takeovers += 1
        self._boot = reached.welcome.boot
        self.policy, self.takes_hints = reached.welcome.policy, reached.welcome.takes_hints
        self.stock.resumed(reached.welcome.held)
        self._reached, self._asks, self._naming = reached, False, b""
        self.named = -1
        self._beat, self._beats_missed, self._looked_s = 0, 0, time.monotonic()
        self.link.fire(m.WELCOME)

    def _strand(self, reached: Reached) -> None:
        """End the use of the memory, because a holder has freed this engine's row of leases and its slots."""
        assert self.leases is not None  # noqa: S101
        self.why = f"the holder has given row {reached.welcome.row} to this engine, which has row {self.leases.row}"
        self.leases.lose()
        self.stock.resumed(())
        self.link.fire(m.REFUSE, self.why)
        reached.close()

    def _receive(self) -> None:
        """Process the answer to the last batch, if the answer has arrived."""
        assert self._reached is not None  # noqa: S101
        try:
            answer, fd = messages.receive_by_engine(self._reached.wire)
        except BlockingIOError:
            return
        except (OSError, BadMessageError) as error:
            self._lose(f"the connection has ended: {error!r}")
            return
        if fd is not None:
            os.close(fd)
        if not isinstance(answer, BatchAnswer) or answer.boot != self._reached.welcome.boot or not self._asks:
            self._lose("the holder's answer is not that to the last batch")
            return
        self.link.fire(m.ANSWER)
        self._asks = False
        self.stock.answered(answer)
        if self._naming and self._naming == self._digest:
            self.named = answer.namespace  # -1 if this engine ends

    def _look_at_holder(self) -> None:
        """Disconnect from a holder that has ended, or whose clock stood still in several checks in a row.

        Only the number of these checks counts, not the time between the checks.
        """
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        assert self.segment is not None  # noqa: S101
        self._looked_s, beat = now, int(self.segment.words[BEAT])
        self._beats_missed = self._beats_missed + 1 if beat == self._beat else 0
        self._beat = beat
        if self._beats_missed * LOOK_S >= self._options.silent_s:
            self._lose("the holder's clock stands still")
        elif not self._asks:
            self._receive()  # finds only the end of the connection, because no answer is due

    def _lose(self, why: str) -> None:
        reached = self._reached
        assert reached is not None  # noqa: S101
        self.link.fire(m.HOLDER_LOST, why)
        reached.close()
        self._reached, self._asks = None, False
        self._thread = self._look()

    def _send(self) -> None:
        assert self._reached is not None  # noqa: S101
        self._naming = self._digest if self.named < 0 else b""
        batch = self.stock.batch(self._reached.welcome.boot, self._naming)
        if batch is None:
            return
        try:
            messages.send(self._reached.wire, batch)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection has ended: {error!r}")
            return
        self._asks = True

    def rename(self, digest: bytes) -> None:
        """Use another namespace from now on. When the holder has answered, `named` has the namespace's number."""
        self._digest, self.named = digest, -1

    def leave(self) -> None:
        """Return free slots to the holder, and end the connection.

        The process may still access the memory. Therefore the holder waits for the process's exit before it takes back
        the other slots.
        """
        if self._reached is not None and (batch := self.stock.give_back()) is not None:
            with contextlib.suppress(OSError):
                messages.send(self._reached.wire, msgspec.structs.replace(batch, boot=self._reached.welcome.boot))
        self._end(goodbye=False)

    def close(self) -> None:
        """End the connection. The process never accesses the memory again."""
        self._end(goodbye=True)

    def _end(self, *, goodbye: bool) -> None:
        if not self.link.fire(m.CLOSE).moves:
            return
        self._closing.set()
        self._close_unheard()
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None
        if self._reached is not None:
            if goodbye:
                with contextlib.suppress(OSError):
                    messages.send(self._reached.wire, Goodbye(self._reached.welcome.boot))
            self._reached.close()
            self._reached, self._asks = None, False
        if self.segment is not None and not self._thread.is_alive():  # the thread may be offering the memory
            os.close(self.segment.fd)


def _leave(reached: Reached) -> None:
    """Tell the holder that this process will not access the memory, and close the connection."""
    with contextlib.suppress(OSError):
        messages.send(reached.wire, Goodbye(reached.welcome.boot))
    reached.close()


class RankMemory:
    """A rank's mapping of a node's memory. As soon as the mapping exists, the holder watches the rank's process."""

    def __init__(self, options: NodePoolOptions) -> None:
        """Connect to the holder. This call waits, so it is made before the rank serves.

        Raises:
            ConfigError: the process cannot attach to the memory.
        """
        hello = Hello(VERSION, "rank", options.token, options.namespace, options.slots, options.slot_bytes)
        self._reached = reach(
            options.folder, hello, wait_s=options.wait_s_max, answer_s=options.silent_s, keep_s=options.keep_s
        )
        try:
            self.segment = Segment(self._reached.fd, region=self._reached.welcome.region)
        except (ConfigError, ValueError) as error:
            _leave(self._reached)
            raise ConfigError(str(error)) from None
        helper = msgspec.structs.replace(hello, role="helper", segment=self.segment.layout.token)
        self.socket, self.helper = str(options.folder / SOCKET), messages.pack(helper)
        """The holder's socket, and the greeting of a helper."""

    def close(self) -> None:
        """Close the descriptors. The holder waits for the end of this process, because a stuck copy may still run."""
        self._reached.close()
