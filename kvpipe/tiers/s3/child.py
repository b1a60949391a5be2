"""The process that runs the object store's client for `tier.py`. Started by its path: it imports nothing of kvpipe.

The client reads the answers of errors and listings whole, however long. So it has a process of its own, whose memory is
limited: a store that sends too much ends this process, and the engine starts another.

Arguments: the descriptors of the shared memory, of the control socket, and of one socket per lane. The parent sends the
settings over the control socket and receives how the start went. Then it asks on the lanes, one question at a time on
each: ``[operation, argument …]``, answered by ``[why not, answer]``. A lane's value lies in its stretch of the shared
memory. The process ends when the control socket does, or its parent.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

MESSAGE_BYTES_MAX: Final = 1 << 20
CANCEL: Final = b"cancel"
FULL: Final = "full"
HEADS_PER_LANE: Final = 16
"""Questions under way at once, for each lane: they carry no values."""
RETRIES: Final = 2
PIECE_BYTES: Final = 1 << 20
"""Bytes of a body that are buffered while it is read, before they are in the lane's memory."""
DATA_BYTES: Final = 64 << 20
LANE_DATA_BYTES: Final = 24 << 20
"""What the process may take beyond its code, and for each lane: pieces of bodies, connections, stacks of threads."""
PAGE, ENTRIES_MAX = 1000, 500
NAME_CHARS_MAX: Final = 190
"""A longer name is not a key's, and is not reported: an answer must fit into one message of a local socket."""
POLL_S: Final = 0.001
PARENT_S: Final = 1.0
ABSENT: Final = "kvpipe-health"
"""Name of the object that a health check asks for; no key has it."""

_MISSING, _EXISTS, _OUTSIDE, _UNKNOWN, _FULL, _DENIED = 404, 412, 416, 501, 507, (401, 403)
_FULL_CODE = re.compile(r"Quota|StorageFull|InsufficientStorage|NoSpace")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_STATUS = re.compile(r"status(?: code)?: ([0-9]{3})")
_STATUSES: Final = {"FileNotFoundError": _MISSING, "AlreadyExistsError": _EXISTS}
_REASONS: Final = {
    "169.254.169.254": "there are no credentials; set access_key_env and secret_key_env, or give the machine a role",
    "Connection refused": "connection refused; see that the store runs, and endpoint",
    "dns error": "no such host; see endpoint, or bucket and region",
    "InvalidCertificate": "its certificate is not trusted; see the system's certificates, and endpoint",
    "TimedOut": "no answer within timeout_ms_max",
    "kind: Timeout": "no answer within timeout_ms_max",
    "scheme is not allowed": "http is not allowed; write https, or set allow_http",
}
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_CLOUD: Final = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "amazonaws.com", "amazonaws.com.cn", "api.aws")
"""Hosts of the cloud's store and of its usual sources of credentials, beside those that `AWS_` variables name."""
_T = TypeVar("_T")


class StoreError(Exception):
    """The store cannot be used, or has answered something else than was asked: `status` is HTTP's; 0: not known."""

    def __init__(self, message: str, status: int = 0, *, full: bool = False) -> None:
        """`message` shows no secret. `full`: there is no room."""
        super().__init__(message)
        self.status, self.full = status, full


class _Range(NamedTuple):
    """How the read of a range of a value ended; `version` is the store's name for what it read."""

    read: str
    version: str | None = None


class Client:
    """Objects in a bucket. Safe for many clients: an object is whole when it appears, and is not replaced.

    A method that was cancelled has let go of the memory that it was given.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        """Do not connect yet. `given`: see `S3Tier`. Raises StoreError."""
        import obstore.exceptions  # noqa: PLC0415  (what hinders it can be reported)
        import obstore.store  # noqa: PLC0415

        self.api: Any = obstore
        self._given, self._name = given, given["name"]
        self._timeout_s, self._step = given["timeout_s"], given["read_bytes"]
        self._conditional = True  # the store supports "do not replace an object"
        self._reads, self._writes = asyncio.Semaphore(given["lanes"]), asyncio.Semaphore(given["lanes"])
        self._heads = asyncio.Semaphore(given["lanes"] * HEADS_PER_LANE)
        self._nobody = socket.socket()  # bound, so that nobody else listens there
        self._nobody.bind(("127.0.0.1", 0))
        self.asks = self._store(read_timeout=timedelta(seconds=self._timeout_s))  # with a limit on silence
        self.puts = self._store()  # without: a store is silent while it is sent a body
        self._pages: AsyncIterator[Any] = self.api.list(self.asks)

    def _store(self, **client: object) -> Any:  # noqa: ANN401  (it has no types)
        given, wait = self._given, timedelta(seconds=self._timeout_s)
        client |= {"allow_http": given["allow_http"], "connect_timeout": wait, "timeout": timedelta(days=1)}
        backoff = {"init_backoff": wait / 40, "max_backoff": wait / 4, "base": 2}
        retry = {"max_retries": RETRIES, "retry_timeout": wait, "backoff": backoff}
        options: dict[str, object] = dict(given["keys"])
        options |= {key: given[key] for key in ("endpoint", "region") if given[key]}
        if given["url"].startswith("s3:"):
            options["unsigned_payload"] = True  # a value has its own checksum; this one would take as long as the PUT
            client |= self._elsewhere()
        try:
            return self.api.store.from_url(given["url"], client_options=client, retry_config=retry, **options)
        except (self.api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failure("set up", error) from None

    def _elsewhere(self) -> dict[str, object]:
        """Return options by which requests to hosts that are not the store's fail.

        The client follows redirects, with the value that it stores, and has no option against that. So all other hosts
        are behind a proxy that refuses every connection. Where the environment names a proxy, that one decides.
        """
        if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
            return {}
        where = [self._given["endpoint"], *(value for name, value in os.environ.items() if name.startswith("AWS_"))]
        hosts = {str(urlsplit(one).hostname or "") for one in where if "://" in one} - {""}
        if not (self._given["endpoint"] and self._given["keys"]):
            hosts |= set(_CLOUD)
        return {"proxy_url": f"http://127.0.0.1:{self._nobody.getsockname()[1]}", "proxy_excludes": ",".join(hosts)}

    async def health(self) -> None:
        """Return if the store answers."""
        await self._try({_MISSING}, "GET", lambda: self.api.get_async(self.asks, ABSENT))

    # ---- values ---------------------------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which are there: a question each. A listing would have to name everybody's values."""
        return await _all(self._heads, [partial(self._there, name) for name in names])

    async def _there(self, name: str) -> bool:
        answer = await self._try({_MISSING}, "HEAD", lambda: self.api.head_async(self.asks, name))
        return not isinstance(answer, StoreError)

    async def read(self, name: str, into: memoryview) -> str:
        """Fill `into` with a value of its length, in ranges side by side; return hit, miss or damaged."""
        ranges = [partial(self._range, name, into, at) for at in range(0, len(into), self._step)]
        ends = await _all(self._reads, ranges)
        reads = {end.read for end in ends}
        if "miss" in reads:
            return "miss"
        return "hit" if reads == {"hit"} and len({end.version for end in ends}) == 1 else "damaged"

    async def _range(self, name: str, into: memoryview, start: int) -> _Range:
        stop = min(start + self._step, len(into))
        wanted = {"range": (start, stop)}
        answer = await self._try(
            {_MISSING, _OUTSIDE}, "GET", lambda: self.api.get_async(self.asks, name, options=wanted)
        )
        if isinstance(answer, StoreError):
            return _Range("miss" if answer.status == _MISSING else "damaged")
        if answer.meta["size"] != len(into) or answer.range != (start, stop):
            return _Range("damaged")
        pieces = answer.stream(min_chunk_size=min(stop - start, PIECE_BYTES))
        async with self._limited("GET", stop - start):
            while (data := await anext(pieces, None)) is not None:
                if len(data) > stop - start:  # longer than the store announced: no more of it is read
                    return _Range("damaged")
                into[start : start + len(data)] = memoryview(data)
                start += len(data)
        return _Range("hit", answer.meta["e_tag"]) if start == stop else _Range("damaged")

    async def write(self, name: str, value: memoryview) -> bool:
        """Keep `value`; return whether it was not there already."""
        async with self._writes:
            return await self._put(name, value)

    async def _put(self, name: str, value: memoryview) -> bool:
        if await self._there(name):  # its body need not be sent
            return False
        # In one request: the answer to a multipart upload does not report an object that was there before, and a
        # client that dies between the parts leaves behind what is paid for and not listed.
        options = {"use_multipart": False, "mode": "create" if self._conditional else "overwrite"}
        view = memoryview(value)
        send = partial(self.api.put_async, self.puts, name, [view], **options)
        try:
            answer = await self._try({_EXISTS, _UNKNOWN}, "PUT", send, len(value))
        finally:
            while not _released(view):  # the client sends from it, and does not report the end
                self.api.Bytes()  # any call lets it drop what its threads could not drop without the lock
                await asyncio.sleep(POLL_S)
        if not isinstance(answer, StoreError):
            return True
        if answer.status == _EXISTS:
            return False
        if not self._conditional:
            raise answer
        self._conditional = False
        return await self._put(name, value)

    async def delete(self, names: Sequence[str]) -> int:
        """Drop values; return how many were there."""
        there = [name for name, found in zip(names, await self.exists(names), strict=True) if found]
        if there:
            remove = partial(self.api.delete_async, self.asks, there)
            await self._try({_MISSING}, "DELETE", remove)  # of some stores, where another has deleted it meanwhile
        return len(there)

    async def begin_scan(self) -> None:
        """List from the beginning."""
        self._pages = self._listing()

    async def scan(self) -> list[tuple[str, int, float]] | None:
        """Return the next names, with bytes and seconds since they were written; None: the listing has ended."""
        return await anext(self._pages, None)

    async def _listing(self) -> AsyncIterator[list[tuple[str, int, float]]]:
        pages = self.api.list(self.asks, chunk_size=PAGE)
        while page := await self._ask("LIST", lambda: anext(pages, None)):
            now, entries = datetime.now(UTC), iter(page)
            while some := [*islice(entries, ENTRIES_MAX)]:
                yield [
                    (one["path"], one["size"], (now - one["last_modified"]).total_seconds())
                    for one in some
                    if len(one["path"]) <= NAME_CHARS_MAX and one["path"].isascii()
                ]

    # ---- requests -------------------------------------------------------------------------------------------------

    async def _try(
        self, allowed: set[int], what: str, request: Callable[[], Awaitable[_T]], size: int = 0
    ) -> _T | StoreError:
        """Make a request as `_ask`, but return a refusal whose status is `allowed`."""
        try:
            return await self._ask(what, request, size)
        except StoreError as refusal:
            if refusal.status not in allowed:
                raise
            return refusal

    async def _ask(self, what: str, request: Callable[[], Awaitable[_T]], size: int = 0) -> _T:
        """Make a request that moves `size` bytes, and return what it gives. Raises StoreError."""
        async with self._limited(what, size):
            return await request()

    @asynccontextmanager
    async def _limited(self, what: str, size: int) -> AsyncIterator[None]:
        """Let too long a wait for `size` bytes end what is inside. Raises StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s * (1 + size / self._given["slow_bytes"])):
                yield
        except TimeoutError:
            raise StoreError(f"{self._name}: {what}: {_REASONS['TimedOut']}") from None
        except (self.api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> StoreError:
        """Return what to raise for the client's `error`, whose text may show a signed URL: only known words of it."""
        text = str(error)
        for known, why in _REASONS.items():
            if known in text:
                return StoreError(f"{self._name}: {what}: {why}")
        message, code = _STATUS.search(text), _CODE.search(text)
        status = _STATUSES.get(type(error).__name__) or (int(message[1]) if message else 0)
        name = code[1] if code else type(error).__name__
        where = f"{self._name}: {what}: {name} ({status})"
        if name in _NO_BUCKET:
            return StoreError(f"{where}: there is no such bucket; make it, or correct url")
        if status == _FULL or _FULL_CODE.search(name):
            return StoreError(f"{where}: the store has no room; see its quota", full=True)
        if status in _DENIED:
            return StoreError(f"{where}: see that the keys are right and may get, put, delete, list", status)
        return StoreError(where, status)


async def _all(limiter: asyncio.Semaphore, calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Return what `calls` return, in their order, as many at once as `limiter` lets; a StoreError ends them all."""

    async def one(call: Callable[[], Awaitable[_T]]) -> _T:
        async with limiter:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
    except* StoreError as errors:
        failed = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise failed


def _released(view: memoryview) -> bool:
    """Release `view`; return False while the client still uses it."""
    try:
        view.release()
    except BufferError:
        return False
    return True


# ---- the process ----------------------------------------------------------------------------------------------------


class ParentChannel:
    """A socket to the parent, and a stretch of the memory shared with it, as large as a value of it ever was."""

    def __init__(self, wire: socket.socket, memory_fd: int, begin: int) -> None:
        wire.setblocking(False)  # noqa: FBT003
        self._wire, self._memory_fd, self._begin, self._memory = wire, memory_fd, begin, memoryview(b"")

    async def serve(self, client: Client) -> None:
        """Answer questions until the parent closes the lane; `CANCEL` calls the one under way off."""
        loop, task = asyncio.get_running_loop(), None
        while message := await loop.sock_recv(self._wire, MESSAGE_BYTES_MAX):
            if message != CANCEL:
                task = asyncio.ensure_future(self._answer(client, *msgspec.msgpack.decode(message)))
                task.add_done_callback(partial(_reply, self._wire))
            elif task is not None:
                task.cancel()

    async def _answer(self, client: Client, operation: str, *arguments: Any) -> Any:  # noqa: ANN401
        if operation in {"read", "write"}:
            name, size = arguments
            if size > len(self._memory):
                self._memory = memoryview(mmap.mmap(self._memory_fd, size, offset=self._begin))
            arguments = (name, self._memory[:size])
        return await getattr(client, operation)(*arguments)


def _reply(wire: socket.socket, task: asyncio.Task[Any]) -> None:
    """Send what the question of a lane has come to: nobody else sends on it, and the last answer was received."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        reply: list[Any] = ["it was called off", None]
    elif isinstance(error, StoreError):
        reply = [str(error), FULL if error.full else None]
    elif error is not None:
        reply = [f"the client has failed ({type(error).__name__})", None]
    else:
        reply = ["", task.result()]
    for one in (reply, ["the client's answer cannot be sent", None]):
        try:
            wire.send(msgspec.msgpack.encode(one))
        except (OSError, MemoryError):
            continue
        return
    os._exit(1)


def _ended(serving: asyncio.Task[None]) -> None:
    """End the process with a lane that nobody serves any more: the parent would wait on it, and starts another."""
    if serving.cancelled() or serving.exception() is not None:
        os._exit(1)


def limit_memory(lanes: int) -> None:
    """Let what is taken from now on be bounded by the system: an allocation beyond it fails, and ends the process."""
    data_pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    bytes_max = data_pages * mmap.PAGESIZE + DATA_BYTES + lanes * LANE_DATA_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_max, bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def main(memory_fd: int, control_fd: int, *lane_fds: int) -> None:
    """Start, serve, and end with the parent."""
    parent, loop = os.getppid(), asyncio.get_running_loop()
    control, *wires = (socket.socket(fileno=fd) for fd in (control_fd, *lane_fds))
    try:
        given = msgspec.msgpack.decode(control.recv(MESSAGE_BYTES_MAX))
        limit_memory(given["lanes"])
        client = Client(given)
    except (StoreError, ImportError, OSError, ValueError) as error:
        control.send(str(error).encode())
        os._exit(1)
    share = os.fstat(memory_fd).st_size // len(wires)
    lanes = [ParentChannel(wire, memory_fd, at * share) for at, wire in enumerate(wires)]
    serving = [asyncio.ensure_future(lane.serve(client)) for lane in lanes]
    for task in serving:
        task.add_done_callback(_ended)
    control.send(b"ready")
    loop.add_reader(control, os._exit, 0)  # the library's own end, and that of its threads, is not waited for
    while serving and os.getppid() == parent:  # noqa: ASYNC110  (a fork of the parent may keep the socket open)
        await asyncio.sleep(PARENT_S)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
