"""Bugs in the memory that the engines of a node share."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import STAGING, STORING, Mutant, Patch, one

_KEEPER = "kvpipe.node.keeper:Keeper"
_MEMORY = "kvpipe.node.memory:NodeMemory"
_NOTES = "kvpipe.node.notes:SlotNotes"
_LEDGER = "kvpipe.node.ledger:Ledger"
_WORLD = "tests/node/test_world.py::test_random_engines_and_holders_lose_and_damage_no_chunk"
_TIERS = "tests/node/test_tiers.py"
_REGIONS, _SHARES = "tests/node/test_regions.py", "tests/node/test_region_shares.py"
_FENCE = "tests/node/test_fence.py::test_leased_slot_is_not_reused_in_any_order_of_stores_and_loads"
_END_LEASES = '    leases[:] = memoryview(bytes(leases.nbytes)).cast("I")'
_NOT_LAST = "    if not is_last:\n        return\n"
_TAKE_BACK = "    for slot in list(client.granted):\n        self._take_back(client, slot, m.OWNER_GONE)\n"

MUTANTS: dict[str, Mutant] = {
    "lease_of_a_dead_client_kept": Mutant(
        "The leases of an engine that has ended stay, so its chunks are never evicted.",
        one(_KEEPER, "_lost", _END_LEASES, "    pass"),
        test=_WORLD,
    ),
    "lease_freed_too_early": Mutant(
        "The leases of an engine end with its first process, though a copy of another one may still read.",
        one(
            _KEEPER,
            "_lost",
            _NOT_LAST,
            f"    leases = self._ledger.segment.leases_of(client.row)\n{_END_LEASES}\n{_NOT_LAST}",
        ),
        test=_WORLD,
    ),
    "leased_slot_freed": Mutant(
        "The holder frees an evicted slot without reading the leases again.",
        one(_KEEPER, "drain", " if not self._is_leased(slot)]", "]"),
        test=_WORLD,
    ),
    "pin_not_compared": Mutant(
        "A pin does not compare the generation, so it holds a slot that has another chunk by now.",
        one("kvpipe.node.replica:NodeLeases", "pin", " != ", " * 0 > "),
        test=_WORLD,
    ),
    "no_fence": Mutant(
        "The holder reads leases without a fence, so it may miss the lease of an engine that has seen the old "
        "generation. On x86-64 this was never seen; a model of store buffers has it.",
        one(_KEEPER, "drain", "self._fence()", "pass"),
        test=_FENCE,
    ),
    "fence_too_early": Mutant(
        "The holder passes the fence before it raises the generation.",
        (
            Patch(_KEEPER, "_drop", "        self._move(", "        self._fence()\n        self._move("),
            Patch(_KEEPER, "drain", "self._fence()", "pass"),
        ),
        test=_FENCE,
    ),
    "generation_not_raised": Mutant(
        "An eviction leaves the generation as it was.",
        one(_KEEPER, "_drop", "m.EVICT, 1)", "m.EVICT, 0)"),
        test=_FENCE,
    ),
    "published_by_one_rank": Mutant(
        "A chunk is published when the first rank has landed its part.",
        one("kvpipe.scheduler.reported:Reported", "count", "if self.ok + self.bad < ranks:", "if False:"),
        test="tests/node/test_ranks.py::test_chunk_is_published_when_the_last_rank_has_landed",
    ),
    "fetch_published_by_one_rank": Mutant(
        "A chunk from a tier is published when the first rank has landed its part.",
        one(STAGING, "reported", "count(tally, self._ranks):", "count(tally, 1):"),
        test=f"{_TIERS}::test_fetched_chunk_is_published_when_the_last_rank_has_landed",
    ),
    "slot_of_a_store_not_pinned": Mutant(
        "The holder may reuse the slot of a chunk while a tier still stores the chunk.",
        one(STORING, "_store", "self._catalog.lease(owner, [chunk])", "pass"),
        test=f"{_TIERS}::test_slot_of_a_store_is_not_reused_before_the_store_has_landed",
    ),
    "unpublished_fetch_is_lost": Mutant(
        "A request does not wait until the holder has published its fetched chunks, and computes them.",
        one(STAGING, "_landed", "landed and not piece.chunk.is_published", "False"),
        test=f"{_TIERS}::test_fetched_chunks_are_found_by_other_engines",
    ),
    "every_rank_fetches_equal_bytes": Mutant(
        "All ranks of a model whose bytes are equal fetch a chunk into one slot, one over the other.",
        one("kvpipe.tiers.carrier:Carrier", "_touches", "return self._fetches", "return True"),
        test="tests/tiers/test_shared_slots.py::test_rank_leaves_a_slot_alone_that_another_rank_fetches",
    ),
    "torn_record_read": Mutant(
        "Readers believe half-written records of the journal and of the slot table.",
        one("kvpipe.node.layout", "unpack_slot", "if not _is_whole(raw, _RECORD.size):", "if False:"),
        test="tests/node/test_torn.py::test_half_written_entry_is_not_found",
    ),
    "quarantine_left_too_early": Mutant(
        "The slots of an engine are free when its first process has ended, though another one may still write.",
        one(_KEEPER, "_lost", f"{_NOT_LAST}{_TAKE_BACK}", f"{_TAKE_BACK}{_NOT_LAST}"),
        test=_WORLD,
    ),
    "boot_token_ignored": Mutant(
        "A holder carries out a batch that was meant for the holder before.",
        one("kvpipe.node.holder:Holder", "_handle", " or message.boot != self._boot", ""),
        test="tests/node/test_holder.py::test_batch_with_an_old_boot_token_ends_the_connection",
    ),
    "last_record_not_finished": Mutant(
        "A new holder leaves the last record of a holder that was killed unfinished.",
        one(_LEDGER, "recover", "if last is not None:", "if False:"),
        test=_WORLD,
    ),
    "lost_grants_kept": Mutant(
        "A new holder keeps the grants of an answer that no engine has received.",
        one(_KEEPER, "greet", " if one not in held]", " if False]"),
        test=_WORLD,
    ),
    "move_takes_a_leased_slot": Mutant(
        "Another slot size gets the memory of chunks that engines read.",
        (
            Patch(_KEEPER, "may_give", "not leased and ", ""),
            Patch(_KEEPER, "give", "if any(self._slots[slot].state.name != m.FREE for slot in slots):", "if False:"),
        ),
        test=f"{_REGIONS}::test_leased_chunk_and_granted_slot_are_not_taken",
    ),
    "move_takes_a_slot_that_was_leased_meanwhile": Mutant(
        "A move does not look at leases again after its fence.",
        one(_KEEPER, "give", "if any(self._slots[slot].state.name != m.FREE for slot in slots):", "if False:"),
        test=f"{_REGIONS}::test_lease_taken_during_the_transfer_keeps_the_slot",
    ),
    "move_takes_a_granted_slot": Mutant(
        "Another slot size gets the memory of slots that an engine may write.",
        (
            Patch(_KEEPER, "may_give", " and all(self._slots[slot].state.name in names for slot in slots)", ""),
            Patch(_KEEPER, "give", "if any(self._slots[slot].state.name != m.FREE for slot in slots):", "if False:"),
            Patch(_KEEPER, "_set_unused", "NEVER if state == m.FREE else math.inf", "NEVER"),
        ),
        test=f"{_REGIONS}::test_busy_region_grows_and_idle_region_shrinks_both_ways",
    ),
    "piece_has_two_owners": Mutant(
        "A slot size still grants slots after another size got their memory.",
        one(_KEEPER, "give", "self._use_no_more(slots)", "pass"),
        test=f"{_REGIONS}::test_region_gets_the_least_recently_used_memory",
    ),
    "slot_of_which_another_size_owns_a_piece": Mutant(
        "A slot size grants a slot as soon as one piece of the slot is its own.",
        one("kvpipe.node.owners:Owners", "owns", "return all(", "return any("),
        test=f"{_REGIONS}::test_region_gets_the_least_recently_used_memory",
    ),
    "policy_is_told_nothing": Mutant(
        "The holder's policy does not learn which chunks engines use.",
        one("kvpipe.node.evictor:Evictor", "used", "self._pass(use, named)", "pass"),
        test="tests/node/test_evictor.py::test_load_and_end_of_a_request_reach_the_policy",
    ),
    "prefixes_are_forgotten_by_a_new_holder": Mutant(
        "The record of a chunk does not name the chunk before it, so a new holder evicts beginnings of prompts first.",
        one(_KEEPER, "_publish", "one.behind[:LINK_BYTES]", 'b""'),
        test="tests/node/test_evictor.py::test_policy_knows_the_prefix_also_in_a_new_holder",
    ),
    "search_takes_what_was_used_later": Mutant(
        "A slot size gets memory whose chunks were used more recently than those that it has evicted itself.",
        one(_MEMORY, "_windows", "means < short", "means < math.inf"),
        test=f"{_SHARES}::test_region_gets_no_memory_that_was_used_later",
    ),
    "search_takes_back_what_was_given": Mutant(
        "In one search each slot size takes memory, also the free slots that the size before it has just got.",
        one(_MEMORY, "share", "        return True\n", "        continue\n"),
        test=f"{_SHARES}::test_one_call_does_not_return_memory_to_its_old_region",
    ),
    "new_holder_forgets_owners": Mutant(
        "A new holder lets the first slot size own all memory.",
        one(
            _MEMORY,
            "__init__",
            "self._segments[0] = first",
            "self._owners.give(range(self._owners.count), 0)\n        self._segments[0] = first",
        ),
        test=f"{_REGIONS}::test_engines_of_both_sizes_find_their_chunks_after_a_restart",
    ),
    "only_own_chunks_are_announced": Mutant(
        "An engine announces no chunks that another engine has saved.",
        one(
            _NOTES,
            "published",
            "is not None and (note",
            "is not None and chunk.used_s and (note",
        ),
        shape="node",
        by="events_are_the_catalog",
    ),
    "note_of_another_chunk": Mutant(
        "The note of the chunk that was in the slot before is read as the note of the slot's present chunk.",
        one(_NOTES, "read", "== check", "== check or True"),
        test="tests/node/test_notes.py::test_note_is_read_under_its_chunk_s_key_alone",
    ),
    "half_written_note": Mutant(
        "The checksum of a note covers the key alone.",
        (
            Patch(_NOTES, "read", "zlib.crc32(note, zlib.crc32(key))", "zlib.crc32(key)"),
            Patch(_NOTES, "write", "zlib.crc32(note, zlib.crc32(key))", "zlib.crc32(key)"),
        ),
        test="tests/node/test_notes.py::test_half_written_note_is_not_read",
    ),
    "forgotten_chunks_stay_announced": Mutant(
        "Routers are not notified when an engine forgets the chunks of its namespace to read them again.",
        one(_NOTES, "withdraw", "if self.routers is not None:", "if False:"),
        test="tests/contract/test_node_events.py::test_blocks_are_announced_once_if_the_namespace_is_named_again",
    ),
    "children_are_announced_first": Mutant(
        "A scan of the slot table announces blocks before their parents, so routers drop these blocks.",
        one("kvpipe.connectors.vllm.block_notes:NotedBlocks", "take", "reversed(chain)", "chain"),
        test="tests/contract/test_node_events.py::test_parents_are_announced_first_and_few_blocks_at_once",
    ),
    "evicted_for_one_engine_alone": Mutant(
        "An operator's eviction drops a chunk from the engine's own dict, and the holder keeps the chunk.",
        one(_KEEPER, "batch", "for slot, generation in batch.evicted]", "for slot, generation in ()]"),
        test="tests/node/test_operators.py::test_evicted_prompt_is_evicted_for_all_engines",
    ),
    "old_eviction_takes_another_chunk": Mutant(
        "An eviction does not compare generations, so it evicts the chunk that is in the slot by now.",
        one(_KEEPER, "batch", "if one and self._records[one.slot].generation == number", "if one"),
        test="tests/node/test_operators.py::test_eviction_of_an_old_chunk_leaves_the_slot_s_present_chunk",
    ),
    "pin_outlives_an_eviction": Mutant(
        "A pin of another engine keeps the slots of chunks that an operator has evicted.",
        one("kvpipe.node.operated:OperatedCatalog", "unpublished", "if chunk.leases:", "if False:"),
        test="tests/node/test_operators.py::test_eviction_ends_pins_of_other_engines",
    ),
}
