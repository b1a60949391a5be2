"""Finds the settings of vLLM that change the KV of equal weights but change neither the weights nor the caches.

Examples are precision, quantization of activations, random experts, and the choice of kernels. The lists of irrelevant
settings are in `reviewed_variables.py` and `reviewed_fields.py`. Every setting that is not in these lists is part of
the key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm import envs

from kvpipe.connectors.vllm.identity import drafters, reviewed_fields, reviewed_variables
from kvpipe.connectors.vllm.identity.media import described

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VARIABLES: Final = frozenset(name for names in reviewed_variables.IRRELEVANT.values() for name in names.split())
_FIELDS: Final = frozenset[str]().union(*reviewed_fields.IRRELEVANT.values())


class Computed(NamedTuple):
    """Settings by name, as plain data.

    `of_ranks` has the settings that choose how ranks divide work and add up results. `alone` has all other settings.
    """

    alone: dict[str, str]
    of_ranks: dict[str, str]


def settings(config: VllmConfig) -> Computed:
    """Return all settings that are not listed as irrelevant to KV. Equal engines get equal results in every run."""
    found = Computed({}, {})
    for name in sorted(envs.environment_variables):
        among_ranks = name in reviewed_variables.OF_RANKS
        if among_ranks or name in reviewed_variables.PART:
            (found.of_ranks if among_ranks else found.alone)[name] = described(functools.partial(getattr, envs, name))
        elif name not in _VARIABLES and name in os.environ:  # a digest: an unknown variable may be a secret
            found.alone[name] = hashlib.sha256(os.environ[name].encode()).hexdigest()
    passed_over = frozenset[str]() if drafters.has_kv(config) else frozenset({"speculative_config"})
    for name, among_ranks, read in _walk(config, "", passed_over):
        (found.of_ranks if among_ranks else found.alone)[name] = described(read)
    return found


_Field = tuple[str, bool, Callable[[], object]]
"""(path of a field, whether it belongs to `Computed.of_ranks`, a function that reads the field)."""


def _walk(config: Any, place: str, passed_over: frozenset[str]) -> Iterator[_Field]:  # noqa: ANN401
    """Yield the relevant fields whose values differ from their defaults."""
    kinds = [kind.__name__ for kind in type(config).__mro__]
    for field in dataclasses.fields(config):
        names, value = {*kinds, *(f"{kind}.{field.name}" for kind in kinds)}, getattr(config, field.name, None)
        if names & _FIELDS or field.name in passed_over:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _walk(value, f"{place}{field.name}.", passed_over)
        elif not _usual(field, value):
            yield (
                f"{place}{field.name}",
                bool(names & reviewed_fields.OF_RANKS),
                functools.partial(getattr, config, field.name),
            )


def _usual(field: dataclasses.Field[Any], value: object) -> bool:
    """Whether the value is the field's default. Fields with defaults are left out of the facts."""
    default = getattr(field.default, "default", field.default)  # pydantic keeps the default in a field description
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # noqa: BLE001  (a value that cannot be compared counts)
        return False
