"""Eviction that is never wrong, and of no use: it lets go what would have been hit, or what is another's."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import Mutant, Patch, one

_SESSIONS, _TESTS = "kvpipe.cache.policy.sessions:Sessions", "tests/cache/test_sessions.py"
_CONNECTIONS = "tests/manage/test_connections.py"

MUTANTS: dict[str, Mutant] = {
    "a_prompt_goes_from_its_beginning": Mutant(
        "What a request had is put in order the wrong way round: its beginning is evicted before its end.",
        (
            Patch(_SESSIONS, "_settle", "begun[::-1]", "begun"),
            Patch(_SESSIONS, "_put_in_order", "reversed(chunks)", "chunks"),
        ),
        test=f"{_TESTS}::test_a_prompt_goes_from_its_end",
    ),
    "lies_that_are_believed": Mutant(
        "Clients' hints are trusted, whatever their effect.",
        one("kvpipe.cache.policy.returns:Returns", "proven", "math.log2(better)", "1.0"),
        test=f"{_TESTS}::test_lies_are_found_out",
    ),
    "demoted_for_one": Mutant(
        "A prefix that several sessions use goes when one of them is over.",
        one(_SESSIONS, "hint", "own or not (demotes", "True or not (demotes"),
        test=f"{_TESTS}::test_a_prefix_that_others_use_is_not_demoted_for_one",
    ),
    "shares_are_not_looked_at": Mutant(
        "Who has most gives, also of what is within its quota's share.",
        one("kvpipe.cache.quotas:Accounts", "_giver", "more = account.used - account.sure", "more = account.used"),
        shape="quotas",
        by="quotas_are_kept",
    ),
    "limits_hold_a_full_pool_only": Mutant(
        "As long as slots are free a quota's limit is passed.",
        one(
            "kvpipe.cache.quotas:SharedCatalog",
            "reserve",
            "if account.full and",
            "if account.full and not self._free and",
        ),
        shape="quotas",
        by="quotas_are_kept",
    ),
    "announced_and_always_believed": Mutant(
        "Who announces what never comes takes as much of the pool as who is right.",
        one("kvpipe.cache.ahead:Part", "over", "self._wasted += 1", "pass"),
        test="tests/cache/test_ahead.py::test_who_announces_what_never_comes_has_ever_less_room",
    ),
    "announced_by_one_and_believed_of_all": Mutant(
        "Who announces what never comes leaves less room for what others announce, whatever their quotas.",
        one("kvpipe.cache.quotas:SharedCatalog", "account_of", "return self.accounts.of(tenant)", "return None"),
        test="tests/cache/test_ahead.py::test_who_announces_what_never_comes_is_not_believed_for_others",
    ),
    "announced_and_brought_though_it_came": Mutant(
        "A session that has come back is fetched for once more when it was announced for.",
        one("kvpipe.scheduler.announced:Announcements", "came", "for one in found:", "for one in ():"),
        test="tests/trials/test_announced.py::test_who_comes_earlier_brings_its_own",
    ),
    "announcements_of_all_are_one_heap": Mutant(
        "All tenants share one bound on announcements, so one of them pushes out those of the others.",
        one(
            "kvpipe.scheduler.announced:Announcements",
            "add",
            "self._shares.put(one.key, one.tenant,",
            "self._shares.put(one.key, ANYBODY,",
        ),
        test="tests/trials/test_announced_tenants.py::test_announcements_of_a_salt_stay_when_another_salt_announces_many",
    ),
    "turns_are_not_shared": Mutant(
        "One tenant's announced prompts are all fetched before those of another, as long as they are to come sooner.",
        one("kvpipe.scheduler.announced:Announcements", "take", "self._shares.serve(one.key)", "pass"),
        test="tests/trials/test_announced_tenants.py::"
        "test_prompts_of_salts_are_fetched_in_turn_when_one_salt_announces_many",
    ),
    "offers_of_all_are_one_queue": Mutant(
        "The oldest offer to a tier is dropped when there are too many, whoever has most of them.",
        one(
            "kvpipe.scheduler.stores:Storing",
            "_put_off",
            "self._take(self._shares.most())",
            "self._take(next(iter(self._offers)))",
        ),
        test="tests/trials/test_idle_stores.py::test_offers_of_a_salt_stay_when_another_salt_offers_many",
    ),
    "invented_salts_count_one_by_one": Mutant(
        "A client that invents salts pushes out what a salt with a quota has announced.",
        one("kvpipe.cache.fair:FairShares", "put", "self._account(tenant)", "tenant.salt"),
        test="tests/trials/test_announced_tenants.py::"
        "test_a_salt_with_a_quota_keeps_its_announcements_when_a_client_invents_salts",
    ),
    "half_open_connections_are_all_alike": Mutant(
        "Connections without the token push out those of operators.",
        one("kvpipe.manage.connections:Places", "asks", "not self.admits(one.scope)", "True"),
        test=f"{_CONNECTIONS}::test_a_connection_with_the_token_stays_when_many_others_are_half_open",
    ),
    "headers_take_as_long_as_they_like": Mutant(
        "A connection that sends half of a header stays as long as one that sends requests.",
        one(
            "kvpipe.manage.connections:BoundedConnection",
            "connection_made",
            "self.loop.call_later(HEADERS_S_MAX, self._over)",
            "None",
        ),
        test=f"{_CONNECTIONS}::test_the_deadline_of_a_header_begins_with_its_connection_or_its_first_byte",
    ),
    "headers_behind_an_answer_take_as_long_as_they_like": Mutant(
        "A connection that has had an answer may send half of a header and stay.",
        one(
            "kvpipe.manage.connections:BoundedConnection",
            "data_received",
            "self._late or self.loop.call_later(HEADERS_S_MAX, self._over)",
            "self._late",
        ),
        test=f"{_CONNECTIONS}::test_the_deadline_of_a_header_begins_with_its_connection_or_its_first_byte",
    ),
    "half_open_connections_have_fewer_places_than_are_accepted_at_once": Mutant(
        "A request with the token is not read, because its connection made room for others that came behind it.",
        one("kvpipe.manage.connections:Places", "enter", ">= UNKNOWN_MAX", ">= ACCEPTED_MAX - 1"),
        test=f"{_CONNECTIONS}::test_a_request_with_the_token_is_read_when_half_open_connections_come_right_behind_it",
    ),
    "announced_for_nobody": Mutant(
        "What was fetched for an announced request is counted as of no salt and no adapter.",
        one(
            "kvpipe.scheduler.prefetch:Prefetching",
            "announce",
            "request.num_tokens, tenant.salt, tenant.adapter",
            "request.num_tokens",
        ),
        shape="announced",
        by="chunks_have_their_tenants",
    ),
}
