"""The configuration of tiers: a URL for the common case, or a table of keys. This module imports no client."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import SplitResult, parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from kvpipe.inputs import files
from kvpipe.inputs.config_errors import safe_name
from kvpipe.inputs.values import LocalPath, Variable, no_bool
from kvpipe.tiers.base import Tier

SECRET_FILE_BYTES_MAX: Final = 64 << 10


class TierSpec(BaseModel):
    """The configuration keys that all kinds of tiers have. A subclass adds keys, described for `docs/tiers.md`.

    Neither messages nor `kvpipe check` show the value of a key with ``repr=False``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    place: ClassVar[tuple[str, ...]] = ()
    """The configuration keys that identify the store. Two tiers with equal values of these keys are the same store.

    If `place` is empty, all keys are compared.
    """
    medium: ClassVar[Literal["disk", "network"]] = "network"
    """The kind of place that keeps the values, for the engine's metric of hits by source."""

    kind: str
    """The kind of the tier, which is also the name of its entry point. A subclass narrows the type to one literal."""
    store: Literal["all", "second_use", "never"] = Field(
        "all",
        description="Which chunks are written: `all` (all whole chunks), `second_use` (those that a second request "
        "uses) or `never`.",
    )
    timeout_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=600_000)] = Field(
        2000, description="Longest wait for a connection, and longest wait in which no byte moves."
    )
    lanes: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=64)] = Field(
        4, description="Number of reads, and number of writes, that may be in flight at once, per rank."
    )
    encryption_key_env: Variable = Field(
        "",
        description="Environment variable with a key of 32 bytes in base64. Values are encrypted with it "
        "(AES-256-GCM), and their names are hidden. It may have several keys, separated by blanks: "
        "the first key encrypts, any key decrypts.",
    )
    encryption_key_file: LocalPath | None = Field(
        None,
        description="File with the same keys, one per line, instead of `encryption_key_env`. Only its "
        "owner may read it.",
    )

    announce: Literal["auto", "local", "remote", "never"] = Field(
        "auto",
        description="Locality of the tier's chunks in KV events, if vLLM publishes KV events: `local`, `remote`, "
        "`auto` (kvpipe finds the locality) or `never` (no events).",
    )

    @property
    def locality(self) -> Literal["", "local", "remote"]:
        """The locality of the tier's values: `announce`, or else the locality that kvpipe detects. "" means unknown."""
        if self.announce in {"local", "remote"}:
            return self.announce
        local = self.is_local()
        return "" if local is None else "local" if local else "remote"

    def is_local(self) -> bool | None:
        """Whether the tier's values are on this host. None means unknown."""
        return None

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:  # noqa: ARG003
        """Return the configuration keys that `url` gives, without the keys of the URL's query.

        Raises ValueError if the tier has no such URL. The message names the accepted form.
        """
        raise ValueError("this kind of tier has no URLs; write a table of keys with 'kind'")

    @classmethod
    def parse_url(cls, url: SplitResult) -> dict[str, Any]:
        """Return the configuration keys that `url` and its query give. Raises ValueError if `url` is wrong."""
        given = {"kind": cls.model_fields["kind"].default, **cls.from_url(url)}
        for key, value in parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)):
            if key in given:
                msg = f"{safe_name(key)!r} is given twice; leave it out of the query"
                raise ValueError(msg)
            given[key] = value
        return given

    @abstractmethod
    def make(self, name: str, *, writes: bool = True) -> Tier:
        """Import the client, and return a closed tier. Raises `ConfigError` if the client is not installed.

        `writes` is False if the caller only looks up and reads values, as the scheduler's process does. Such a tier
        needs no memory or threads for writes.
        """


def secret(env: str, file: Path | None, what: str) -> SecretStr | None:
    """Return the secret in the environment variable `env` or in `file`, or None if neither is given.

    `what` is the configuration key of the secret, for error messages.

    Raises:
        ValueError: `env` and `file` are both given, or the given source does not exist, cannot be read or is empty. The
            message does not show a name that may be the secret itself.

    """
    if env and file is not None:
        msg = f"{what}: name a variable or a file, not both"
        raise ValueError(msg)
    key = what if what.endswith(("_env", "_file")) else f"{what.replace(' ', '_')}_{'env' if env else 'file'}"
    if env:
        text = os.environ.get(env, "")
        where = f"environment variable {env}"
        if env not in os.environ:  # `env` may be the secret itself, so that the message must not show it
            where = f"the environment variable that {key} names"
    elif file is not None:
        there = file.is_absolute() and len(file.parts) > 2 and file.parent.is_dir()  # noqa: PLR2004  (/FOLDER/FILE)
        where = f"file {file}" if there else f"the file that {key} names"
        try:
            text = files.read_small(file, SECRET_FILE_BYTES_MAX).decode().strip()
        except files.OddFileError as error:
            msg = f"{what}: {where} cannot be read ({error})"
            raise ValueError(msg) from None
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{what}: {where} cannot be read ({type(error).__name__})"
            raise ValueError(msg) from None
    else:
        return None
    if not text:
        msg = f"{what}: {where} is empty or not set"
        raise ValueError(msg)
    return SecretStr(text)
