"""The configuration of a Redis or Valkey tier. This module imports no client."""

from __future__ import annotations

import importlib.util
import re
import ssl
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import SplitResult, unquote

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvpipe.errors import ConfigError
from kvpipe.inputs.values import LocalPath, Variable, no_bool
from kvpipe.tiers import hosts
from kvpipe.tiers.base import Tier
from kvpipe.tiers.redis.resp import connection_reason
from kvpipe.tiers.spec import TierSpec, secret

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
    port: Annotated[int, BeforeValidator(no_bool), Field(gt=0, lt=65536)] = Field(
        PORT, description="Port of the server."
    )
    db: Annotated[int, BeforeValidator(no_bool), Field(ge=0, lt=1 << 31)] = Field(0, description="Database number.")
    cluster: bool = Field(
        default=False,
        description="Whether the server belongs to a cluster. Values are then spread over the cluster's primaries.",
    )
    cluster_hosts: Annotated[str, AfterValidator(hosts.check_hosts)] = Field(
        "",
        description="Hosts of the cluster, in addition to `host`, to which the password is sent: names, "
        "addresses, `*.DOMAIN` or networks such as `10.0.0.0/8`, separated by commas.",
        max_length=4000,
    )
    username: str = Field("", description="User in the server's access control list. Empty: `default`.", repr=False)
    password_env: Variable = Field("", description="Environment variable with the password.")
    password_file: LocalPath | None = Field(None, description="File with the password.")
    tls: bool = Field(
        default=False, description="Encrypt the connection, and verify the server's certificate and host name."
    )
    tls_ca_file: LocalPath | None = Field(
        None, description="File with the certificate authorities to trust (PEM), instead of the system's."
    )
    tls_cert_file: LocalPath | None = Field(None, description="File with the certificate to show to the server (PEM).")
    tls_key_file: LocalPath | None = Field(None, description="File with the private key of `tls_cert_file` (PEM).")
    ttl_s: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=10 * 366 * 86400)] = Field(
        0,
        description="Seconds after which the server drops a value that was not used. 0: no value is dropped "
        "for its age.",
    )
    prefix: str = Field(
        "kvpipe", description="Beginning of the server's keys, before a ':'.", pattern=r"^[A-Za-z0-9_.:-]{1,64}$"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_password(cls, given: object) -> object:
        if isinstance(given, dict) and "password" in given:
            raise ValueError(f"the configuration must not contain a password; {_REMEDY}")
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

    def is_local(self) -> bool:
        """See `TierSpec.is_local`. A server on this host is not recognized: the user must set `announce`."""
        return False

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`. The form is redis://HOST:6379/DB, or rediss:// for TLS."""
        if url.password is not None:
            raise ValueError(f"a URL must not contain a password; {_REMEDY}")
        if not url.hostname:
            raise ValueError("the host is missing; write redis://HOST:6379/0")
        db = url.path.strip("/")
        if not re.fullmatch(r"[0-9]{0,10}", db):
            raise ValueError("the path is not the number of a database; write redis://HOST:6379/0")
        message = {
            "host": url.hostname,
            "port": url.port,
            "db": int(db) if db else None,
            "username": unquote(url.username or "") or None,
            "tls": url.scheme in {"rediss", "valkeys"} or None,
        }
        return {key: value for key, value in message.items() if value is not None}

    def make(self, name: str, *, writes: bool = True) -> Tier:  # noqa: ARG002  (connections are made on first use)
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
        """Return a TLS context with the certificates. Each call reads the files, because they may have been renewed.

        Raises OSError if a file cannot be used. The error names the file's configuration key.
        """
        what = f"tls_ca_file={self.tls_ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                what = f"tls_cert_file={self.tls_cert_file}, tls_key_file={self.tls_key_file}"
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file, password="")  # do not prompt
        except OSError as error:
            raise OSError(f"{what} cannot be used ({connection_reason(error)}); give readable PEM files") from None
        return context
