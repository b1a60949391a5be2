"""Redis and S3 servers behind TLS. A server's certificate can be replaced while clients are connected."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.rigs.servers.proxy import Proxy
from tests.rigs.servers.redis import Certificates, certificates
from tests.rigs.servers.s3 import shared
from tests.rigs.servers.sockets import LOCAL
from tests.rigs.tier_worlds.redis import single
from tests.rigs.tier_worlds.s3 import spec_of

KINDS = ("redis", "s3")


class Secured:
    """A server with TLS. `keys`: the specification of a client that trusts only the authority in the file `trusted`."""

    def __init__(self, kind: str, folder: Path) -> None:
        """Make three certificates in `folder`: two certificates of one authority, and one of another authority.

        The server does not listen yet.
        """
        folders = {name: folder / name for name in ("first", "renewed", "other")}
        for place in folders.values():
            place.mkdir(parents=True)
        first = certificates(folders["first"])
        self._files: dict[str, Certificates] = {
            "first": first,
            "renewed": certificates(folders["renewed"], folders["first"]),
            "other": certificates(folders["other"]),
        }
        self.trusted = Path(shutil.copy(first.ca, folder / "trusted.pem"))
        self._kind, self._context = kind, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.num_tickets = 0  # refuses to resume TLS sessions, as a restarted server does
        self._context.options |= ssl.OP_NO_TICKET
        self.proxy = Proxy(single("redis").port if kind == "redis" else shared().port, self._context)
        self.show("first")

    def show(self, name: str) -> None:
        """Let the server use the certificate of this name from now on."""
        self._context.load_cert_chain(self._files[name].cert, self._files[name].key)

    def trust(self, name: str) -> None:
        """Write the authority of this certificate into the client's file."""
        shutil.copy(self._files[name].ca, self.trusted)

    @property
    def keys(self) -> dict[str, Any]:
        """The tier's specification."""
        if self._kind == "s3":
            reported = spec_of(shared(), endpoint=f"https://{LOCAL}:{self.proxy.port}", allow_http=False)
            return reported.model_dump(mode="json", exclude_none=True)
        return {"kind": "redis", "host": LOCAL, "port": self.proxy.port, "tls": True, "tls_ca_file": str(self.trusted)}


@contextmanager
def secured(kind: str, folder: Path) -> Iterator[Secured]:
    """Run a server with TLS.

    Meanwhile a client trusts the authority in its file instead of the system's authorities.
    """
    server = Secured(kind, folder)
    with server.proxy, mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(server.trusted)}):
        yield server
