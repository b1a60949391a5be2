"""Bugs that reveal facts about one tenant to another tenant."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import PREFIXES, SAVING, STAGING, Mutant, Patch, one

_TENANTS, _GUESSING = "tests/contract/test_tenants.py", "tests/tiers/test_guessing.py"
_SEALER, _EVENTS = "kvpipe.tiers.envelope:Sealer", "kvpipe.connectors.vllm.kv_events:KvEvents"
_BY_EVENTS = "events_are_the_catalog"

MUTANTS: dict[str, Mutant] = {
    "a_miss_tells_of_another_salt": Mutant(
        "The reason of a miss reveals that the same first tokens were saved under another salt.",
        (
            Patch(
                SAVING,
                "_try_save",
                "return (self._jobs.save(tracked, rows, tuple(pieces), first).job,)",
                "self.__dict__.setdefault('firsts', set()).add(tuple(tracked.request.all_token_ids[: self._unit]))\n"
                "        self._prefixes.firsts = self.firsts\n"
                "        return (self._jobs.save(tracked, rows, tuple(pieces), first).job,)",
            ),
            Patch(
                PREFIXES,
                "why_short",
                "return miss_reasons.BELOW_MINIMUM if self._cuts",
                "if tuple(request.all_token_ids[: self._unit]) in getattr(self, 'firsts', ()):\n"
                "        return miss_reasons.EVICTED\n"
                "    return miss_reasons.BELOW_MINIMUM if self._cuts",
            ),
        ),
        test=f"{_TENANTS}::test_first_block_of_another_tenant_is_a_miss",
    ),
    "encrypted_values_have_plain_names": Mutant(
        "The names of values in an encrypted tier contain vLLM's own hashes.",
        one(_SEALER, "names", "tuple(one.name(key) for one in self._ring.values()) or (key,)", "(key,)"),
        test=f"{_GUESSING}::test_guesses_of_an_encrypted_tier_are_not[disk]",
    ),
    "one_key_for_all_values": Mutant(
        "All values are encrypted with the same key and the same nonce.",
        one(_SEALER, "seal", "os.urandom(SALT_BYTES)", "bytes(SALT_BYTES)"),
        test="tests/tiers/test_envelope.py::test_a_key_encrypts_one_value",
    ),
    "only_the_newest_key_is_asked": Mutant(
        "Values that were stored before the encryption key was changed are not found any more.",
        one(_SEALER, "names", "or (key,)", "[:0] or (next(iter(self._ring.values())).name(key),) * self.ways"),
        test=f"{_GUESSING}::test_a_key_is_changed_while_values_are_kept[disk]",
    ),
    "events_without_extra_keys": Mutant(
        "Events lack salt, adapter and image, so routers take such blocks for blocks without them.",
        one(_EVENTS, "_add_stored", "to_event_extra_keys([block.extra_keys])", "None"),
        shape="hybrid",
        by=_BY_EVENTS,
    ),
    "events_of_one_group": Mutant(
        "Blocks of every cache group are announced as blocks of the first group.",
        one(_EVENTS, "_add_stored", "group_idx=group", "group_idx=0"),
        shape="hybrid",
        by=_BY_EVENTS,
    ),
    "fetched_chunks_are_not_announced": Mutant(
        "A chunk that was fetched from a tier can be found, but is not announced to routers.",
        one(STAGING, "_landed", "self._context.events.fetched(transfer.request, piece)", "pass"),
        shape="tier",
        by=_BY_EVENTS,
    ),
    "routers_forget_with_vllms_cache": Mutant(
        "After vLLM has emptied its own cache, the blocks that kvpipe still holds are not announced again.",
        one(_EVENTS, "watch", "if done:", "if False:"),
        shape="async-load",
        by=_BY_EVENTS,
    ),
    "a_block_goes_with_its_first_chunk": Mutant(
        "A block is announced as removed when only one of the chunks that hold it is dropped.",
        one(
            _EVENTS,
            "_remove",
            "if chunks > 1:",
            "if chunks > 1 and self._events.append(BlockRemoved("
            "block_hashes=[maybe_convert_block_hash(block.hash)], medium=place.medium, group_idx=group)) is None:",
        ),
        test="tests/contract/test_kv_events.py::test_block_is_withdrawn_when_both_contents_of_an_adapter_are_evicted",
    ),
    "blocks_within_chunks_are_announced": Mutant(
        "Each unit of a chunk is announced, though a prompt that shares only half of the chunk finds nothing.",
        one(
            _EVENTS,
            "published",
            "{mark.key: mark.units for mark in chunk.marks}",
            "{request.block_hashes[(base + n) * self._hashes_per_unit - 1]: n"
            " for n in range(1, chunk.marks[-1].units + 1)}",
        ),
        shape="two-ranks",
        by="what_is_announced_is_found",
    ),
    "ends_of_grown_chunks_stay_announced": Mutant(
        "The former end of a chunk that has grown stays announced, though it can no longer be found.",
        one(_EVENTS, "published", "if key not in marks", "if False"),
        shape="two-ranks",
        by=_BY_EVENTS,
    ),
}
