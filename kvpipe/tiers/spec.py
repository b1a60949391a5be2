"""How a user says which tiers there are: a URL for the common case, a table of keys for the rest. Imports no client."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult, parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from kvpipe.tiers.base import Tier


def no_bool(value: object) -> object:
    """Refuse True and False where a number is meant; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        msg = "expected a number, not true or false"
        raise ValueError(msg)  # noqa: TRY004  (pydantic turns ValueError into its own report)
    return value


class TierSpec(BaseModel):
    """What every kind of tier can be told. Subclasses add their own keys, each with a description for the README."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    schemes: ClassVar[tuple[str, ...]] = ()
    """URL schemes that stand for this kind."""

    kind: str
    store: Literal["all", "second_use", "never"] = Field(
        "all",
        description="Which chunks are written: every one that is whole, those that were of use once, or none.",
    )
    timeout_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=600_000)] = Field(
        2000, description="Longest wait without a byte moving, or for a connection."
    )
    lanes: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=64)] = Field(
        4, description="Reads, and as many writes, under way at once, per rank."
    )
    encryption_key_env: str = Field(
        "", description="Environment variable with 32 bytes in base64: values are encrypted (AES-256-GCM)."
    )
    encryption_key_file: Path | None = Field(None, description="File with the same.")

    @classmethod
    @abstractmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """Return the keys that `url` stands for, without its query. Raises ValueError saying what to write."""

    @classmethod
    def parse_url(cls, url: SplitResult) -> dict[str, Any]:
        """Return the keys that `url` stands for; its query holds further ones."""
        given = {"kind": cls.model_fields["kind"].default, **cls.from_url(url)}
        for key, value in parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)):
            if key in given:
                msg = f"{key!r} is said twice; leave it out of the query"
                raise ValueError(msg)
            given[key] = value
        return given

    @abstractmethod
    def make(self, name: str, *, writes: bool = True) -> Tier:
        """Return the tier, not yet opened. Imports its client; raises `ConfigError` when that is not installed.

        `writes`: False where it is only asked and read, as in the scheduler's process: what costs memory or a thread
        for writing need not be made.
        """


def secret(env: str, file: Path | None, what: str) -> SecretStr | None:
    """Read a secret from the environment variable or the file that is named; None if neither is. Never from a value.

    Raises:
        ValueError: both are named, or what is named is not there or empty.

    """
    if env and file is not None:
        msg = f"{what}: name a variable or a file, not both"
        raise ValueError(msg)
    if env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", env):
            msg = f"{what}: expected the name of an environment variable"  # it may be the secret itself: not shown
            raise ValueError(msg)
        text = os.environ.get(env, "")
        where = f"environment variable {env}"
    elif file is not None:
        where = f"file {file}"
        try:
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{what}: {where} cannot be read ({type(error).__name__})"
            raise ValueError(msg) from None
    else:
        return None
    if not text:
        msg = f"{what}: {where} is empty or not set"
        raise ValueError(msg)
    return SecretStr(text)
