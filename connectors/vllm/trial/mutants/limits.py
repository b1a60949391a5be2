"""Bugs in the limits of requests: how much is loaded and saved, and which tiers are asked."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import LOOKUPS, SAVING, Mutant, one

MUTANTS: dict[str, Mutant] = {
    "loads_without_limit": Mutant(
        "A hit is longer than the request's `max_load_tokens`.",
        one(LOOKUPS, "_held", "self._prefixes.longest(tracked.request, units_max=units_max)",
            "self._prefixes.longest(tracked.request)"),
        "limits",
        "limits_are_kept",
    ),
    "saves_without_limit": Mutant(
        "More of a request is saved than its `max_offload_tokens`.",
        one(SAVING, "_units_max", "tracked.limits.save_units_max(self._unit)", "None"),
        "limits",
        "limits_are_kept",
    ),
    "tiers_without_limit": Mutant(
        "A tier is asked that the request's `kv_load_tiers` leave out.",
        one("kvpipe.tiers.finder:Finder", "_find", "index not in lookup.tiers", "False"),
        test="tests/scheduler/test_limits.py::test_only_tiers_that_a_matcher_stands_for_are_asked",
    ),
}  # fmt: skip
