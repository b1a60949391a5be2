"""What one tenant learns of another."""

from __future__ import annotations

from kvpipe.testing.mutants.base import PREFIXES, SCHEDULER, Mutant, Patch

_TENANTS = "tests/contract/test_tenants.py"

MUTANTS: dict[str, Mutant] = {
    "a_miss_tells_of_another_salt": Mutant(
        "The reason of a miss is another one where the same first tokens were saved under another salt.",
        (
            Patch(
                SCHEDULER,
                "_try_save",
                "self._tell.save_planned(tracked, job)",
                "self.__dict__.setdefault('firsts', set()).add(tuple(tracked.request.all_token_ids[: self._unit]))\n"
                "        self._prefixes.firsts = self.firsts\n"
                "        self._tell.save_planned(tracked, job)",
            ),
            Patch(
                PREFIXES,
                "why_short",
                "return misses.NOT_SAVED",
                "known = tuple(request.all_token_ids[: self._unit]) in getattr(self, 'firsts', ())\n"
                "    return misses.EVICTED if known else misses.NOT_SAVED",
            ),
        ),
        test=f"{_TENANTS}::test_a_first_block_that_another_tenant_has_asked",
    ),
}
