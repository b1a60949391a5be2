"""LRU chooses the victims until the learnt order is proven to have more hits."""

from __future__ import annotations

import random

import pytest

from benchmarks.replay import workload as w
from benchmarks.replay.replay import Pool, replay
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import Lru, Policy, Sessions, make_policy
from kvpipe.cache.policy.chain import Chain
from kvpipe.cache.policy.duel import Duel
from kvpipe.cache.policy.guard import RescuedPolicy
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.policy.returns import Returns
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.testing.policy_conformance import Item
from kvpipe.trace.log import Counters
from tests.cache.chains import chain_of
from tests.cache.test_replay import made_up

SLOTS = 40


def _chain(name: str) -> Chain:
    return Chain(name, "", 0.0, orphan=False)


def _hits(policy: Policy, prompts: list[tuple[float, str, int]], slots: int = SLOTS, lie_s: float = 0.0) -> list[int]:
    """Return how many chunks of each prompt were held. A prompt is (seconds, session, chunks).

    Each prompt's hint says that the session continues in `lie_s` seconds.
    """
    held, out = dict[str, Item](), list[int]()
    for at_s, session, size in prompts:
        names = [f"{session}{at}" for at in range(size)]
        out.append(next((at for at, name in enumerate(names) if name not in held), size))
        if isinstance(policy, Sessions):
            policy.request(at_s, over=False)
        for name, before in zip(names, ["", *names], strict=False):
            if name not in held:
                if len(held) == slots:
                    gone = policy.victim()
                    assert isinstance(gone, Item)
                    del held[gone.identity]
                held[name] = Item(name, before)
                policy.insert(held[name], hit=False)
        if isinstance(policy, Sessions):
            policy.request(at_s, over=True)
        for name in reversed(names):
            if name in held:
                policy.refresh(held[name])
        if lie_s and isinstance(policy, Sessions):
            _hint(policy, [held[name] for name in reversed(names) if name in held], at_s + lie_s)
    return out


def _hint(policy: Sessions, items: list[Item], at_s: float) -> None:
    hint = Hint(Action.RESUME, at_s)
    for item in items:
        policy.hint(item, hint)


def test_hits_are_those_of_lru_when_all_sessions_pause_alike() -> None:
    """Sessions pause equally long. Each of their prompts, and each one-time prompt, hits exactly as with LRU."""
    prompts = [(turn * 7.0, f"{turn % 3}/" if turn % 4 else f"once {turn}/", 8) for turn in range(300)]
    policy = Sessions(SLOTS)
    assert _hits(policy, prompts) == _hits(Lru(), prompts)
    assert not policy._duel.learnt


@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_hits_as_with_lru_before_the_proof(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts branch, end within held chunks, or return later. Some prompts arrive at the same time."""
    monkeypatch.setattr(Duel, "_count", lambda *_: None)
    drawn = w.coding_agents(seed, sessions=6, hours=0.25, chunk_tokens=1024)
    tree = made_up(seed, 1500, branches=3, depth=7)
    tied = w.Workload("tied", 1, [one._replace(at_s=one.at_s // 4) for one in tree.prompts])
    for workload, slots in ((drawn, 250), (drawn, 625), (tree, 20), (tree, 200), (tied, 40)):
        hits = [
            [pool.serve(prompt) for prompt in workload.prompts]
            for name in ("lru", "sessions")
            for pool in (Pool(workload.chunk_tokens, slots, make_policy(name, slots)),)
        ]
        assert hits[0] == hits[1]


def test_learnt_order_evicts_when_it_is_proven() -> None:
    """LRU loses the session before each turn, because a long one-time prompt evicts the session's chunks.

    The learnt order keeps the session.
    """
    prompts = [(turn * 5.0, "goes on/" if turn % 2 else f"once {turn}/", 20 if turn % 2 else 30) for turn in range(200)]
    policy = Sessions(SLOTS)
    assert sum(_hits(policy, prompts)) > 1.8 * sum(_hits(Lru(), prompts))
    assert policy._duel.learnt


def test_learnt_order_is_proven_by_a_large_and_lasting_lead_only() -> None:
    """A lead in one prompt may be chance, and a lead of 0.3 % is too small.

    If the learnt order loses its lead, LRU chooses the victims again.
    """
    duel = Duel(SLOTS, Returns())

    def after(prompts: int, lru: int, learnt: int) -> bool:
        for _ in range(prompts):
            duel._count(lru, learnt)
        return duel.learnt

    assert not after(1, 1000, 1030)
    assert not after(8, 10_000, 10_030)
    assert after(8, 1000, 1200)
    assert not after(8, 1200, 1000)


def test_learnt_order_evicts_after_a_hint_until_lru_is_better() -> None:
    """When the learnt order has cost too many hits, LRU chooses the victims.

    From then on the learnt order needs a proof: a hint is not enough.
    """
    policy, item = Sessions(SLOTS), Item("a")

    def learnt() -> bool:
        return policy._duel.learnt

    policy._duel._count(1000, 1000)
    policy.insert(item, hit=False)
    policy.request(1.0, over=True)
    policy.refresh(item)
    policy.request(2.0, over=False)
    policy.hint(item, Hint(Action.DEMOTE))
    assert learnt()
    chain = chain_of(policy, item)
    assert (chain.learnt_kept, chain.learnt_kind) == (1, chain.kind)  # both shadows hold the chunk
    policy._duel._count(1000, 999)
    assert learnt()
    for _ in range(8):
        policy._duel._count(1000, 900)
    assert not learnt()
    policy._duel.hinted(chain)
    assert not learnt()
    for _ in range(20):
        policy._duel._count(1000, 1200)
    assert learnt()


def test_saved_chunks_of_a_prompt_do_not_depend_on_the_clock() -> None:
    """Time passes while a prompt is saved. The choice of victims still changes the hit rate by less than 2 %."""
    agents = w.coding_agents(1, sessions=14, hours=0.4)
    still, ticks = (replay(agents, "sessions", 0.08, tick_s=tick_s).hit_rate for tick_s in (0.0, 0.001))
    assert ticks > 0.98 * still > 0.6


def test_false_hints_cost_less_than_one_point_of_the_hit_rate() -> None:
    """Each prompt is announced to continue in one second, but its session pauses for a random time."""
    draw, prompts = random.Random(0), list[tuple[float, str, int]]()
    for session in range(100):
        at_s, size = draw.uniform(0, 3000), draw.randint(3, 10)
        for _ in range(10):
            prompts.append((at_s, f"{session}/", size))
            at_s += draw.lognormvariate(3, 1.2)
            size += draw.randint(0, 2)
    prompts.sort()
    least = sum(_hits(Lru(), prompts, 100)) - sum(size for _, _, size in prompts) // 100
    assert sum(_hits(Sessions(100), prompts, 100, 1.0)) > least


def test_hits_of_a_prompt_end_at_the_first_missing_chunk() -> None:
    """A prompt's hits end at the first of its chunks that the pool would not hold."""
    duel, begins, ends, other = Duel(10, Returns()), _chain("a"), _chain("b"), _chain("c")
    duel.used([(ends, 4), (begins, 6)], 1.0)
    duel.used([(other, 6)], 2.0)
    assert [duel._lru.kept(chain) for chain in (begins, ends, other)] == [4, 0, 6]
    assert duel._hits == 0
    duel.used([(ends, 4), (begins, 6)], 3.0)
    assert duel._hits == 4


@pytest.mark.parametrize("size", [3, 6])
def test_a_chain_that_is_split_is_two(size: int) -> None:
    """Chunks behind the split belong to the new chain, as far as the pool would hold these chunks."""
    duel, chain, rest = Duel(10, Returns()), _chain("a"), _chain("b")
    duel.saved(chain, 5, 1.0)
    duel.split(chain, size, rest, 3)
    for shadow in (duel._lru, duel._learnt):
        assert [shadow.kept(one) for one in (chain, rest)] == ([3, 2] if size == 3 else [5, 0])


def test_chunk_that_a_prompt_evicts_of_itself_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is smaller than a conversation.

    LRU's shadow follows the chunks that LRU would hold, even while the learnt order chooses the victims.
    """
    draw, at_s, sizes, prompts = random.Random(1), 0.0, dict[int, int](), list[tuple[float, str, int]]()
    for _ in range(2000):
        at_s, session = at_s + draw.expovariate(0.2), draw.randrange(25)
        sizes[session] = sizes.get(session, 0) + draw.randrange(1, 6)
        if sizes[session] > SLOTS:
            sizes[session] = 1
        prompts.append((at_s, f"{session}/", sizes[session]))
    followed = 0

    def count(duel: Duel, lru: int, learnt: int) -> None:
        nonlocal followed
        del learnt
        followed += lru
        duel.learnt = True

    monkeypatch.setattr(Duel, "_count", count)
    _hits(Sessions(60), prompts, 60)
    assert followed == pytest.approx(sum(_hits(Lru(), prompts, 60)), rel=0.1)


@pytest.mark.parametrize("quotas", [False, True])
def test_shadows_have_as_many_slots_as_the_pool_may_use(quotas: bool) -> None:
    """A shadow has as many slots as the pool may use, which may be fewer than configured."""
    policies = list[Policy]()

    def make(slots: int) -> Policy:
        policies.append(one := make_policy("sessions", slots))
        return one

    def shadows() -> set[tuple[int, int]]:
        made = [one._one for one in policies if isinstance(one, RescuedPolicy)]
        duels = [one._duel for one in made if isinstance(one, Sessions)]
        return {(duel._lru.slots, duel._learnt.slots) for duel in duels}

    catalog = (
        SharedCatalog(SLOTS, 1, Accounts([], SLOTS, make), Counters(), ready=10)
        if quotas
        else Catalog(SLOTS, 1, make(SLOTS), Counters(), ready=10)
    )
    assert shadows() == {(10, 10)}
    catalog.use_more(20)
    assert shadows() == {(20, 20)}
    catalog.limit(15)
    assert shadows() == {(15, 15)}
    catalog.use_more(SLOTS)
    assert shadows() == {(15, 15)}


def test_learnt_order_is_proven_when_the_pool_is_smaller_than_configured() -> None:
    """With the configured number of slots, both shadows would hold all chunks, so their hits would be equal."""
    prompts = [(turn * 5.0, "goes on/" if turn % 2 else f"once {turn}/", 20 if turn % 2 else 30) for turn in range(200)]
    policy = Sessions(4 * SLOTS)
    Catalog(4 * SLOTS, 1, policy, Counters()).limit(SLOTS)
    assert sum(_hits(policy, prompts)) == sum(_hits(Sessions(SLOTS), prompts))
    assert policy._duel.learnt
