"""The configuration of quotas. A quota guarantees and limits the share of the pool for requests of a `cache_salt`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from kvpipe.errors import ConfigError
from kvpipe.inputs import config_errors
from kvpipe.inputs.cache_names import check_name
from kvpipe.inputs.unique_keys import TwiceError, parse_json
from kvpipe.inputs.values import Variable, no_bool

QUOTAS_MAX: Final = 256
SALT_CHARS_MAX: Final = 4096
OTHERS: Final = "others"
_EXAMPLE: Final = '{"name": "alice", "salt_env": "ALICE_SALT", "share": 0.25, "limit": 0.5}'
_ROUNDING: Final = 1e-9


class QuotaSpec(BaseModel):
    """One quota. The quota `others` applies to all requests without a salt and to all salts without a quota."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)

    name: Annotated[str, AfterValidator(check_name)] = Field(
        description=f"Name of the quota in messages and metrics. `{OTHERS}` is the quota of all requests whose "
        "salt has no quota."
    )
    salt: Annotated[SecretStr, Field(min_length=1, max_length=SALT_CHARS_MAX)] | None = Field(
        None, description="The `cache_salt` of the quota's requests. It is never shown."
    )
    salt_env: Variable = Field("", description="Environment variable with the `cache_salt`, instead of `salt`.")
    share: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = Field(
        0.0, description="Part of the pool that requests of other quotas cannot take from this quota."
    )
    limit: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)] = Field(
        1.0, description="Largest part of the pool that the quota's requests may hold."
    )

    @model_validator(mode="after")
    def _fits(self) -> QuotaSpec:
        given = (self.salt is not None) + bool(self.salt_env)
        if self.name == OTHERS and given:
            raise ValueError(f"{OTHERS} has no salt: remove salt and salt_env, or give the quota another name")
        if self.name != OTHERS and given != 1:
            raise ValueError("set exactly one of salt and salt_env")
        if self.limit < self.share:
            raise ValueError(f"limit={self.limit:g} is less than share={self.share:g}; raise limit, or lower share")
        return self

    def read_salt(self) -> str:
        """Return the salt, or "" for `others`. Raises `ConfigError` if the variable is unset, empty or too long."""
        if not self.salt_env:
            return self.salt.get_secret_value() if self.salt is not None else ""
        salt = os.environ.get(self.salt_env, "")
        if not salt or len(salt) > SALT_CHARS_MAX:
            # The user may have written the salt itself instead of a variable's name, so the message hides the name.
            which = self.salt_env if self.salt_env in os.environ else "that salt_env names"
            raise ConfigError(
                f"kvpipe: quotas: {self.name}: environment variable {which} is not set, empty or longer than "
                f"{SALT_CHARS_MAX} characters; set it to the cache_salt of its requests"
            )
        return salt

    def slots(self, pool: int) -> tuple[int, int]:
        """Return (number of guaranteed slots, limit on slots) for a pool of `pool` slots. The limit is at least 1."""
        return int(self.share * pool + _ROUNDING), max(1, int(self.limit * pool + _ROUNDING))


def parse_quotas(value: object) -> tuple[QuotaSpec, ...]:
    """Parse the configuration's `quotas`: a list of tables, or the JSON text of such a list.

    Raises:
        ConfigError: an entry is wrong, two quotas have the same name, or the shares exceed 1. The message shows no
            salt.

    """
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else ()
        except TwiceError as error:
            raise ConfigError(f"kvpipe: quotas: {error}") from None
        except (ValueError, RecursionError) as error:
            msg = f"kvpipe: quotas is not JSON ({config_errors.error_place(error)}); write a list such as [{_EXAMPLE}]"
            raise ConfigError(msg) from None
    if not isinstance(value, Sequence) or isinstance(value, bytes | str):
        msg = f"kvpipe: quotas is of type {type(value).__name__}, not a list; write a list such as [{_EXAMPLE}]"
        raise ConfigError(msg)
    if len(value) > QUOTAS_MAX:
        raise ConfigError(f"kvpipe: quotas has {len(value)} entries; give at most {QUOTAS_MAX}")
    specs = tuple(one if isinstance(one, QuotaSpec) else _parse(one, at) for at, one in enumerate(value, 1))
    if twice := [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]:
        raise ConfigError(f"kvpipe: quotas: two quotas have the name {twice[0]!r}; give each its own name")
    if (shares := sum(spec.share for spec in specs)) > 1 + _ROUNDING:
        raise ConfigError(f"kvpipe: quotas: the shares add up to {shares:g} of the pool; lower them to at most 1")
    return specs


def salts(specs: Sequence[QuotaSpec]) -> dict[str, QuotaSpec]:
    """Return the quotas by salt, without `others`.

    Raises:
        ConfigError: two quotas have the same salt, or a salt cannot be read.

    """
    out: dict[str, QuotaSpec] = {}
    for spec in specs:
        if spec.name != OTHERS and out.setdefault(spec.read_salt(), spec) is not spec:
            first = out[spec.read_salt()].name
            raise ConfigError(f"kvpipe: quotas: {first} and {spec.name} have the same salt; remove one of them")
    return out


def _parse(value: object, at: int) -> QuotaSpec:
    if not isinstance(value, Mapping):
        msg = f"kvpipe: quotas: entry {at} is of type {type(value).__name__}; write a table such as {_EXAMPLE}"
        raise ConfigError(msg)
    given = {key if isinstance(key, str) else config_errors.safe_name(key): one for key, one in value.items()}
    try:
        return QuotaSpec.model_validate(given)
    except ValidationError as error:
        why = config_errors.first_problem(error, QuotaSpec.model_fields, "a quota has")
        raise ConfigError(f"kvpipe: quotas: entry {at}: {why}") from None
