"""Bugs in transfers of chunks to tiers and back."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import STAGING, STORING, Mutant, Patch, one

OTHER_LAYOUT = "property_tests/test_layouts.py::test_engine_of_any_layout_finds_stored_chunks_whole_or_not_at_all"
_PREFETCHING = "kvpipe.features.prefetch:Prefetching"
_TIER_BLOCKS = "kvpipe.scheduler.tier_blocks:TierBlocks"

MUTANTS: dict[str, Mutant] = {
    "fetch_believed": Mutant(
        "A fetched chunk is published though a rank failed to read it.",
        one(STAGING, "_landed", "if done:", "if True:"),
        "tier",
        "findable_chunks_are_whole_and_true",
    ),
    "bytes_not_checked": Mutant(
        "Bytes from a tier are used without a check.",
        one("kvpipe.tiers.envelope:Sealer", "unseal", 'raise DamagedError("checksum")', "pass"),
        "tier",
        "findable_chunks_are_whole_and_true",
    ),
    "first_rank_decides": Mutant(
        "A fetched chunk is published when one rank of several has it.",
        (
            Patch(STAGING, "reported", "count(tally, self._ranks):", "count(tally, self._ranks) and transfer.ok:"),
            Patch(STAGING, "_landed", "transfer.state.row == job_m.DONE", "transfer.ok > 0"),
        ),
        "two-tiers",
    ),
    "stage_leases_kept": Mutant(
        "The leases of a request that waited for a tier are never released.",
        one(STAGING, "_end", "self._leased -= self._catalog.release(stage.owner, hit=False)", "pass"),
        "tier",
        "nothing_is_held",
    ),
    "store_leases_kept": Mutant(
        "The lease on a chunk that was stored in a tier is never released.",
        one(
            STORING,
            "over",
            "self._catalog.release(owner, hit=False)",
            "pass",
        ),
        "tier",
        "nothing_is_held",
    ),
    "store_not_leased": Mutant(
        "A chunk may be evicted, and its slot overwritten, while a tier still stores the chunk.",
        one(STORING, "_store", "self._catalog.lease(owner, [chunk])", "pass"),
        "tier",
        "leases_have_owners",
    ),
    "parts_not_told_apart": Mutant(
        "All ranks write their parts of a chunk under the same name.",
        (
            Patch("kvpipe.tiers.parts", "part_of", "(rank, ranks)", "(0, ranks)"),
            Patch("kvpipe.tiers.parts", "part_keys", "group, part, parts)", "group, 0, parts)"),
        ),
        "two-tiers",
    ),
    "groups_not_told_apart": Mutant(
        "All cache groups write their chunks under the same name.",
        (
            Patch("kvpipe.tiers.carrier:Carrier", "_key", "order.chunk, order.group, *part", "order.chunk, 0, *part"),
            Patch("kvpipe.tiers.parts", "part_keys", "chunk, group, part", "chunk, 0, part"),
        ),
        "tier-hybrid",
        "findable_chunks_are_whole_and_true",
    ),
    "deleted_files_are_remembered": Mutant(
        "A process that only looks up keys on a disk keeps the key of every deleted file.",
        one("kvpipe.tiers.disk.index:Index", "_forget", "self._unsorted.pop(key, None)", "pass"),
        test="tests/tiers/test_disk_index.py::test_keys_of_deleted_files_are_forgotten",
    ),
    "heads_of_the_next_rank": Mutant(
        "A rank reads its neighbour's heads from a chunk that another layout has stored.",
        one(
            "kvpipe.tiers.parts",
            "slices",
            "part * mine, (part + 1)",
            "(part + 1) % split * mine, ((part + 1) % split + 1)",
        ),
        test=OTHER_LAYOUT,
    ),
    "alike_stored_twice": Mutant(
        "Every rank stores the bytes that are equal on all ranks.",
        one("kvpipe.tiers.parts", "writes", "rank % copies == chunk[-1] % copies", "True"),
        test=OTHER_LAYOUT,
    ),
    "warmed_leases_kept": Mutant(
        "The leases on chunks that were fetched for an operator are never released.",
        one(_PREFETCHING, "_goes_on", "staging.end(one.stage)\n    if one.announced", "if one.announced"),
        "async-scheduler-warmed",
    ),
    "warmed_for_nobody": Mutant(
        "Chunks that were fetched for an operator are recorded without salt and adapter.",
        one(
            _PREFETCHING,
            "__init__",
            'named(asked.cache_salt or "", getattr(asked, "adapter", None))',
            'named("", None)',
        ),
        "warmed",
        "chunks_have_their_tenants",
    ),
    "verify_deletes_what_it_cannot_judge": Mutant(
        "`kvpipe cache verify --delete` without the encryption key deletes every value of an encrypted tier.",
        one(
            "kvpipe.cli.judging:Judge",
            "_verdict",
            "except UnjudgedError as error:",
            "except ZeroDivisionError as error:",
        ),
        test="tests/cli/test_unjudged.py::test_encrypted_values_are_kept_when_their_key_is_not_named",
    ),
    "purge_drops_what_it_cannot_judge": Mutant(
        "`kvpipe cache purge --delete` drops values of newer versions and of other keys.",
        one("kvpipe.cli.cache:_Namespaces", "doubt", "verdict.kind == UNJUDGED", "False"),
        test="tests/cli/test_unjudged.py::test_purge_keeps_namespaces_that_cannot_be_judged",
    ),
    "announced_before_it_is_stored": Mutant(
        "A chunk is announced to routers when its store is ordered, before any rank has stored it.",
        one(
            _TIER_BLOCKS,
            "ordered",
            "self._ordered[order.id] = block, chunk.tenant",
            "self._add(order, block, chunk.tenant)",
        ),
        "small-tiers",
        "tiers_are_announced_truly",
    ),
    "lost_chunks_stay_announced": Mutant(
        "A chunk that a lookup has missed in a tier stays announced to routers.",
        one(_TIER_BLOCKS, "missed", "if known is not None and known.number <= lookup.number:", "if False:"),
        "small-tiers",
        "tiers_have_what_is_announced",
    ),
}
