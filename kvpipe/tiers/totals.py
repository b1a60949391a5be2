"""The values of metrics as plain data: running totals and gauges by metric name and label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvpipe.protocol.messages import Kind
from kvpipe.tiers.guard import GuardedTier

Totals = dict[str, Mapping[str, float]]
"""A number for each metric and value of its label. The label's value is "" if the metric has no label."""

_NS_PER_S: Final = 1e9
_NAMES: Final = {kind: kind.name.lower() for kind in Kind}
KINDS: Final = tuple(_NAMES.values())


def copied(sizes: Mapping[Kind, int], times_ns: Mapping[Kind, int]) -> Totals:
    """Return the bytes that a rank copied and the seconds that the copies took, by kind of job."""
    return {
        "copied_bytes": {_NAMES[kind]: size for kind, size in sizes.items()},
        "copy_seconds": {_NAMES[kind]: ns / _NS_PER_S for kind, ns in times_ns.items()},
    }


def left(tiers: Iterable[GuardedTier]) -> dict[str, float]:
    """Return, for each tier and use, 1 if the breaker is open, else 0."""
    return {f"{one.name} {use}": not breaker.allows for one in tiers for use, breaker in one.breakers.items()}
