"""The catalogue of bugs to put back in: those that killed a layerwise cache in production, and others that would."""

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
    models,
    policies,
    pool,
    publishing,
    races,
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
        policies,
        spans,
        halves,
    )
    for name, mutant in area.MUTANTS.items()
}
