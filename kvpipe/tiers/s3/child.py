"""The program of the process that runs the object store's client for `tier.py`.

The client reads error answers and listings completely, even if they are very long. So the client has a separate process
with limited memory. If a store sends too many bytes, this process ends, and the engine starts a new process.

The program is started by its path and imports no module of kvpipe. Its arguments are the descriptors of the shared
memory, of the control socket, and of one socket per lane. The parent sends the settings over the control socket, and
receives ``ready`` or the reason for a failure. On each lane, the parent asks one question at a time. A question is
``[operation, argument …]``, and its answer is ``[error or "", answer]``. The value of a lane is in the lane's range of
the shared memory. The process ends when the control socket closes or the parent ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
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
"""The largest number of concurrent requests without values, per lane."""
RETRIES: Final = 2
PIECE_BYTES: Final = 1 << 20
"""The number of bytes of a body that are buffered before they are copied to the lane's memory."""
DATA_BYTES: Final = 64 << 20
LANE_DATA_BYTES: Final = 24 << 20
"""The limits on data memory in bytes: for the process, beyond its memory at the start, and for each lane.

Data memory has buffered bytes of bodies, connections and stacks of threads.
"""
PAGE, ENTRIES_MAX = 1000, 500
NAME_CHARS_MAX: Final = 190
"""The length of the longest name that is reported. A longer name is not the name of a key. With this limit, an answer
fits into one message of a local socket.
"""
POLL_S: Final = 0.001
PARENT_S: Final = 1.0
ABSENT: Final = "kvpipe-health"
"""The name of the object that a health check asks for. No key has this name."""

_MISSING, _EXISTS, _OUTSIDE, _UNKNOWN, _FULL, _DENIED = 404, 412, 416, 501, 507, (401, 403)
_FULL_CODE = re.compile(r"Quota|StorageFull|InsufficientStorage|NoSpace")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_STATUS = re.compile(r"status(?: code)?: ([0-9]{3})")
_STATUSES: Final = {"FileNotFoundError": _MISSING, "AlreadyExistsError": _EXISTS}
_REASONS: Final = {
    "169.254.169.254": "there are no credentials; set access_key_env and secret_key_env, or give the machine a role",
    "Connection refused": "connection refused; check that the store runs, and check endpoint",
    "dns error": "no such host; check endpoint, or bucket and region",
    "InvalidCertificate": "its certificate is not trusted; check the system's certificates, and endpoint",
    "TimedOut": "no answer within timeout_ms_max",
    "kind: Timeout": "no answer within timeout_ms_max",
    "scheme is not allowed": "http is not allowed; write https, or set allow_http",
}
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_CLOUDS: Final = {
    "s3": ("amazonaws.com", "amazonaws.com.cn", "api.aws", "169.254.169.254", "169.254.170.2", "169.254.170.23"),
    "gs": ("googleapis.com", "accounts.google.com", "metadata.google.internal", "metadata", "169.254.169.254"),
    "az": ("core.windows.net", "fabric.microsoft.com", "login.microsoftonline.com", "169.254.169.254"),
}
"""By cloud: the hosts of its store and of its usual sources of credentials. Subdomains of these hosts are included."""
_METADATA: Final = "GCE_METADATA_"
_VARIABLES: Final = {"s3": ("AWS_",), "gs": ("GOOGLE_", _METADATA), "az": ("AZURE_", "AZURITE_", "IDENTITY_")}
"""By cloud: prefixes of environment variables. The values, or the files that the values name, name further hosts."""
_URL: Final = re.compile(r"https?://[^\s\"'<>,]+")
_T = TypeVar("_T")


class StoreError(Exception):
    """The store cannot be used, or has refused a request. `status` is the HTTP status, or 0 if it is not known."""

    def __init__(self, message: str, status: int = 0, *, full: bool = False) -> None:
        """`message` must be a text without secrets. `full` says that the store has no room."""
        super().__init__(message)
        self.status, self.full = status, full


class _Range(NamedTuple):
    """The result of the read of a range of a value. `version` is the ETag of the object that was read."""

    read: str
    version: str | None = None


class Client:
    """The client of a bucket. Several clients can share a bucket, because objects appear whole and are not overwritten.

    After a method was cancelled, the client does not touch the memory that was passed to the method.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        """Make the client without connecting. `given` is the result of `S3Tier.settings`. Raises StoreError."""
        import obstore.exceptions  # noqa: PLC0415  (imported here, so that a failed import can be reported)
        import obstore.store  # noqa: PLC0415

        self.api: Any = obstore
        self._given, self._name = given, given["name"]
        self._timeout_s, self._step = given["timeout_s"], given["read_bytes"]
        self._conditional = True  # whether the store supports writes that do not replace an object
        self._reads, self._writes = asyncio.Semaphore(given["lanes"]), asyncio.Semaphore(given["lanes"])
        self._heads = asyncio.Semaphore(given["lanes"] * HEADS_PER_LANE)
        self._nobody = socket.socket()  # bound but not listening, so that connections to its port are refused
        self._nobody.bind(("127.0.0.1", 0))
        self.asks = self._store(read_timeout=timedelta(seconds=self._timeout_s))
        # a client without a read timeout, because a store sends nothing while it receives a body
        self.puts = self._store()
        self._pages: AsyncIterator[Any] = self.api.list(self.asks)

    def _store(self, **client: object) -> Any:  # noqa: ANN401  (obstore has no types)
        given, wait = self._given, timedelta(seconds=self._timeout_s)
        client |= {"allow_http": given["allow_http"], "connect_timeout": wait, "timeout": timedelta(days=1)}
        backoff = {"init_backoff": wait / 40, "max_backoff": wait / 4, "base": 2}
        retry = {"max_retries": RETRIES, "retry_timeout": wait, "backoff": backoff}
        options: dict[str, object] = dict(given["keys"])
        options |= {key: given[key] for key in ("endpoint", "region") if given[key]}
        scheme, _, place = given["url"].partition("://")
        if scheme == "s3":
            # Payloads are not signed, because values have checksums, and a signature would take as long as the PUT.
            options["unsigned_payload"] = True
        if scheme == "az":  # the client's URL must not contain the account
            options["account_name"], _, place = place.partition("/")
        client |= self._elsewhere(scheme)
        try:
            return self.api.store.from_url(f"{scheme}://{place}", client_options=client, retry_config=retry, **options)
        except (self.api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failure("set up", error) from None

    def _elsewhere(self, scheme: str) -> dict[str, object]:
        """Return options that make requests to hosts other than the store's fail.

        If a store redirects a request, the client sends the value to the new host, and has no option against this. So
        the options name a proxy for all other hosts, and this proxy refuses every connection. If the environment names
        a proxy for the store, the client uses the environment's proxy, which must refuse other hosts.
        """
        endpoint = self._given["endpoint"]
        alone = bool(endpoint and self._given["keys"])
        if _proxied(urlsplit(endpoint).hostname if alone else None):
            return {}
        hosts = _named_hosts(endpoint, *_values_of(_VARIABLES[scheme]))
        if not alone:
            hosts |= set(_CLOUDS[scheme])
        if endpoint and not alone:  # the cloud supplies only the credentials
            region = self._given["region"] or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            hosts -= {"amazonaws.com", "amazonaws.com.cn", "api.aws"}
            hosts |= {f"sts{part}.amazonaws.com{end}" for part in ("", f".{region}") for end in ("", ".cn")}
        return {"proxy_url": f"http://127.0.0.1:{self._nobody.getsockname()[1]}", "proxy_excludes": ",".join(hosts)}

    async def health(self) -> None:
        """Check that the store answers. Raises StoreError if the store does not answer."""
        await self._try({_MISSING}, "GET", lambda: self.api.get_async(self.asks, ABSENT))

    # ---- values ---------------------------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, whether the object exists. Sends one request per name."""
        return await _all(self._heads, [partial(self._there, name) for name in names])

    async def _there(self, name: str) -> bool:
        answer = await self._try({_MISSING}, "HEAD", lambda: self.api.head_async(self.asks, name))
        return not isinstance(answer, StoreError)

    async def read(self, name: str, into: memoryview) -> str:
        """Read a value as long as `into` in concurrent ranges. Returns "hit", "miss" or "damaged"."""
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
                if len(data) > stop - start:  # the body is longer than the store has announced
                    return _Range("damaged")
                into[start : start + len(data)] = memoryview(data)
                start += len(data)
        return _Range("hit", answer.meta["e_tag"]) if start == stop else _Range("damaged")

    async def write(self, name: str, value: memoryview) -> bool:
        """Store `value`. Returns False if the store already has an object of this name."""
        async with self._writes:
            return await self._put(name, value)

    async def _put(self, name: str, value: memoryview) -> bool:
        if await self._there(name):  # checked before the upload, to save it if the object exists
            return False
        # The value is sent in one request and not as a multipart upload. The answer to a multipart upload does not
        # report an object that existed before. If a client dies between two parts of such an upload, the store keeps
        # and charges the parts, but does not list them.
        options = {"use_multipart": False, "mode": "create" if self._conditional else "overwrite"}
        view = memoryview(value)
        send = partial(self.api.put_async, self.puts, name, [view], **options)
        try:
            answer = await self._try({_EXISTS, _UNKNOWN}, "PUT", send, len(value))
        finally:
            while not _released(view):  # the client still sends from the buffer, and does not report when it ends
                self.api.Bytes()  # any call makes the library drop references that its threads dropped without the GIL
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
        """Delete objects. Returns how many of the objects existed."""
        there = [name for name, found in zip(names, await self.exists(names), strict=True) if found]
        if there:
            remove = partial(self.api.delete_async, self.asks, there)
            # Some stores answer 404 if another client has deleted an object after `exists`.
            await self._try({_MISSING}, "DELETE", remove)
        return len(there)

    async def begin_scan(self) -> None:
        """Begin a new listing."""
        self._pages = self._listing()

    async def scan(self) -> list[tuple[str, int, float]] | None:
        """Return the next (name, bytes, seconds since the write) of the listing, or None if the listing has ended."""
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
        """Make a request as `_ask` does. If the status of a StoreError is in `allowed`, return the error instead."""
        try:
            return await self._ask(what, request, size)
        except StoreError as refusal:
            if refusal.status not in allowed:
                raise
            return refusal

    async def _ask(self, what: str, request: Callable[[], Awaitable[_T]], size: int = 0) -> _T:
        """Make a request that moves `size` bytes, and return its result. Raises StoreError."""
        async with self._limited(what, size):
            return await request()

    @asynccontextmanager
    async def _limited(self, what: str, size: int) -> AsyncIterator[None]:
        """Limit the time of the `with` block, which moves `size` bytes. Convert its errors to StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s * (1 + size / self._given["slow_bytes"])):
                yield
        except TimeoutError:
            raise StoreError(f"{self._name}: {what}: {_REASONS['TimedOut']}") from None
        except (self.api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> StoreError:
        """Return the StoreError for the client's `error`.

        The text of `error` may contain a signed URL. So the message contains only known words of the text.
        """
        text = str(error)
        for known, why in _REASONS.items():
            if known in text:
                return StoreError(f"{self._name}: {what}: {why}")
        message, code = _STATUS.search(text), _CODE.search(text)
        status = _STATUSES.get(type(error).__name__) or (int(message[1]) if message else 0)
        name = code[1] if code else type(error).__name__
        where = f"{self._name}: {what}: {name} ({status})"
        if name in _NO_BUCKET:
            return StoreError(f"{where}: the bucket does not exist; create it, or correct url")
        if status == _FULL or _FULL_CODE.search(name):
            return StoreError(f"{where}: the store has no room; check its quota", full=True)
        if status in _DENIED:
            return StoreError(f"{where}: check that the keys are correct and may get, put, delete and list", status)
        return StoreError(where, status)


def _proxied(host: str | None) -> bool:
    """Return whether the environment names a proxy for `host`, or for any host if `host` is None."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return False
    from urllib.request import proxy_bypass  # noqa: PLC0415  (large, and rarely used)

    return host is None or not proxy_bypass(host)


def _values_of(prefixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the values of environment variables with one of `prefixes`, and the text of files that the values name."""
    for name, value in os.environ.items():
        if name.startswith(prefixes):
            yield f"http://{value}" if name.startswith(_METADATA) else value
            with suppress(OSError, ValueError):
                yield Path(value).read_text("utf-8")


def _named_hosts(*texts: str) -> set[str]:
    """Return the hosts of all URLs in `texts`."""
    found = set()
    for url in (url for text in texts for url in _URL.findall(text)):
        with suppress(ValueError):
            found.add(urlsplit(url).hostname or "")
    return found - {""}


async def _all(limiter: asyncio.Semaphore, calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Run `calls` concurrently within `limiter`, and return their results in order. A StoreError ends all calls."""

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
    """Release `view`. Returns False if the client still uses the buffer."""
    try:
        view.release()
    except BufferError:
        return False
    return True


# ---- the process ----------------------------------------------------------------------------------------------------


class ParentChannel:
    """A lane: a socket to the parent, and a range of the shared memory, mapped up to the size of the largest value."""

    def __init__(self, wire: socket.socket, memory_fd: int, begin: int) -> None:
        wire.setblocking(False)  # noqa: FBT003
        self._wire, self._memory_fd, self._begin, self._memory = wire, memory_fd, begin, memoryview(b"")

    async def serve(self, client: Client) -> None:
        """Answer questions until the parent closes the lane. The message `CANCEL` cancels the question in progress."""
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
    """Send the result of a lane's question. `send` does not block, because the parent has read the last answer."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        reply: list[Any] = ["the call was cancelled", None]
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
    """End the process if the task that serves a lane has failed, so that the parent does not wait on this lane."""
    if serving.cancelled() or serving.exception() is not None:
        os._exit(1)


def limit_memory(lanes: int) -> None:
    """Limit the memory that the process may allocate from now on. An allocation beyond the limit ends the process."""
    data_pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    bytes_max = data_pages * mmap.PAGESIZE + DATA_BYTES + lanes * LANE_DATA_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_max, bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


async def main(memory_fd: int, control_fd: int, *lane_fds: int) -> None:
    """Start the client and serve all lanes. End the process when the parent ends or closes the control socket."""
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
    loop.add_reader(control, os._exit, 0)  # ends the process without the library's clean-up
    while serving and os.getppid() == parent:  # noqa: ASYNC110  (a fork of the parent may keep the socket open)
        await asyncio.sleep(PARENT_S)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
