"""S3 and what speaks its language, Google Cloud Storage, Azure: a value is an object, its key's text the object's name.

The store keeps what is written until something deletes it: a lifecycle rule of the bucket, or `delete`.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from types import ModuleType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

import anyio
import anyio.to_thread
import numpy as np
from pydantic import ByteSize, Field, SecretStr, model_validator

from kvpipe.errors import ConfigError
from kvpipe.keys import name
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written
from kvpipe.tiers.spec import TierSpec, secret
from kvpipe.values import LocalPath, Size, Variable

SLOW_BYTES: Final = 4 << 20
"""What must move in every `timeout_ms_max` of a request: a connection that is slower has failed."""
HEADS_PER_LANE: Final = 16
"""Questions under way at once, for each lane: they carry no values."""
RETRIES: Final = 2
THREAD_BYTES: Final = 256 << 10
"""A copy of more than that is made in a thread: the loop has other work in that time."""
PIECE_BYTES: Final = 1 << 20
"""Of a body that is being read, what is held at once, and not yet where it belongs."""
PAGE: Final = 1000
POLL_S: Final = 0.001
ABSENT: Final = "kvpipe-health"
"""What is asked for to see whether the store answers. It is no key."""

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
    "certificate": "its certificate is not trusted; see the system's certificates, and endpoint",
    "TimedOut": "no answer within timeout_ms_max",
    "kind: Timeout": "no answer within timeout_ms_max",
    "scheme is not allowed": "http is not allowed; write https, or set allow_http",
}
_T = TypeVar("_T")


class S3Spec(TierSpec):
    """What an S3 tier can be told."""

    schemes: ClassVar[tuple[str, ...]] = ("s3", "gs", "az")

    kind: Literal["s3"] = "s3"
    url: str = Field(description="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX.")
    endpoint: str = Field("", description="URL of a server of one's own, for s3; empty: that of the cloud.")
    allow_http: bool = Field(default=False, description="Allow an endpoint without TLS.")
    region: str = Field("", description="Region, for s3; empty: AWS_REGION, or us-east-1.", pattern=r"^[A-Za-z0-9-]*$")
    access_key_env: Variable = Field(
        "", description="Environment variable with the access key, for s3. None: the cloud's usual sources."
    )
    access_key_file: LocalPath | None = Field(None, description="File with the same.")
    secret_key_env: Variable = Field("", description="Environment variable with the secret key, for s3.")
    secret_key_file: LocalPath | None = Field(None, description="File with the same.")
    read_bytes: Annotated[Size, Field(ge=1 << 20, le=1 << 30)] = Field(
        ByteSize(8 << 20), description="A larger value is read in ranges of so many bytes, side by side."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        url, shown = _split("url", self.url), name(self.url)
        example = "az://ACCOUNT/CONTAINER/PREFIX" if url.scheme == "az" else f"{url.scheme or 's3'}://BUCKET/PREFIX"
        if "@" in url.netloc:
            raise ValueError("url: a key is not written into a URL; name a variable in access_key_env, secret_key_env")
        if url.scheme not in self.schemes or not url.netloc or url.query or url.fragment:
            raise ValueError(f"url={shown!r} names no bucket; write {example}")
        if url.scheme == "az" and not url.path.strip("/"):
            raise ValueError(f"url={shown!r} names no container; write {example}")
        if any(part in {"", ".", ".."} for part in url.path.strip("/").split("/")) and url.path.strip("/"):
            raise ValueError(f"url={shown!r} has an empty part, '.' or '..' in its path; write {example}")
        self._agree_on_keys(url.scheme)
        self._agree_on_endpoint()
        return self

    def _agree_on_keys(self, scheme: str) -> None:
        sides = [(bool(getattr(self, f"{s}_key_env")), getattr(self, f"{s}_key_file")) for s in ("access", "secret")]
        named = [env or file is not None for env, file in sides]
        if named[0] != named[1]:
            raise ValueError("the access key and the secret key belong together; name both, or neither")
        if scheme != "s3" and (named[0] or self.endpoint or self.region):
            raise ValueError(
                f"endpoint, region, access_key_* and secret_key_* are for s3://, not {scheme}://, which takes its "
                "credentials from the environment; leave them out"
            )

    def _agree_on_endpoint(self) -> None:
        end, shown = _split("endpoint", self.endpoint), name(self.endpoint)
        if "@" in end.netloc:
            raise ValueError("endpoint: a key is not written into a URL; name a variable in access_key_env")
        if self.endpoint and (end.scheme not in {"http", "https"} or not end.netloc or end.query or end.fragment):
            raise ValueError(f"endpoint={shown!r} is no URL of a server; write https://HOST:PORT")
        if end.scheme == "http" and not self.allow_http:
            raise ValueError(
                f"endpoint={shown!r} has no TLS: others can read it all; write https, or set allow_http=true"
            )

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`: s3://BUCKET/PREFIX?endpoint=https://HOST."""
        return {"url": url._replace(query="").geturl()}

    def make(self, name: str, *, writes: bool = True) -> S3Tier:  # noqa: ARG002  (what writes cost comes with them)
        """See `TierSpec.make`."""
        try:
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                f"kvpipe: tier {name} needs the object store client; run pip install 'kvpipe[s3]'"
            ) from None
        try:
            access = secret(self.access_key_env, self.access_key_file, "access key")
            hidden = secret(self.secret_key_env, self.secret_key_file, "secret key")
        except ValueError as error:
            raise ConfigError(f"kvpipe: tier {name}: {error}") from None
        keys = {"access_key_id": access, "secret_access_key": hidden}
        return S3Tier(name, self, obstore, {key: value for key, value in keys.items() if value is not None})


def _split(key: str, text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        url.port  # noqa: B018  (it is read only now)
    except ValueError:  # its message would show what it cannot read
        raise ValueError(f"{key}={name(text)!r} is no valid URL; write special characters as %XX") from None
    if "\0" in text:
        raise ValueError(f"{key}={name(text)!r} has a zero byte; leave it out")
    return url


class RefusedError(TierError):
    """The store has answered, but not with what was asked. `status` is HTTP's; 0: it is not known."""

    def __init__(self, message: str, status: int) -> None:
        """`message` shows no secret."""
        super().__init__(message)
        self.status = status


class _Range(NamedTuple):
    """How the read of a range of a value ended; `version` is the store's name for what it read."""

    read: Read
    version: str | None = None


class S3Tier:
    """Objects in a bucket. Safe for many clients: an object is whole when it appears, and is not replaced.

    What runs in the client's own threads is watched: `write` does not return before they have let go of its buffers,
    nor `close` before they have let go of everything of Python's.
    """

    def __init__(self, name: str, spec: S3Spec, api: ModuleType, keys: dict[str, SecretStr]) -> None:
        """Do not connect yet. `api`: the module obstore. `keys`: its names for the access key and the secret key."""
        self.name, self.spec = name, spec
        self._api, self._keys = api, keys
        self._timeout_s = spec.timeout_ms_max / 1000
        self._conditional = True  # the store can be told not to replace an object
        self._asks: object = None  # with a limit on silence; None: closed
        self._puts: object = None  # without: a store is silent while it is sent a body
        self._scopes: set[anyio.CancelScope] = set()
        self._futures: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()

    # ---- life -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Tier.open`."""
        lanes = self.spec.lanes
        self._reads, self._writes, self._threads = (anyio.CapacityLimiter(lanes) for _ in range(3))
        self._heads = anyio.CapacityLimiter(lanes * HEADS_PER_LANE)
        self._asks = self._store(read_timeout=timedelta(seconds=self._timeout_s))
        self._puts = self._store()
        try:
            await self.health()
        except BaseException:
            self._asks = self._puts = None
            raise

    def _store(self, **client: object) -> object:
        wait = timedelta(seconds=self._timeout_s)
        client |= {"allow_http": self.spec.allow_http, "connect_timeout": wait, "timeout": timedelta(days=1)}
        backoff = {"init_backoff": wait / 40, "max_backoff": wait / 4, "base": 2}
        retry = {"max_retries": RETRIES, "retry_timeout": wait, "backoff": backoff}
        options: dict[str, object] = {key: value.get_secret_value() for key, value in self._keys.items()}
        options |= {key: getattr(self.spec, key) for key in ("endpoint", "region") if getattr(self.spec, key)}
        if self.spec.url.startswith("s3:"):
            options["unsigned_payload"] = True  # a value has its own checksum; this one would take as long as the PUT
        try:
            return self._api.store.from_url(self.spec.url, client_options=client, retry_config=retry, **options)
        except (self._api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failure("set up", error) from None

    async def health(self) -> None:
        """See `Tier.health`."""
        await self._try({_MISSING}, "GET", lambda: self._api.get_async(self._asks, ABSENT))

    async def close(self) -> None:
        """See `Tier.close`."""
        self._asks = self._puts = None
        with anyio.CancelScope(shield=True):
            await self._until(lambda: not self._scopes)
            for scope in self._scopes:
                scope.cancel()
            await self._until(lambda: not self._scopes and not self._futures)

    async def _until(self, done: Callable[[], bool]) -> None:
        with anyio.move_on_after(self._timeout_s):
            while not done():
                self._api.Bytes()  # any call lets the client drop what its threads could not drop without the lock
                await anyio.sleep(POLL_S)

    # ---- values ---------------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`: a question per key. A listing would have to name everybody's values."""
        self._opened()
        return await _all(self._heads, [partial(self._there, key) for key in keys])

    async def _there(self, key: Key) -> bool:
        answer = await self._try({_MISSING}, "HEAD", lambda: self._api.head_async(self._asks, key.text))
        return not isinstance(answer, RefusedError)

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
        self._opened()
        step = self.spec.read_bytes
        starts = [range(0, get.size, step) for get in gets]
        ranges = [partial(self._range, get, at) for get, ats in zip(gets, starts, strict=True) for at in ats]
        ends = iter(await _all(self._reads, ranges))
        return [_together([next(ends) for _ in ats]) for ats in starts]

    async def _range(self, get: Get, start: int) -> _Range:
        stop = min(start + self.spec.read_bytes, get.size)
        wanted = {"range": (start, stop)}
        answer = await self._try(
            {_MISSING, _OUTSIDE}, "GET", lambda: self._api.get_async(self._asks, get.key.text, options=wanted)
        )
        if isinstance(answer, RefusedError):
            return _Range(Read.MISS if answer.status == _MISSING else Read.DAMAGED)
        if answer.meta["size"] != get.size or answer.range != (start, stop):
            return _Range(Read.DAMAGED)
        whole = await self._take(answer.stream(min_chunk_size=min(stop - start, PIECE_BYTES)), get, start, stop)
        return _Range(Read.HIT, answer.meta["e_tag"]) if whole else _Range(Read.DAMAGED)

    async def _take(self, pieces: Any, get: Get, start: int, stop: int) -> bool:  # noqa: ANN401  (it has no types)
        """Copy a body into bytes [start, stop) of `get`, piece by piece; return whether it was exactly as long."""
        at = start
        with self._limited("GET", stop - start):
            while True:
                try:
                    data = await self._watched(pieces.__anext__())
                except StopAsyncIteration:
                    return at == stop
                if len(data) > stop - at:  # whatever the store has said of its length: no more of it is read
                    return False
                if len(data) > THREAD_BYTES:
                    await anyio.to_thread.run_sync(_scatter, memoryview(data), get.into, at, limiter=self._threads)
                else:
                    _scatter(memoryview(data), get.into, at)
                at += len(data)

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        self._opened()
        return await _all(self._writes, [partial(self._put, put) for put in puts])

    async def _put(self, put: Put) -> Written:
        if await self._there(put.key):  # its body need not be sent
            return Written.PRESENT
        # In one request: the store's answer to a value in several says nothing of one that was there before, and a
        # client that dies between them leaves behind what is paid for and not seen.
        options = {"use_multipart": False, "mode": "create" if self._conditional else "overwrite"}
        views = [memoryview(part) for part in put.parts]
        send = partial(self._api.put_async, self._puts, put.key.text, views, **options)
        try:
            answer = await self._try({_EXISTS, _UNKNOWN}, "PUT", send, put.size)
        finally:
            with anyio.CancelScope(shield=True):
                while not all(map(_released, views)):  # noqa: ASYNC110  (the client sends from them, and tells nobody)
                    await anyio.sleep(POLL_S)
        if not isinstance(answer, RefusedError):
            return Written.STORED
        if answer.status == _EXISTS:
            return Written.PRESENT
        if not self._conditional:
            raise answer
        self._conditional = False
        return await self._put(put)

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        once = list(dict.fromkeys(keys))
        there = [key.text for key, found in zip(once, await self.exists(once), strict=True) if found]
        for at in range(0, len(there), PAGE):
            remove = partial(self._api.delete_async, self._asks, there[at : at + PAGE])
            await self._try({_MISSING}, "DELETE", remove)  # of some stores, where another has deleted it meanwhile
        return len(there)

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`: by a listing, which takes a request per 1000 values."""
        sizes = [entry.bytes async for entry in self.scan()]
        return Capacity(len(sizes), sum(sizes), None)

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        self._opened()
        pages = self._api.list(self._asks, chunk_size=PAGE)
        while True:
            try:
                page = await self._ask("LIST", pages.__anext__)
            except StopAsyncIteration:
                return
            now = datetime.now(UTC)
            for one in page:
                with suppress(ValueError):  # somebody else's
                    key = Key.parse(one["path"])
                    yield Entry(key, one["size"], max(0.0, (now - one["last_modified"]).total_seconds()))

    # ---- requests -------------------------------------------------------------------------------------------------

    def _opened(self) -> None:
        if self._asks is None:
            raise TierError(f"{self.name}: it is not open")

    async def _try(
        self, allowed: set[int], what: str, request: Callable[[], asyncio.Future[_T]], size: int = 0
    ) -> _T | RefusedError:
        """Make a request as `_ask`, but return a refusal whose status is `allowed`."""
        try:
            return await self._ask(what, request, size)
        except RefusedError as refusal:
            if refusal.status not in allowed:
                raise
            return refusal

    async def _ask(self, what: str, request: Callable[[], asyncio.Future[_T]], size: int = 0) -> _T:
        """Make a request that moves `size` bytes, and return what it gives. Raises TierError."""
        with self._limited(what, size):
            return await self._watched(request())

    @contextmanager
    def _limited(self, what: str, size: int) -> Iterator[None]:
        """Let `close`, or too long a wait for `size` bytes, end what is inside. Raises TierError."""
        self._opened()
        with anyio.move_on_after(self._timeout_s * (1 + size / SLOW_BYTES)) as scope:
            self._scopes.add(scope)
            try:
                yield
            except (self._api.exceptions.BaseError, OSError, ValueError) as error:
                raise self._failure(what, error) from None
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            self._opened()
            raise TierError(f"{self.name}: {what}: {_REASONS['TimedOut']}")

    def _watched(self, future: asyncio.Future[_T]) -> asyncio.Future[_T]:
        """Let `close` wait until nobody has `future` any more: the client's threads have it to their very end.

        So no frame of an exception may have it either: it is in no variable where it is awaited.
        """
        self._futures.add(future)
        return future

    def _failure(self, what: str, error: Exception) -> TierError:
        """Return what to raise for the client's `error`, whose text may show a signed URL: only known words of it."""
        text = str(error)
        for known, why in _REASONS.items():
            if known in text:
                return TierError(f"{self.name}: {what}: {why}")
        said, code = _STATUS.search(text), _CODE.search(text)
        status = _STATUSES.get(type(error).__name__) or (int(said[1]) if said else 0)
        name = code[1] if code else type(error).__name__
        where = f"{self.name}: {what}: {name} ({status})"
        if name in _NO_BUCKET:
            return TierError(f"{where}: there is no such bucket; make it, or correct url")
        if status == _FULL or _FULL_CODE.search(name):
            return TierFullError(f"{where}: the store has no room; see its quota")
        if status in _DENIED:
            return RefusedError(f"{where}: see that the keys are right and may get, put, delete, list", status)
        return RefusedError(where, status)


async def _all(limiter: anyio.CapacityLimiter, calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Return what `calls` return, in their order, as many at once as `limiter` lets; a TierError ends them all."""
    ends: dict[int, _T] = {}
    errors: list[TierError] = []
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for at, call in waiting:
            try:
                async with limiter:
                    ends[at] = await call()
            except TierError as error:
                errors.append(error)
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for _ in range(min(len(calls), int(limiter.total_tokens))):
            group.start_soon(work)
    if errors:
        raise errors[0]
    return [ends[at] for at in range(len(calls))]


def _together(ranges: list[_Range]) -> Read:
    """Return how the read of a value ended whose ranges ended so."""
    ends = {one.read for one in ranges}
    if Read.MISS in ends:
        return Read.MISS
    return Read.HIT if ends == {Read.HIT} and len({one.version for one in ranges}) == 1 else Read.DAMAGED


def _scatter(data: memoryview, into: tuple[memoryview, ...], at: int) -> None:
    """Copy `data` to byte `at` of the buffers. numpy does it without the interpreter's lock."""
    source = np.frombuffer(data, np.uint8)
    for part in into:
        share = source[: max(0, part.nbytes - at)]
        if len(share):
            np.frombuffer(part, np.uint8)[at : at + len(share)] = share
        source, at = source[len(share) :], max(0, at - part.nbytes)


def _released(view: memoryview) -> bool:
    """Give `view` back; return False while somebody else has it."""
    try:
        view.release()
    except BufferError:
        return False
    return True
