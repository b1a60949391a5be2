"""Bugs in evictions: no answer is wrong, but useful chunks, or chunks of another tenant, are evicted."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import Mutant, Patch, one

_SESSIONS, _TESTS = "kvpipe.cache.policy.sessions:Sessions", "tests/cache/test_sessions.py"
_CONNECTIONS = "tests/manage/test_connections.py"

MUTANTS: dict[str, Mutant] = {
    "a_prompt_goes_from_its_beginning": Mutant(
        "The chunks of a finished request are evicted in the wrong order: the beginning before the end.",
        (
            Patch(_SESSIONS, "_settle", "begun[::-1]", "begun"),
            Patch(_SESSIONS, "_put_in_order", "reversed(chunks)", "chunks"),
        ),
        test=f"{_TESTS}::test_last_chunk_of_a_prompt_is_evicted_first",
    ),
    "lies_that_are_believed": Mutant(
        "A client's hints are trusted, however wrong they were before.",
        one("kvpipe.cache.policy.returns:Returns", "proven", "math.log2(better)", "1.0"),
        test=f"{_TESTS}::test_hints_are_not_trusted_when_they_are_always_wrong",
    ),
    "demoted_for_one": Mutant(
        "A prefix that several sessions use is evicted early when one of these sessions has ended.",
        one(_SESSIONS, "hint", "own or not (demotes", "True or not (demotes"),
        test=f"{_TESTS}::test_shared_prefix_is_not_demoted_when_one_session_ends",
    ),
    "shares_are_not_looked_at": Mutant(
        "The tenant with the most slots loses slots even while it is within its quota's share.",
        one("kvpipe.cache.quotas:Accounts", "_giver", "more = account.used - account.sure", "more = account.used"),
        shape="quotas",
        by="quotas_are_kept",
    ),
    "limits_hold_a_full_pool_only": Mutant(
        "A quota may exceed its limit as long as slots are free.",
        one(
            "kvpipe.cache.quotas:SharedCatalog",
            "reserve",
            "if account.full and",
            "if account.full and not self._free and",
        ),
        shape="quotas",
        by="quotas_are_kept",
    ),
    "shares_are_those_of_the_start": Mutant(
        "Shares do not grow with the number of ready slots, so a quota loses slots within its share.",
        one("kvpipe.cache.quotas:SharedCatalog", "use_more", "self.accounts.secure(self.ready)", "pass"),
        test="tests/vllm/test_quotas.py::test_shares_are_of_the_ready_slots",
    ),
    "announced_and_always_believed": Mutant(
        "A client whose announced requests never come gets as much of the pool as a client whose requests come.",
        one("kvpipe.cache.ahead:AccountAhead", "over", "self._wasted += 1", "pass"),
        test="tests/cache/test_ahead.py::test_room_shrinks_when_announced_requests_never_arrive",
    ),
    "announced_by_one_and_believed_of_all": Mutant(
        "A client whose announced requests never come reduces the room for announcements of other quotas.",
        one("kvpipe.cache.quotas:SharedCatalog", "account_of", "return self.accounts.of(tenant)", "return None"),
        test="tests/cache/test_ahead.py::test_false_announcements_of_one_quota_leave_the_room_of_another",
    ),
    "announced_and_brought_though_it_came": Mutant(
        "A session that resumes early is fetched again at the time for which it was announced.",
        one("kvpipe.features.announced:Announcements", "came", "for one in found:", "for one in ():"),
        test="tests/trials/test_announced.py::test_nothing_is_fetched_at_the_announced_time_after_the_request_has_arrived",
    ),
    "announcements_of_all_are_one_heap": Mutant(
        "All tenants share one limit on announcements, so one tenant pushes out the announcements of others.",
        one(
            "kvpipe.features.announced:Announcements",
            "add",
            "self._shares.put(one.key, one.tenant,",
            "self._shares.put(one.key, ANYBODY,",
        ),
        test="tests/trials/test_announced_tenants.py::test_announcements_of_a_salt_stay_when_another_salt_announces_many",
    ),
    "turns_are_not_shared": Mutant(
        "All announced prompts of one tenant are fetched before those of another tenant if they are announced "
        "for an earlier time.",
        one("kvpipe.features.announced:Announcements", "take", "self._shares.serve(one.key)", "pass"),
        test="tests/trials/test_announced_tenants.py::"
        "test_prompts_of_salts_are_fetched_in_turn_when_one_salt_announces_many",
    ),
    "offers_of_all_are_one_queue": Mutant(
        "When a tier has too many offers, the oldest offer is dropped, not an offer of the tenant with most offers.",
        one(
            "kvpipe.scheduler.stores:Storing",
            "_put_off",
            "self._take(self._shares.most())",
            "self._take(next(iter(self._offers)))",
        ),
        test="tests/trials/test_idle_stores.py::test_offers_of_a_salt_stay_when_another_salt_offers_many",
    ),
    "invented_salts_count_one_by_one": Mutant(
        "A client that invents salts pushes out the announcements of a salt with a quota.",
        one("kvpipe.cache.fair:FairShares", "put", "self._account(tenant)", "tenant.salt"),
        test="tests/trials/test_announced_tenants.py::"
        "test_a_salt_with_a_quota_keeps_its_announcements_when_a_client_invents_salts",
    ),
    "half_open_connections_are_all_alike": Mutant(
        "Connections without the token push out the connections of operators.",
        one("kvpipe.manage.connections:Places", "asks", "not self.admits(one.scope)", "True"),
        test=f"{_CONNECTIONS}::test_a_connection_with_the_token_stays_when_many_others_are_half_open",
    ),
    "headers_take_as_long_as_they_like": Mutant(
        "A connection that sends only half of a header stays as long as a connection that sends requests.",
        one(
            "kvpipe.manage.connections:BoundedConnection",
            "connection_made",
            "self.loop.call_later(HEADERS_S_MAX, self._over)",
            "None",
        ),
        test=f"{_CONNECTIONS}::test_the_deadline_of_a_header_begins_with_its_connection_or_its_first_byte",
    ),
    "headers_behind_an_answer_take_as_long_as_they_like": Mutant(
        "A connection that has received an answer may then send half of a header and stay open.",
        one(
            "kvpipe.manage.connections:BoundedConnection",
            "data_received",
            "self._late or self.loop.call_later(HEADERS_S_MAX, self._over)",
            "self._late",
        ),
        test=f"{_CONNECTIONS}::test_the_deadline_of_a_header_begins_with_its_connection_or_its_first_byte",
    ),
    "half_open_connections_have_fewer_places_than_are_accepted_at_once": Mutant(
        "A request with the token is not read, because its connection was closed to make room for later connections.",
        one("kvpipe.manage.connections:Places", "enter", ">= UNKNOWN_MAX", ">= ACCEPTED_MAX - 1"),
        test=f"{_CONNECTIONS}::test_request_with_the_token_is_read_when_half_open_connections_follow",
    ),
    "announced_for_nobody": Mutant(
        "Chunks that were fetched for an announced request are recorded without salt and adapter.",
        one(
            "kvpipe.features.prefetch:Prefetching",
            "finished",
            "request.num_tokens, tenant.salt, tenant.adapter",
            "request.num_tokens",
        ),
        shape="announced",
        by="chunks_have_their_tenants",
    ),
}
