"""The configuration of tiers: a URL for the common case, or a table of keys. Imports no client."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import SplitResult, parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from kvpipe import files
from kvpipe.config_errors import name
from kvpipe.tiers.base import Tier
from kvpipe.values import LocalPath, Variable, no_bool

SECRET_FILE_BYTES_MAX: Final = 64 << 10


class TierSpec(BaseModel):
    """The configuration of any kind of tier. Subclasses add keys, each with a description for `docs/tiers.md`.

    The value of a key with ``repr=False`` is shown nowhere: neither in messages nor by `kvpipe check`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    place: ClassVar[tuple[str, ...]] = ()
    """Configuration keys that identify the store: two tiers with the same values of them are one. Empty: all keys."""

    kind: str
    """A literal, with itself as the default: the name of the kind's entry point."""
    store: Literal["all", "second_use", "never"] = Field(
        "all",
        description="Which chunks are written: all that are whole, those that a second request uses, or none.",
    )
    timeout_ms_max: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=600_000)] = Field(
        2000, description="Longest wait without a byte moving, or for a connection."
    )
    lanes: Annotated[int, BeforeValidator(no_bool), Field(gt=0, le=64)] = Field(
        4, description="Reads, and as many writes, under way at once, per rank."
    )
    encryption_key_env: Variable = Field(
        "",
        description="Environment variable with 32 bytes in base64: values are encrypted (AES-256-GCM), and their names "
        "hidden. Several, with blanks between them: the first encrypts, any decrypts.",
    )
    encryption_key_file: LocalPath | None = Field(
        None, description="File with the same, a key per line, that only its owner may read."
    )

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:  # noqa: ARG003
        """Return the keys that `url` stands for, without its query. Raises ValueError: what to write instead."""
        raise ValueError("it has no URLs; write a table of keys with 'kind'")

    @classmethod
    def parse_url(cls, url: SplitResult) -> dict[str, Any]:
        """Return the keys that `url` and its query stand for. Raises ValueError if it is wrong."""
        given = {"kind": cls.model_fields["kind"].default, **cls.from_url(url)}
        for key, value in parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)):
            if key in given:
                msg = f"{name(key)!r} is given twice; leave it out of the query"
                raise ValueError(msg)
            given[key] = value
        return given

    @abstractmethod
    def make(self, name: str, *, writes: bool = True) -> Tier:
        """Return the tier, not yet opened. Imports its client; raises `ConfigError` if that is not installed.

        `writes`: False where values are only looked up and read, as in the scheduler's process: then memory or threads
        for writing are not needed.
        """


def secret(env: str, file: Path | None, what: str) -> SecretStr | None:
    """Return the secret in the environment variable `env` or in `file`; None if neither is named.

    `what`: its configuration key, for errors.

    Raises:
        ValueError: both are named, or the named one does not exist, cannot be read or is empty. The message does not
            show a name that may be the secret itself.

    """
    if env and file is not None:
        msg = f"{what}: name a variable or a file, not both"
        raise ValueError(msg)
    key = what if what.endswith(("_env", "_file")) else f"{what.replace(' ', '_')}_{'env' if env else 'file'}"
    if env:
        text = os.environ.get(env, "")
        where = f"environment variable {env}"
        if env not in os.environ:  # it may be the secret itself: not shown
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
