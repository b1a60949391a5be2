"""What one tenant learns of another."""

from __future__ import annotations

from kvpipe.testing.mutants.base import PREFIXES, SCHEDULER, Mutant, Patch, one

_TENANTS, _GUESSING = "tests/contract/test_tenants.py", "tests/tiers/test_guessing.py"
_SEALER = "kvpipe.tiers.envelope:Sealer"

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
    "encrypted_values_have_plain_names": Mutant(
        "Who reads an encrypted tier sees vLLM's own hashes.",
        one(_SEALER, "names", "tuple(one.name(key) for one in self._ring.values()) or (key,)", "(key,)"),
        test=f"{_GUESSING}::test_guesses_of_an_encrypted_tier_are_not[disk]",
    ),
    "one_key_for_all_values": Mutant(
        "Values are encrypted with one key and one nonce.",
        one(_SEALER, "seal", "os.urandom(SALT_BYTES)", "bytes(SALT_BYTES)"),
        test="tests/tiers/test_envelope.py::test_a_key_encrypts_one_value",
    ),
    "only_the_newest_key_is_asked": Mutant(
        "What was stored before the encryption key was changed is not found any more.",
        one(_SEALER, "names", "or (key,)", "[:0] or (next(iter(self._ring.values())).name(key),) * self.ways"),
        test=f"{_GUESSING}::test_a_key_is_changed_while_values_are_kept[disk]",
    ),
}
