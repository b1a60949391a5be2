"""A TCP proxy on loopback for tests of remote tiers.

The proxy can delay, stall, cut or refuse connections at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, Self

from kvpipe.testing.waiting import WAIT_S
from tests.rigs.servers.sockets import LOCAL

CHUNK_BYTES = 64 << 10


class Proxy:
    """Forwards connections from its own `port` to `target_port` of loopback, in a thread. Use the proxy with `with`.

    A changed attribute applies to all later data, also of open connections. `latency_s`: the delay of each packet
    of data. `rate_bytes_s`: the limit in bytes per second, for each direction of each connection; None: no limit.
    `stalled`: no data pass, while connections stay open and new connections are accepted. `cut_after`: the number
    of bytes from the server after which all connections are reset; None: never.
    """

    def __init__(self, target_port: int, tls: ssl.SSLContext | None = None) -> None:
        """Make a proxy that does not listen yet.

        `tls`: the TLS context for clients. The server always gets plain TCP.
        """
        self.target_port, self.port, self._tls = target_port, 0, tls
        self.latency_s = 0.0
        self.rate_bytes_s: float | None = None
        self.stalled = False
        self.cut_after: int | None = None
        self.connections = 0  # the number of connections that were accepted since the start
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        """Listen on a free port."""
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections, and the port, and end the thread."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def cut(self) -> None:
        """Reset all connections. New connections are accepted."""
        self._do(self._cut())

    def refuse(self) -> None:
        """Reset all connections and refuse new ones, until `accept`."""
        self._do(self._refuse())

    def accept(self) -> None:
        """Listen again, on the same port."""
        self._do(self._listen())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accepted, LOCAL, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _end(self) -> None:
        await self._refuse()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        await asyncio.sleep(0)  # the transports' own callbacks run now

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            back_reader, back_writer = await asyncio.open_connection(LOCAL, self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._open.add(back_writer)
        for source, target, back in ((reader, back_writer, False), (back_reader, writer, True)):
            task = asyncio.ensure_future(self._pass(source, target, back=back))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                if self.rate_bytes_s:
                    await asyncio.sleep(len(data) / self.rate_bytes_s)
                while self.stalled:  # noqa: ASYNC110  (another thread sets it)
                    await asyncio.sleep(0.01)
                if back and self.cut_after is not None:
                    data = data[: self.cut_after]
                    self.cut_after -= len(data)
                writer.write(data)
                await writer.drain()
                if self.cut_after == 0:
                    await self._cut()
        self._open.discard(writer)
        writer.close()
