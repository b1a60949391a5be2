"""The configuration of a Redis or Valkey tier. Imports no client."""

from __future__ import annotations

import importlib.util
import re
import ssl
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import SplitResult, unquote

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvpipe.errors import ConfigError
from kvpipe.tiers import hosts
from kvpipe.tiers.base import Tier
from kvpipe.tiers.redis.resp import reason
from kvpipe.tiers.spec import TierSpec, secret
from kvpipe.values import LocalPath, Variable, no_bool

PORT: Final = 6379


_REMEDY: Final = "name a variable in password_env or a file in password_file instead"


class RedisSpec(TierSpec):
    """The configuration of a Redis or Valkey tier."""

    place: ClassVar[tuple[str, ...]] = ("host", "port", "db", "prefix")

    kind: Literal["redis"] = "redis"
    host: str = Field(
        description="Name or address of the server, or of any server of the cluster.",
        pattern=r"^[^\s/@?#=&\x00]+$",
        max_length=255,
    )
    port: Annotated[int, BeforeValidator(no_bool), Field(gt=0, lt=65536)] = Field(PORT, description="Its port.")
    db: Annotated[int, BeforeValidator(no_bool), Field(ge=0, lt=1 << 31)] = Field(0, description="Database number.")
    cluster: bool = Field(default=False, description="It is a cluster: values are spread over its primaries.")
    cluster_hosts: Annotated[str, AfterValidator(hosts.check)] = Field(
        "",
        description="Hosts of the cluster, beside `host`, that are given the password: names, addresses, `*.DOMAIN` or "
        "networks such as `10.0.0.0/8`, separated by commas.",
        max_length=4000,
    )
    username: str = Field("", description="User of its access control list; empty: `default`.", repr=False)
    password_env: Variable = Field("", description="Environment variable with the password.")
    password_file: LocalPath | None = Field(None, description="File with the password.")
    tls: bool = Field(default=False, description="Encrypt the connection; certificate and host name are verified.")
    tls_ca_file: LocalPath | None = Field(None, description="Authorities to trust instead of the system's (PEM).")
    tls_cert_file: LocalPath | None = Field(None, description="Certificate to show to the server (PEM).")
    tls_key_file: LocalPath | None = Field(None, description="Its private key (PEM).")
    ttl_s: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=10 * 366 * 86400)] = Field(
        0, description="Values that were not used for so long are dropped by the server; 0: never for their age."
    )
    prefix: str = Field(
        "kvpipe", description="What the server's keys begin with, before a ':'.", pattern=r"^[A-Za-z0-9_.:-]{1,64}$"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_password(cls, given: object) -> object:
        if isinstance(given, dict) and "password" in given:
            raise ValueError(f"a password is not written into the configuration; {_REMEDY}")
        return given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.cluster and self.db:
            raise ValueError(f"db={self.db}: a cluster has database 0 only; leave db out")
        if self.cluster_hosts and not self.cluster:
            raise ValueError("cluster_hosts is of no use without a cluster; set cluster to true, or leave it out")
        for key in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if getattr(self, key) is not None and not self.tls:
                raise ValueError(f"{key} is of no use without TLS; set tls to true, or write rediss://")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; set both or neither")
        return self

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`: redis://HOST:6379/DB, rediss:// for TLS."""
        if url.password is not None:
            raise ValueError(f"a password is not written into a URL; {_REMEDY}")
        if not url.hostname:
            raise ValueError("the host is missing; write redis://HOST:6379/0")
        db = url.path.strip("/")
        if not re.fullmatch(r"[0-9]{0,10}", db):
            raise ValueError("its path is no number of a database; write redis://HOST:6379/0")
        message = {
            "host": url.hostname,
            "port": url.port,
            "db": int(db) if db else None,
            "username": unquote(url.username or "") or None,
            "tls": url.scheme in {"rediss", "valkeys"} or None,
        }
        return {key: value for key, value in message.items() if value is not None}

    def make(self, name: str, *, writes: bool = True) -> Tier:  # noqa: ARG002  (connections are made when they are wanted)
        """See `TierSpec.make`."""
        if importlib.util.find_spec("redis") is None:
            raise ConfigError(f"kvpipe: tier {name} needs the redis client; run pip install 'kvpipe[redis]'")
        try:
            password = secret(self.password_env, self.password_file, "password")
            if self.tls:
                self.tls_context()
        except (ValueError, OSError) as error:
            raise ConfigError(f"kvpipe: tier {name}: {error}") from None
        from kvpipe.tiers.redis.tier import RedisTier  # noqa: PLC0415  (imports the client)

        return RedisTier(name, self, password.get_secret_value() if password else "")

    def tls_context(self) -> ssl.SSLContext:
        """Read the certificates, which may have been renewed. Raises OSError naming the key whose file is wrong."""
        what = f"tls_ca_file={self.tls_ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                what = f"tls_cert_file={self.tls_cert_file}, tls_key_file={self.tls_key_file}"
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file, password="")  # never ask the terminal
        except OSError as error:
            raise OSError(f"{what} cannot be used ({reason(error)}); give readable PEM files") from None
        return context
