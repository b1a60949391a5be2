"""The configuration of a Mooncake tier, which is a Mooncake Store cluster. This module imports no client."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from kvpipe.errors import ConfigError
from kvpipe.inputs.config_errors import safe_name
from kvpipe.inputs.values import Size, no_bool
from kvpipe.tiers.spec import TierSpec

if TYPE_CHECKING:
    from kvpipe.tiers.mooncake.tier import MooncakeTier

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class MooncakeSpec(TierSpec):
    """The configuration of a tier on a Mooncake Store cluster."""

    place: ClassVar[tuple[str, ...]] = ("master",)

    kind: Literal["mooncake"] = "mooncake"
    master: str = Field(description="Address of the cluster's master, as `HOST:PORT`.")
    metrics: str = Field(
        "",
        description="The master's HTTP address, as `HOST:PORT`. Without it, values can be neither listed nor counted.",
    )
    metadata_server: str = Field(
        "P2PHANDSHAKE", description="Where members find each other: `P2PHANDSHAKE`, `http://…/metadata`, `etcd://…`."
    )
    local_host: str = Field(
        "",
        description="Name or address by which other members reach this machine. Default: this machine's address "
        "on the route to the master.",
    )
    segment_bytes: Annotated[Size, Field(ge=0)] = Field(
        ByteSize(1 << 30),
        description="Memory that each rank lends to the cluster. The values in it are lost when the rank ends.",
    )
    buffer_bytes: Annotated[Size, Field(ge=1 << 20)] = Field(
        ByteSize(1 << 30),
        description="Shared memory of each rank for values that are being transferred. It is taken from the "
        "system when it is first used. One value takes at most a quarter of it.",
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="Transport between members.")
    device: str = Field("", description="RDMA devices, separated by commas.")
    replicas: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=16)] = Field(
        1, description="Number of copies of each value that is written. Each copy is on another member."
    )

    @field_validator("master", "metrics")
    @classmethod
    def _address(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value)
        if value and (match is None or not 0 < int(match["port"]) < 1 << 16):
            msg = f"{safe_name(value)!r} is not an address; write HOST:PORT"
            raise ValueError(msg)
        return value

    @field_validator("master")
    @classmethod
    def _needed(cls, value: str) -> str:
        if not value:
            msg = "it is empty; write HOST:PORT"
            raise ValueError(msg)
        return value

    @field_validator("metadata_server")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        if "@" in value:
            msg = "the URL contains a password; set it in the environment instead, for example MC_REDIS_PASSWORD"
            raise ValueError(msg)
        if "?" in value:
            msg = "the URL has a query, which may contain a secret; remove the query"
            raise ValueError(msg)
        return value

    def is_local(self) -> bool:
        """See `TierSpec.is_local`. A server on this host is not recognized: the user must set `announce`."""
        return False

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`. The form is `mooncake://HOST:PORT`."""
        if not _ADDRESS.fullmatch(url.netloc) or url.path not in {"", "/"} or url.fragment:
            msg = "expected mooncake://HOST:PORT, with the master's host and port and no path or password"
            raise ValueError(msg)
        return {"master": url.netloc}

    def make(self, name: str, *, writes: bool = True) -> MooncakeTier:
        """See `TierSpec.make`. Without `writes` the tier lends no memory to the cluster."""
        if importlib.util.find_spec("mooncake") is None:
            msg = "a mooncake tier needs Mooncake's client; pip install 'kvpipe[mooncake]'"
            raise ConfigError(msg)
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            msg = "a mooncake tier needs libibverbs.so.1, also without RDMA; install the system's package libibverbs1"
            raise ConfigError(msg) from None
        from kvpipe.tiers.mooncake.tier import MooncakeTier  # noqa: PLC0415  (imported only if such a tier is used)

        return MooncakeTier(name, self, writes=writes)
