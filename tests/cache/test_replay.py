"""Tests of the replays of traces that compare policies, and of the largest number of hits that is possible."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from benchmarks.replay import belady, hints
from benchmarks.replay import workload as w
from benchmarks.replay.replay import BELADY, Pool, policies, replay
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy.hints import Action, Hint

CHUNK_TOKENS = 1024
"""Four times the default: with fewer chunks the same requests are replayed in less time."""


@cache
def small(seed: int, *, shared_system: bool = False) -> w.Workload:
    """Return a few sessions of the coding agents."""
    return w.coding_agents(seed, sessions=6, hours=0.25, chunk_tokens=CHUNK_TOKENS, shared_system=shared_system)


def made_up(seed: int, prompts: int, branches: int, depth: int) -> w.Workload:
    """Return prompts that are paths in a tree, so that they share beginnings."""
    draw, out = random.Random(seed), list[w.Prompt]()
    for at in range(prompts):
        path = "".join(str(draw.randrange(branches)) for _ in range(draw.randint(1, depth)))
        keys = [path[: end + 1].encode() for end in range(len(path))]
        out.append(w.Prompt(float(at), len(keys), 0, keys))
    return w.Workload("made up", 1, out)


def best(workload: w.Workload, slots: int) -> int:
    """Return the largest possible number of hits. After each prompt, every choice of chunks to keep is tried."""
    worth: dict[frozenset[bytes], int] = {frozenset(): 0}
    for prompt in workload.prompts:
        after: dict[frozenset[bytes], int] = {}
        for held, hits in worth.items():
            hit = next((at for at, key in enumerate(prompt.keys) if key not in held), len(prompt.keys))
            choice = sorted(held.union(prompt.keys))
            for kept in map(frozenset, combinations(choice, min(slots, len(choice)))):
                after[kept] = max(after.get(kept, 0), hits + hit)
        worth = after
    return max(worth.values())


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_the_optimum(seed: int) -> None:
    """No choice of kept chunks has more hits than the choice of Belady's algorithm."""
    workload = made_up(seed, prompts=9, branches=2, depth=3)
    for slots in (1, 2, 3, 4):
        assert sum(belady.hits(workload, slots)) == best(workload, slots)


@pytest.mark.parametrize("shared_system", [False, True])
def test_no_policy_beats_belady(*, shared_system: bool) -> None:
    """No registered policy has more hits than Belady's algorithm, at several capacities.

    With room for all chunks, the numbers of hits are equal.
    """
    workload = small(1, shared_system=shared_system)
    for share in (0.05, 0.2, 0.5, 1.0):
        most = replay(workload, BELADY, share)
        for name in policies():
            rate = replay(workload, name, share).hit_rate
            assert rate <= most.hit_rate
            assert share < 1 or rate == most.hit_rate


@pytest.mark.parametrize("policy", policies())
def test_hits_are_prefixes(policy: str) -> None:
    """The catalog holds every chunk of the prefix that is a hit. The catalog holds no more chunks than it has slots."""
    workload = small(2)
    slots = workload.slots(0.1)
    pool = Pool(workload.chunk_tokens, slots, make_policy(policy, slots))
    for prompt in workload.prompts:
        held = [pool.catalog.find(0, key) is not None for key in prompt.keys]
        hit = pool.serve(prompt)
        assert all(held[:hit])
        assert not any(held[hit : hit + 1])
        assert pool.catalog.used <= slots
        assert pool.catalog.leases == pool.catalog.writing == 0


def test_the_same_seed_gives_the_same_figures() -> None:
    """Another seed gives other figures."""
    again = w.coding_agents(1, sessions=6, hours=0.25, chunk_tokens=CHUNK_TOKENS)
    assert again == small(1) != small(2)
    for name in (*policies(), BELADY):
        assert replay(again, name, 0.1).hits == replay(small(1), name, 0.1).hits


def test_prompts_arrive_in_order_and_are_whole() -> None:
    """A key covers all tokens before the end of its chunk, and each prompt has one key for each whole chunk."""
    for workload in (small(1), small(1, shared_system=True), w.mooncake()):
        before: dict[bytes, bytes] = {}
        at_s = 0.0
        for prompt in workload.prompts:
            assert prompt.at_s >= at_s
            at_s = prompt.at_s
            assert len(prompt.keys) == prompt.tokens // workload.chunk_tokens
            for key, last in zip(prompt.keys, [b"", *prompt.keys], strict=False):
                assert before.setdefault(key, last) == last


def test_shared_system_prompts_are_found_by_other_sessions() -> None:
    """With shared system prompts there are fewer chunks and more hits for the same number of tokens."""
    apart, shared = small(1), small(1, shared_system=True)
    assert shared.tokens == apart.tokens
    assert shared.chunks < apart.chunks
    assert replay(shared, "lru", 1.0).hit_rate > replay(apart, "lru", 1.0).hit_rate


def test_a_request_is_used_until_its_answer_is_over() -> None:
    """The first request still runs when the second one has ended, so the third request evicts chunks of the second."""
    prompts = [w.Prompt(at_s, 1, answer, [key]) for at_s, answer, key in ((0, 10, b"a"), (1, 0, b"b"), (12, 0, b"c"))]
    prompts.append(w.Prompt(13, 1, 0, [b"a"]))
    for answer_s, hit in ((1.0, 1), (0.0, 0)):
        assert replay(w.Workload("made up", 1, prompts, answer_s), "lru", 2 / 3).hits == [0, 0, 0, hit]


@pytest.mark.slow
def test_replay_of_250_sessions_gives_the_published_figures() -> None:
    """A replay of 250 sessions in 8 h, with 131,072 tokens and 256 tokens per chunk, gives the published figures.

    Another seed changes the figures only slightly.
    """
    drawn = w.coding_agents(0)
    assert replay(drawn, BELADY, 0.01).hit_rate == pytest.approx(0.690, abs=0.02)
    assert replay(drawn, "lru", 0.10).hit_rate == pytest.approx(0.953, abs=0.005)


def test_hints_announce_the_true_resume_and_adversaries_a_false_one() -> None:
    """Right hints announce the true time of resuming.

    Adversarial hints exchange long and short pauses, and announce resumes that never happen.
    """
    prompts = [w.Prompt(at_s, 2, 0, [b"a", f"{name}".encode()]) for at_s, name in ((0, "b"), (10, "b"), (110, "b"))]
    workload = w.Workload("made up", 1, [*prompts, w.Prompt(111.0, 1, 0, [b"c"])])
    assert hints.resumes(workload) == [10, 110, None, None]
    right = hints.hints(workload, hints.RESUME, 0.0)
    assert right == [Hint(Action.RESUME, 10), Hint(Action.RESUME, 110), None, None]
    wrong = hints.hints(workload, hints.ADVERSARIAL, 0.0)
    assert [one.at_s for one in wrong if one is not None] == [360, 46, 111, 112]
    assert hints.hints(workload, hints.TURNED, 0.0) == [*right[:2], *wrong[2:]]
    assert hints.hints(workload, hints.NONE, 0.0) == [None] * 4
    assert hints.hints(workload, hints.RESUME, 0.7) != right


def test_hints_add_hits() -> None:
    """Hints add hits. A replay without hints is unchanged."""
    workload = small(1)
    plain = replay(workload, "sessions", 0.05)
    assert replay(workload, "sessions", 0.05, hints.NONE, 0.7).hits == plain.hits
    assert replay(workload, "sessions", 0.05, hints.RESUME, 0.0).hit_rate > plain.hit_rate
