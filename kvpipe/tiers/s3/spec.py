"""The configuration of a tier in an object store. This module imports no client."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import ByteSize, Field, model_validator

from kvpipe.errors import ConfigError
from kvpipe.inputs.config_errors import safe_name
from kvpipe.inputs.values import LocalPath, Size, Variable
from kvpipe.tiers.spec import TierSpec, secret

if TYPE_CHECKING:
    from kvpipe.tiers.s3.tier import S3Tier

SCHEMES: Final = ("s3", "gs", "az")


class S3Spec(TierSpec):
    """The configuration of an S3 tier."""

    place: ClassVar[tuple[str, ...]] = ("url", "endpoint")

    kind: Literal["s3"] = "s3"
    url: str = Field(description="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX.")
    endpoint: str = Field("", description="URL of your own server, for s3. Empty: the cloud's URL.")
    allow_http: bool = Field(default=False, description="Allow an endpoint without TLS.")
    region: str = Field("", description="Region, for s3; empty: AWS_REGION, or us-east-1.", pattern=r"^[A-Za-z0-9-]*$")
    access_key_env: Variable = Field(
        "",
        description="Environment variable with the access key, for s3. If no key is given, the cloud's usual "
        "sources are used.",
    )
    access_key_file: LocalPath | None = Field(
        None, description="File with the access key, instead of `access_key_env`."
    )
    secret_key_env: Variable = Field("", description="Environment variable with the secret key, for s3.")
    secret_key_file: LocalPath | None = Field(
        None, description="File with the secret key, instead of `secret_key_env`."
    )
    read_bytes: Annotated[Size, Field(ge=1 << 20, le=1 << 30)] = Field(
        ByteSize(8 << 20),
        description="Largest range that is read at once, in bytes. A larger value is read in "
        "ranges of this size, in parallel.",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        url, shown = _split("url", self.url), safe_name(self.url)
        example = "az://ACCOUNT/CONTAINER/PREFIX" if url.scheme == "az" else f"{url.scheme or 's3'}://BUCKET/PREFIX"
        if "@" in url.netloc:
            raise ValueError("url: a URL must not contain a key; name a variable in access_key_env, secret_key_env")
        if url.scheme not in SCHEMES or not url.netloc or url.query or url.fragment:
            raise ValueError(f"url={shown!r} names no bucket; write {example}")
        if url.scheme == "az" and not url.path.strip("/"):
            raise ValueError(f"url={shown!r} names no container; write {example}")
        if any(part in {"", ".", ".."} for part in url.path.strip("/").split("/")) and url.path.strip("/"):
            raise ValueError(f"url={shown!r} has an empty part, '.' or '..' in its path; write {example}")
        self._agree_on_keys(url.scheme)
        self._agree_on_endpoint()
        return self

    def _agree_on_keys(self, scheme: str) -> None:
        sides = [(bool(getattr(self, f"{s}_key_env")), getattr(self, f"{s}_key_file")) for s in ("access", "secret")]
        named = [env or file is not None for env, file in sides]
        if named[0] != named[1]:
            raise ValueError("the access key and the secret key belong together; name both, or neither")
        if scheme != "s3" and (named[0] or self.endpoint or self.region):
            raise ValueError(
                f"endpoint, region, access_key_* and secret_key_* are for s3://, not {scheme}://, which takes its "
                "credentials from the environment; leave them out"
            )

    def _agree_on_endpoint(self) -> None:
        end, shown = _split("endpoint", self.endpoint), safe_name(self.endpoint)
        if "@" in end.netloc:
            raise ValueError("endpoint: a URL must not contain a key; name a variable in access_key_env")
        if self.endpoint and (end.scheme not in {"http", "https"} or not end.netloc or end.query or end.fragment):
            raise ValueError(f"endpoint={shown!r} is not the URL of a server; write https://HOST:PORT")
        if end.scheme == "http" and not self.allow_http:
            raise ValueError(
                f"endpoint={shown!r} has no TLS, so others can read all values; write https, or set allow_http=true"
            )

    def is_local(self) -> bool:
        """See `TierSpec.is_local`. A server on this host is not recognized: the user must set `announce`."""
        return False

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`. The form is s3://BUCKET/PREFIX?endpoint=https://HOST."""
        return {"url": url._replace(query="").geturl()}

    def make(self, name: str, *, writes: bool = True) -> S3Tier:
        """See `TierSpec.make`. Without `writes` the tier has no lanes for writes."""
        if importlib.util.find_spec("obstore") is None:
            raise ConfigError(f"kvpipe: tier {name} needs the object store client; run pip install 'kvpipe[s3]'")
        try:
            access = secret(self.access_key_env, self.access_key_file, "access key")
            hidden = secret(self.secret_key_env, self.secret_key_file, "secret key")
        except ValueError as error:
            raise ConfigError(f"kvpipe: tier {name}: {error}") from None
        keys = {"access_key_id": access, "secret_access_key": hidden}
        from kvpipe.tiers.s3.tier import S3Tier  # noqa: PLC0415  (imported only if such a tier is used)

        return S3Tier(name, self, {key: value for key, value in keys.items() if value is not None}, writes=writes)


def _split(key: str, text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        url.port  # noqa: B018  (reading the property parses the port)
    except ValueError:  # this error is dropped, because its message would show a part of the text, which may be secret
        raise ValueError(f"{key}={safe_name(text)!r} is not a valid URL; write special characters as %XX") from None
    if "\0" in text:
        raise ValueError(f"{key}={safe_name(text)!r} has a zero byte; leave it out")
    return url
