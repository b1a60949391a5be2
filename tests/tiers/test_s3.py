"""Tests of the S3 tier alone: its refusals, its reports about a failing store, its reads, and its shutdown."""

from __future__ import annotations

import mmap
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from pydantic import ValidationError

from kvpipe.errors import ConfigError
from kvpipe.testing.buffers import aligned, content, data, filled, get, put, some_key, value
from kvpipe.testing.tier_conformance.worlds import run, tried
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Get, Put, Read, TierError, TierFullError, Written
from kvpipe.tiers.s3.child import Client
from kvpipe.tiers.s3.spec import S3Spec
from kvpipe.tiers.s3.tier import S3Tier
from tests.rigs.servers import signals
from tests.rigs.servers.proxy import Proxy
from tests.rigs.servers.s3 import BUCKET, S3Server, answering, fresh_prefix, shared
from tests.rigs.tier_worlds.s3 import KEYS, spec_of

KIB, MIB = 1 << 10, 1 << 20
SHORT_MS = 1000
SILENT = "no answer within timeout_ms_max"


@asynccontextmanager
async def opened(spec: S3Spec) -> AsyncIterator[S3Tier]:
    """Open a client and close it. With a short time limit, repeat the opening until it succeeds."""
    tier = spec.make("s3")
    await (tried(tier.open) if spec.timeout_ms_max <= SHORT_MS else tier.open())
    try:
        yield tier
    finally:
        await tier.close()


async def swallow(why: str, call: Callable[..., Awaitable[object]], *args: object) -> None:
    """Check that `call` ends with a TierError that contains `why`."""
    with pytest.raises(TierError, match=why):
        await call(*args)


def everything(tier: S3Tier) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return a call of every kind."""

    async def scan() -> None:
        async for _ in tier.scan():
            pass

    return {
        "exists": partial(tier.exists, [some_key(i) for i in range(100)]),
        "read": partial(tier.read, [get(1, 4096), get(2, 4096)]),
        "write": partial(tier.write, [put(1, 4096)]),
        "delete": partial(tier.delete, [some_key(1)]),
        "capacity": tier.capacity,
        "health": tier.health,
        "scan": scan,
    }


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"endpoint": "http://store:9000"}, "has no TLS.*write https, or set allow_http=true"),
        ({"endpoint": "store:9000"}, "is not the URL of a server; write https://HOST:PORT"),
        ({"endpoint": "https://me:pass-word@store"}, "a URL must not contain a key"),
        ({"url": "s3://"}, "names no bucket; write s3://BUCKET/PREFIX"),
        ({"url": "/mnt/kv"}, "names no bucket; write s3://BUCKET/PREFIX"),
        ({"url": "s3://me:pass-word@bucket/x"}, "a URL must not contain a key"),
        ({"url": "s3://bucket/a/../b"}, "has an empty part"),
        ({"url": "s3://bucket/a//b"}, "has an empty part"),
        ({"url": "az://account"}, "names no container; write az://ACCOUNT/CONTAINER/PREFIX"),
        ({"url": "gs://bucket", "region": "eu"}, "are for s3://, not gs://.*leave them out"),
        ({"access_key_env": "A"}, "belong together; name both, or neither"),
        ({"secret_key_file": "/x"}, "belong together; name both, or neither"),
        ({"read_bytes": "4KiB"}, "read_bytes"),
        ({"lanes": True}, "lanes"),
    ],
)
def test_a_wrong_specification_is_refused(keys: dict[str, Any], reason: str) -> None:
    """A wrong key, or a key that contradicts another key, is refused before anything starts.

    The message has the remedy.
    """
    with pytest.raises(ValidationError, match=reason) as caught:
        S3Spec.model_validate({"url": "s3://bucket/prefix"} | keys)
    assert "pass-word" not in caught.value.errors()[0]["msg"]


def test_a_url_can_have_every_key() -> None:
    """A URL gives the bucket and the prefix, and its query gives the other keys."""
    url = "s3://bucket/a/b?endpoint=https://store:9000&region=eu-west-1&lanes=8&read_bytes=16MiB"
    spec = S3Spec.model_validate(S3Spec.parse_url(urlsplit(url)))
    assert (spec.url, spec.endpoint, spec.region) == ("s3://bucket/a/b", "https://store:9000", "eu-west-1")
    assert (spec.lanes, spec.read_bytes) == (8, 16 * MIB)


def test_missing_secrets_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a variable is not set, making the tier raises an error that names the variable's key."""
    spec = spec_of(shared())
    monkeypatch.delenv("TESTS_S3_SECRET")
    with pytest.raises(ConfigError, match="s3: secret key: the environment variable that secret_key_env names is"):
        spec.make("s3")


def test_missing_client_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client library the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvpipe\[s3\]'"):
        spec_of(shared()).make("s3")


# ---- stores that fail -----------------------------------------------------------------------------------------------


def refused(spec: S3Spec) -> str:
    """Return the error that opening raises."""
    message = []

    async def play() -> None:
        with pytest.raises(TierError) as caught:
            async with opened(spec):
                pass
        message.append(str(caught.value))

    run(play)
    assert not any(secret in message[0] for secret in KEYS.values())
    return message[0]


def test_missing_bucket_is_reported() -> None:
    """A missing bucket is not a miss: opening the tier raises an error that names the cause."""
    assert "the bucket does not exist" in refused(spec_of(shared(), url="s3://no-such-bucket/x"))


def test_unknown_host_is_reported() -> None:
    """The name of the store's host does not resolve. The error names this cause."""
    message = refused(spec_of(shared(), endpoint="https://store.invalid", timeout_ms_max=2000))
    assert "no such host" in message


def test_wrong_keys_are_reported_and_not_shown() -> None:
    """The error says that the keys are wrong, and does not show them."""
    with S3Server(INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        assert "InvalidAccessKeyId (403): check that the keys are correct" in refused(spec_of(server))


def test_full_store_raises_tier_full_error() -> None:
    """If a store is full or over its quota, writes raise TierFullError, and all other calls work."""
    for status, code in ((507, "XMinioStorageFull"), (403, "QuotaExceeded"), (507, "")):

        def answer(method: str, _: bool, stated: tuple[int, str] = (status, code)) -> tuple[int, str]:
            return stated if method == "PUT" else (404, "NoSuchKey")

        async def play(url: str) -> None:
            async with opened(spec_of(shared(), endpoint=url)) as tier:
                with pytest.raises(TierFullError, match="has no room"):
                    await tier.write([put(1, 4096)])
                assert await tier.read([get(1, 4096)]) == [Read.MISS]

        with answering(answer) as url:
            run(play, url)


def test_a_store_that_knows_no_conditions() -> None:
    """If a store does not support conditional writes, later values are written without a condition."""
    puts = []

    def answer(method: str, condition: bool) -> tuple[int, str]:
        if method == "PUT":
            puts.append(condition)
            return (501, "NotImplemented") if condition else (200, "")
        return 404, "NoSuchKey"

    async def play(url: str) -> None:
        async with opened(spec_of(shared(), endpoint=url, timeout_ms_max=1000)) as tier:
            assert await tried(tier.write, [put(1, 4096)]) == [Written.STORED]
            assert puts[0], "it is asked for at first"
            puts.clear()
            assert await tried(tier.write, [put(2, 4096)]) == [Written.STORED]

    with answering(answer) as url:
        run(play, url)
    assert puts == [False]


def test_client_works_again_when_the_store_has_restarted() -> None:
    """While the server is dead every call raises TierError. When the server is back, the same client works again."""

    async def play() -> None:
        async with opened(spec_of(server, timeout_ms_max=SHORT_MS)) as tier:
            await tried(tier.write, [put(1, 64 * KIB)])
            server.kill()
            for what, ask in everything(tier).items():
                with pytest.raises(TierError, match=f"connection refused|{SILENT}"):
                    await ask()
                assert what
            await anyio.to_thread.run_sync(server.start)
            await tried(tier.health)
            assert await tried(tier.read, [get(1, 64 * KIB)]) == [Read.MISS]
            await tried(tier.write, [put(1, 64 * KIB)])
            assert await tried(tier.read, [get(1, 64 * KIB)]) == [Read.HIT]

    with S3Server() as server:
        run(play)


def test_calls_time_out_while_the_store_is_stopped() -> None:
    """While the server is stopped, each call raises TierError after its timeout.

    When it continues, the tier works again.
    """

    async def play() -> None:
        async with opened(spec_of(server, timeout_ms_max=SHORT_MS)) as tier:
            await tried(tier.write, [put(1, 64 * KIB)])
            server.pause()
            for what, ask in everything(tier).items():
                with anyio.fail_after(WAIT_S), pytest.raises(TierError, match=SILENT):
                    await ask()
                assert what
            server.resume()
            await tried(tier.health)
            assert await tried(tier.read, [get(1, 64 * KIB)]) == [Read.HIT]

    with S3Server() as server:
        try:
            run(play)
        finally:
            server.resume()


def test_ended_client_is_started_again_by_a_probe() -> None:
    """When the client's process dies under load, calls raise TierError. A probe of the tier starts another process."""

    async def play() -> None:
        async with opened(spec_of(shared())) as tier:
            await tier.write([put(1, 64 * KIB)])
            client = tier._child
            assert client is not None
            async with anyio.create_task_group() as group:
                group.start_soon(swallow, "process is gone", tier.exists, [some_key(i) for i in range(2000)])
                await anyio.sleep(0.02)
                client._process.kill()
            for ask in everything(tier).values():
                if ask != tier.health:
                    await swallow("process is gone", ask)
            await tier.health()
            assert await tier.read([get(1, 64 * KIB)]) == [Read.HIT]

    run(play)


def test_hanging_client_is_replaced_by_a_probe() -> None:
    """A client's process that hangs is replaced by a probe of the tier."""

    async def play() -> None:
        async with opened(spec_of(shared(), timeout_ms_max=500)) as tier:
            await tried(tier.write, [put(1, 64 * KIB)])
            client = tier._child
            assert client is not None
            signals.send(client._process, signal.SIGSTOP)
            await swallow(SILENT, tier.read, [get(1, 64 * KIB)])
            await tried(tier.health)
            assert client._process.poll() is not None
            assert await tried(tier.read, [get(1, 64 * KIB)]) == [Read.HIT]

    run(play)


def test_a_client_that_has_lost_a_lane_ends() -> None:
    """If a lane cannot accept requests any more, the client's process ends, and a probe starts another process."""

    async def play() -> None:
        async with opened(spec_of(shared())) as tier:
            client = tier._child
            assert client is not None
            async with client.pools["scan"].lane(WAIT_S) as lane:
                lane.wire.send(b"\xc1")  # a single byte is no valid message
            with anyio.fail_after(WAIT_S):
                await anyio.to_thread.run_sync(client._process.wait, abandon_on_cancel=True)
            await tier.health()
            assert (await tier.capacity()).items == 0

    run(play)


def test_a_client_that_does_not_write_has_no_lanes_for_it() -> None:
    """A tier that was made without writes has no lanes for writes, and refuses to write."""

    async def play() -> None:
        spec = spec_of(shared())
        async with opened(spec) as writer:
            await writer.write([put(1, 64 * KIB)])
        tier = spec.make("s3", writes=False)
        await tier.open()
        try:
            assert tier._child is not None
            assert tier._child.pools["write"]._size == 0
            with pytest.raises(TierFullError, match="only look up and read values"):
                await tier.write([put(2, 64 * KIB)])
            assert await tier.exists([some_key(1), some_key(2)]) == [True, False]
            assert await tier.read([get(1, 64 * KIB)]) == [Read.HIT]
        finally:
            await tier.close()

    run(play)


def test_a_client_that_has_ended_while_the_store_is_away() -> None:
    """An ended client process that cannot be replaced at once is replaced as soon as the store is back."""

    async def play(proxy: Proxy) -> None:
        async with opened(proxied(proxy)) as tier:
            client = tier._child
            assert client is not None
            client._process.kill()
            proxy.refuse()
            for _ in range(2):
                await swallow("connection refused", tier.health)
            proxy.accept()
            await tier.health()
            assert await tier.exists([some_key(1)]) == [False]

    with Proxy(shared().port) as proxy:
        run(play, proxy)


async def closed(memory: mmap.mmap) -> None:
    """Wait until the memory can be closed.

    A thread that has finished its work may release the memory a moment later.
    """
    with anyio.fail_after(WAIT_S):
        while True:
            with suppress(BufferError):
                memory.close()
                return
            await anyio.sleep(0.01)


def test_a_store_that_takes_no_body() -> None:
    """A write is cancelled or times out while its body is sent. No thread uses the write's buffers afterwards."""
    go_on, begun = threading.Event(), threading.Event()

    def answer(method: str, _: bool) -> tuple[int, str]:
        if method == "PUT":
            begun.set()
            go_on.wait(WAIT_S)
        return 404, "NoSuchKey"

    async def play(url: str) -> None:
        async with opened(spec_of(shared(), endpoint=url, timeout_ms_max=SHORT_MS)) as tier:
            for cancelled in (True, False):
                begun.clear()
                memory = mmap.mmap(-1, 8 * MIB)
                part = memoryview(memory)
                async with anyio.create_task_group() as group:
                    group.start_soon(swallow, SILENT, tier.write, [Put(some_key(1), (part,))])
                    await anyio.to_thread.run_sync(begun.wait, WAIT_S)
                    if cancelled:
                        group.cancel_scope.cancel()
                part.release()
                await closed(memory)

    with answering(answer) as url:
        try:
            run(play, url)
        finally:
            go_on.set()


# ---- values ---------------------------------------------------------------------------------------------------------


def proxied(proxy: Proxy, **keys: Any) -> S3Spec:
    """Return the specification of a place on the shared server, reached through the proxy."""
    return spec_of(shared(), endpoint=f"http://127.0.0.1:{proxy.port}", **keys)


def test_ranges_are_put_together_in_order() -> None:
    """A large value is read in parallel ranges into buffers with other bounds. Every byte is in its place."""
    sizes = (4096, 3 * MIB, 512 * KIB, 5 * MIB + 4096)

    async def play(proxy: Proxy) -> None:
        async with opened(proxied(proxy, read_bytes=MIB, lanes=6)) as tier:
            whole = content(1, sum(sizes))
            await tier.write([Put(some_key(1), filled(whole, (sum(sizes),)))])
            before, proxy.latency_s = proxy.connections, 0.01
            wanted = Get(some_key(1), tuple(map(aligned, sizes)))
            assert await tier.read([wanted]) == [Read.HIT]
            assert data(wanted.into) == whole
            assert proxy.connections - before >= 5, "one connection would do for one after the other"

    with Proxy(shared().port) as proxy:
        run(play, proxy)


def test_a_value_that_is_replaced_while_it_is_read() -> None:
    """A value is replaced while its ranges are read.

    The read is DAMAGED, or returns one of the two values as a whole.
    """
    size, url = 8 * MIB, f"s3://{BUCKET}/{fresh_prefix()}"

    async def play(proxy: Proxy) -> None:
        other = Client(spec_of(shared(), url=url).make("other").settings())
        async with opened(proxied(proxy, url=url, read_bytes=MIB, lanes=1)) as tier:
            await tier.write([Put(some_key(1), value(1, size))])
            proxy.rate_bytes_s = 20e6
            wanted, ends = get(1, size), []

            async def read() -> None:
                ends.extend(await tier.read([wanted]))

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await anyio.sleep(0.15)
                await other.api.put_async(other.puts, some_key(1).text, content(2, size), use_multipart=False)
            assert ends == [Read.DAMAGED] or data(wanted.into) in (content(1, size), content(2, size))

    with Proxy(shared().port) as proxy:
        run(play, proxy)


async def stall_soon(proxy: Proxy) -> None:
    """Stop passing data after a short time."""
    await anyio.sleep(0.1)
    proxy.stalled = True


def test_an_answer_that_is_cut_or_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ends early or stalls half way raises TierError, or the retry succeeds."""
    # the limit for the whole transfer is long, so that it does not end the call first
    monkeypatch.setattr("kvpipe.tiers.s3.tier.SLOW_BYTES", 1)

    async def play(proxy: Proxy) -> None:
        async with opened(proxied(proxy, timeout_ms_max=SHORT_MS)) as tier:
            await tried(tier.write, [put(1, 4 * MIB)])
            for after in (1, 100, 700, 64 * KIB, 2 * MIB, 4 * MIB):
                proxy.cut_after, wanted = after, get(1, 4 * MIB)
                try:
                    assert await tier.read([wanted]) == [Read.HIT]
                    assert data(wanted.into) == content(1, 4 * MIB)
                except TierError as error:
                    assert re.search(f"s3: GET: |{SILENT}", str(error))  # noqa: PT017
                proxy.cut_after = None
            proxy.rate_bytes_s = 1e6
            async with anyio.create_task_group() as group:
                group.start_soon(stall_soon, proxy)
                with anyio.fail_after(WAIT_S), pytest.raises(TierError, match=SILENT):
                    await tier.read([get(1, 4 * MIB)])
            proxy.stalled, proxy.rate_bytes_s = False, None
            assert await tried(tier.read, [get(1, 4 * MIB)]) == [Read.HIT]

    with Proxy(shared().port) as proxy:
        run(play, proxy)


def test_foreign_objects_are_not_listed() -> None:
    """Foreign objects under the prefix are not listed.

    An empty object under a key of kvpipe is DAMAGED when it is read.
    """
    path = f"{BUCKET}/{fresh_prefix()}"

    async def play() -> None:
        async with opened(spec_of(shared(), url=f"s3://{path}")) as tier:
            await tier.write([put(1, 4096)])
            for name in ("readme.txt", f"deep/{some_key(2).text}", some_key(3).text + "x", "x" * 200):
                assert shared().ask("PUT", f"/{path}/{name}", b"foreign") == 200
            assert shared().ask("PUT", f"/{path}-other/{some_key(4).text}", bytes(4096)) == 200
            assert [entry.key async for entry in tier.scan()] == [some_key(1)]
            assert (await tier.capacity()).items == 1
            assert shared().ask("PUT", f"/{path}/{some_key(5).text}", b"") == 200
            assert await tier.read([get(4, 4096), get(5, 4096)]) == [Read.MISS, Read.DAMAGED]

    run(play)


# ---- the end --------------------------------------------------------------------------------------------------------


def test_close_ends_calls_in_flight() -> None:
    """A read and a write hang when the tier is closed. Both end with TierError, and no call is in flight afterwards."""

    async def play(proxy: Proxy) -> None:
        tier = proxied(proxy, timeout_ms_max=SHORT_MS).make("s3")
        await tried(tier.open)
        proxy.stalled = True
        async with anyio.create_task_group() as group:
            group.start_soon(swallow, f"it is not open|{SILENT}", tier.read, [get(1, MIB)])
            group.start_soon(swallow, f"it is not open|{SILENT}", tier.write, [put(2, MIB)])
            await anyio.sleep(0.05)
            client = tier._child
            assert client is not None
            await tier.close()
            assert client._process.poll() is not None

    with Proxy(shared().port) as proxy:
        run(play, proxy)


LEAVING = """
import asyncio
import sys
import anyio
import kvpipe.tiers.s3.tier
assert "obstore" not in sys.modules
from kvpipe.testing.buffers import get, put
from tests.rigs.tier_worlds.s3 import S3Spec, KEYS
import os
os.environ |= KEYS
tasks = []

async def play():
    tier = S3Spec.model_validate_json(sys.argv[1]).make("s3")
    await tier.open()
    await tier.write([put(i, 1 << 20) for i in range(2)])
    async def go(call, *args):
        try:
            await call(*args)
        except kvpipe.tiers.base.TierError:
            pass
    for i in range(8):
        tasks.append(asyncio.ensure_future(go(tier.read, [get(i % 2, 1 << 20)])))
        tasks.append(asyncio.ensure_future(go(tier.write, [put(10 + i, 1 << 20)])))
        tasks.append(asyncio.ensure_future(go(tier.exists, [put(i, 4096).key for i in range(50)])))
    await anyio.sleep(float(sys.argv[2]))
    for task in tasks:
        if sys.argv[3] == "cancel":
            task.cancel()
    await tier.close()
    await anyio.sleep(0.05)

# not anyio.run, which would clean up: what close leaves under way is seen
asyncio.new_event_loop().run_until_complete(play())
"""


def test_the_interpreter_ends_while_transfers_are_under_way() -> None:
    """A process closes the tier under load, or cancels all calls. The process exits normally and prints nothing."""
    ways = [(0.0, "close"), (0.02, "cancel"), (0.05, "close"), (0.1, "cancel"), (0.2, "close")]
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                LEAVING,
                spec_of(shared()).model_dump_json(),
                str(after_s),
                how,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for after_s, how in ways
    ]
    try:
        message = [child.communicate(timeout=WAIT_S)[0] for child in children]
        assert [(child.returncode, text) for child, text in zip(children, message, strict=True)] == [(0, b"")] * len(
            ways
        )
    finally:
        for child in children:
            child.kill()
