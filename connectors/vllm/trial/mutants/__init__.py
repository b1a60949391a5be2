"""The catalogue of bugs to put back in: bugs that broke a layerwise cache in production, and similar bugs."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants import (
    adapters,
    beside,
    calls,
    copies,
    efficacy,
    finding,
    halves,
    identity,
    keys,
    layouts,
    limits,
    marks,
    models,
    node,
    policies,
    pool,
    publishing,
    races,
    sleep,
    spans,
    states,
    tenants,
    tiers,
)
from kvpipe.connectors.vllm.trial.mutants.base import Mutant, Patch

__all__ = ["MUTANTS", "Mutant", "Patch"]

MUTANTS: dict[str, Mutant] = {
    name: mutant
    for area in (
        adapters,
        beside,
        calls,
        copies,
        keys,
        publishing,
        races,
        finding,
        identity,
        efficacy,
        tiers,
        tenants,
        models,
        pool,
        states,
        layouts,
        limits,
        policies,
        spans,
        halves,
        sleep,
        node,
        marks,
    )
    for name, mutant in area.MUTANTS.items()
}
