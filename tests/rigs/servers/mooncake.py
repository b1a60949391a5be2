"""A real Mooncake cluster on loopback: a master, and nodes that lend memory to the cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from kvpipe.testing.waiting import WAIT_S
from tests.rigs.servers import signals
from tests.rigs.servers.sockets import LOCAL, free_port

NODE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
os._exit(0)
"""


class Master:
    """A master process with the flags that a test sets."""

    def __init__(self, *flags: str) -> None:
        """Choose ports and start the master."""
        self._flags = flags
        self.address, self.metrics = f"{LOCAL}:{free_port()}", f"{LOCAL}:{free_port()}"
        self.start()

    def start(self) -> None:
        """Start an empty master at the same addresses. Returns when the master listens."""
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        (rpc, http), quiet = (one.rsplit(":")[1] for one in (self.address, self.metrics)), subprocess.DEVNULL
        self.process = subprocess.Popen(
            [
                str(Path(spec.origin).with_name("mooncake_master")), f"--rpc_port={rpc}", "--rpc_address=127.0.0.1",
                f"--metrics_port={http}", "--metrics_host=127.0.0.1", *self._flags,
            ],
            stdout=quiet, stderr=quiet,
        )  # fmt: skip
        until = time.monotonic() + WAIT_S
        for port in (rpc, http):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", int(port)), 1).close()
                except OSError:
                    assert time.monotonic() < until, "the master does not listen"
                    time.sleep(0.01)
                else:
                    break

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        signals.send(self.process, number)

    def kill(self) -> None:
        """Kill the master and wait for its end."""
        self.process.kill()
        self.process.wait()


@contextmanager
def master(*flags: str) -> Iterator[Master]:
    """Run a master."""
    made = Master(*flags)
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def node(address: str, segment_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that lends memory to the cluster."""
    process = subprocess.Popen(
        [sys.executable, "-c", NODE, address, str(segment_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ.copy(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
