"""Lists of hosts in a configuration. An entry is a name, an address, `*.DOMAIN` or a network."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Final

from kvpipe.inputs.config_errors import safe_name

_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def check_hosts(text: str) -> str:
    """Return a comma-separated list of hosts unchanged. Raises ValueError naming an entry that is not a host."""
    for one in _split(text):
        if _network(one) is None and not _NAME.fullmatch(one):
            msg = f"{safe_name(one)!r} is not a host name, an IP address, *.DOMAIN or a network"
            raise ValueError(msg)
    return text


def among(host: str, text: str) -> bool:
    """Whether `host` matches an entry of the list of hosts `text`."""
    address = _network(host)
    for one in _split(text.lower()):
        network = _network(one)
        if network is None:
            lower = host.lower().rstrip(".")
            if lower == one or (one.startswith("*.") and lower.endswith(one[1:])):
                return True
        elif address is not None and address.version == network.version and address[0] in network:
            return True
    return False


def _split(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _network(text: str) -> _Network | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    return None
