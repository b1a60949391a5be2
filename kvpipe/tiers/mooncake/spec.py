"""The configuration of a Mooncake tier: a Mooncake Store cluster. Imports no client."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from kvpipe.config_errors import name
from kvpipe.errors import ConfigError
from kvpipe.tiers.spec import TierSpec
from kvpipe.values import Size, no_bool

if TYPE_CHECKING:
    from kvpipe.tiers.mooncake.tier import MooncakeTier

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class MooncakeSpec(TierSpec):
    """A Mooncake Store cluster."""

    place: ClassVar[tuple[str, ...]] = ("master",)

    kind: Literal["mooncake"] = "mooncake"
    master: str = Field(description="The cluster's master, as `HOST:PORT`.")
    metrics: str = Field(
        "", description="The master's HTTP address, as `HOST:PORT`; without it values cannot be listed or counted."
    )
    metadata_server: str = Field(
        "P2PHANDSHAKE", description="Where members find each other: `P2PHANDSHAKE`, `http://…/metadata`, `etcd://…`."
    )
    local_host: str = Field(
        "", description="Name or address by which other members reach this machine; default: the way to the master."
    )
    segment_bytes: Annotated[Size, Field(ge=0)] = Field(
        ByteSize(1 << 30), description="Memory that each rank lends the cluster; its values are gone when it ends."
    )
    buffer_bytes: Annotated[Size, Field(ge=1 << 20)] = Field(
        ByteSize(1 << 30),
        description="Shared memory of each rank for values on their way, taken as it is first used; one value has "
        "at most a quarter of it.",
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="Transport between members.")
    device: str = Field("", description="RDMA devices, separated by commas.")
    replicas: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=16)] = Field(
        1, description="Copies of a value that is written, each with another member."
    )

    @field_validator("master", "metrics")
    @classmethod
    def _address(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value)
        if value and (match is None or not 0 < int(match["port"]) < 1 << 16):
            msg = f"{name(value)!r} is no address; write HOST:PORT"
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
            msg = "it holds a password; give that in the environment, as MC_REDIS_PASSWORD for one"
            raise ValueError(msg)
        if "?" in value:
            msg = "it has a query, which may hold a secret; leave that out"
            raise ValueError(msg)
        return value

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`: `mooncake://HOST:PORT`."""
        if not _ADDRESS.fullmatch(url.netloc) or url.path not in {"", "/"} or url.fragment:
            msg = "expected mooncake://HOST:PORT, with the master's host and port and no path or password"
            raise ValueError(msg)
        return {"master": url.netloc}

    def make(self, name: str, *, writes: bool = True) -> MooncakeTier:
        """See `TierSpec.make`. Without `writes` no memory is lent."""
        if importlib.util.find_spec("mooncake") is None:
            msg = "a mooncake tier needs Mooncake's client; pip install 'kvpipe[mooncake]'"
            raise ConfigError(msg)
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            msg = "a mooncake tier needs libibverbs.so.1, also without RDMA; install the system's package libibverbs1"
            raise ConfigError(msg) from None
        from kvpipe.tiers.mooncake.tier import MooncakeTier  # noqa: PLC0415  (only where it is used)

        return MooncakeTier(name, self, writes=writes)
