"""The messages between an engine and the holder, over a Unix socket that preserves message boundaries.

An engine waits only for the answer to its greeting. An engine sends a batch only after the previous batch was answered.
So neither side fills the other side's buffer, and neither side waits in `send`.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

MESSAGE_BYTES_MAX: Final = 128 << 10
BATCH_MAX: Final = 512
"""The largest number of chunks or slots in one batch, so that a batch is smaller than `MESSAGE_BYTES_MAX`."""
USES_BYTES_MAX: Final = 32 << 10
"""The largest size of all stamps of the uses in one batch."""

SlotGrant = tuple[int, int]
"""(slot, generation) of a granted slot. Each grant of a slot has another generation, which identifies the grant."""


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of a process.

    `version` is `layout.VERSION`. `client` is the engine's token of 16 bytes. `namespace` is a digest of everything
    except tokens that a chunk's bytes depend on. `segment` is the token of the memory that the process already has, or
    b"" if the process has no memory. The memory's descriptor is sent with the message. `held` has the scheduler's
    grants. `slots` and `slot_bytes` are the requested size. `name` is the engine's name for operators. `policy` is the
    eviction policy that the engine requires, or "" if it accepts any policy. A "helper" is a process that a rank has
    started, and that writes into slots for the rank.
    """

    version: int
    role: Literal["scheduler", "rank", "helper"]
    client: bytes
    namespace: bytes
    slots: int
    slot_bytes: int
    segment: bytes = b""
    held: tuple[SlotGrant, ...] = ()
    name: str = ""
    policy: str = ""


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process is accepted. The memory's descriptor is sent with the message.

    `row` is the client's row of lease counters. `held` has the grants that the holder knows. `region` is the region of
    the memory that has slots of the requested size. `policy` is the memory's eviction policy. `takes_hints` says
    whether this policy takes hints.
    """

    boot: int
    row: int
    namespace: int
    held: tuple[SlotGrant, ...] = ()
    region: int = 0
    policy: str = ""
    takes_hints: bool = False


class Unwelcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process is refused. `again` says that a later try may succeed."""

    why: str
    again: bool = False


class Publish(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that has landed on all ranks.

    `namespace` is the digest of the chunk's namespace. If `namespace` is b"", the chunk is in the client's namespace.
    `behind` is `link_of` the key of the previous chunk of the prefix, or b"" if there is none. `over` says that the
    chunk has landed after the end of its request.
    """

    slot: int
    generation: int
    group: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    key: bytes
    units: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    namespace: bytes = b""
    behind: bytes = b""
    over: bool = False


UseKind = Literal["leased", "loaded", "ended", "touched", "retain", "demote", "resume"]


class Use(msgspec.Struct, frozen=True, array_like=True):
    """One use of some chunks of a prefix, for the eviction policy. The last chunk of the prefix is first.

    `kind` says that a request leases the chunks, has loaded them, or has ended, or that the chunks were used otherwise.
    All other kinds are actions of hints. `stamps` has the joined stamps of the chunks. `answer` is the number of tokens
    that the ended request has decoded, or None. `in_s` is the time of a hint, in seconds from now. If `more`, the next
    use of this client has further chunks of the same use.
    """

    kind: UseKind
    stamps: bytes
    answer: int | None = None
    in_s: float = 0.0
    more: bool = False


class SlotBatch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step's batch: chunks to publish, returned grants, chunks that were read, and the number of wanted grants.

    The holder reads `used` after `published`. `stock` is the number of granted slots that no save uses. `namespace` is
    the digest of the client's new namespace, or b"" if the namespace does not change. `evicted` has the published
    chunks that an operator evicts, as (slot, generation) pairs.
    """

    boot: int
    published: tuple[Publish, ...] = ()
    returned: tuple[SlotGrant, ...] = ()
    used: tuple[Use, ...] = ()
    want: int = 0
    namespace: bytes = b""
    stock: int = 0
    evicted: tuple[SlotGrant, ...] = ()


class BatchAnswer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to one batch.

    `late` has the slots that were not published, because another slot has the same key, or because the engine ends. The
    engine keeps the slots in `late`. All other reported slots are published. `namespace` is the number of the engine's
    namespace, or -1 if the engine ends.
    """

    boot: int
    granted: tuple[SlotGrant, ...] = ()
    late: tuple[int, ...] = ()
    namespace: int = -1


class Goodbye(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process will not access the memory again."""

    boot: int


class StatusQuestion(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An operator's question, which needs no greeting."""

    version: int


class ClientStatus(msgspec.Struct, frozen=True, array_like=True):
    """One engine that uses the memory.

    `granted`, `leased` and `stock` are numbers of slots. `stock` counts the granted slots that no save used when the
    engine sent its last batch. `published` is the number of chunks that this holder has published for the engine.
    """

    row: int
    state: str
    pids: tuple[int, ...]
    granted: int
    leased: int
    name: str = ""
    stock: int = 0
    published: int = 0


class MemoryStatus(msgspec.Struct, frozen=True, array_like=True):
    """How the slots of one size are used.

    `slots` has the number of slots by use, and their sum as `slots`. `counts` has the number of events since this
    holder began. `policy` is the eviction policy.
    """

    slot_bytes: int
    slots: dict[str, int]
    counts: dict[str, int]
    clients: tuple[ClientStatus, ...]
    policy: str = ""


class NodeStatus(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to an operator: the holder's process, and its memory by slot size.

    A holder has no memory before the first engine greets it.
    """

    pid: int
    memories: tuple[MemoryStatus, ...] = ()


ToHolder = Hello | SlotBatch | Goodbye | StatusQuestion
ToEngine = Welcome | Unwelcome | BatchAnswer | NodeStatus
_encoder = msgspec.msgpack.Encoder()
_to_holder, _to_engine = msgspec.msgpack.Decoder(ToHolder), msgspec.msgpack.Decoder(ToEngine)


class BadMessageError(ValueError):
    """A message is too long, or is not a message of this protocol."""


def pack(message: ToHolder | ToEngine) -> bytes:
    """Return a message's bytes, for a process that does not import this module."""
    return _encoder.encode(message)


def send(wire: socket.socket, message: ToHolder | ToEngine, fds: Sequence[int] = ()) -> None:
    """Send a message without waiting.

    Raises:
        BlockingIOError: the other side has not read earlier messages.
        OSError: the connection has ended.

    """
    raw = pack(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    wire.sendmsg([raw], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _receive(wire: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(fds.itemsize)
    try:
        raw, rights, flags, _ = wire.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the other side has closed the socket early; its messages can still be read
        raw, rights, flags, _ = wire.recvmsg(MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not raw:
        _close(fds)
        raise ConnectionResetError
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        _close(fds)
        raise BadMessageError(f"the message has more than {MESSAGE_BYTES_MAX} bytes, or more than one descriptor")
    return raw, list(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def receive_by_holder(wire: socket.socket) -> tuple[ToHolder, int | None]:
    """Return the next message of an engine, and the descriptor that was sent with it.

    Raises:
        BlockingIOError: no message has arrived, and the socket does not wait.
        OSError: the connection has ended.
        BadMessageError: the message is not a message of this protocol.
    """
    raw, fds = _receive(wire)
    try:
        return _to_holder.decode(raw), fds[0] if fds else None
    except msgspec.DecodeError as error:
        _close(fds)
        raise BadMessageError(str(error)) from None


def receive_by_engine(wire: socket.socket) -> tuple[ToEngine, int | None]:
    """Return the next message of the holder, and the descriptor sent with it. Raises as `receive_by_holder`."""
    raw, fds = _receive(wire)
    try:
        return _to_engine.decode(raw), fds[0] if fds else None
    except msgspec.DecodeError as error:
        _close(fds)
        raise BadMessageError(str(error)) from None
