"""The policy of sessions: what one client announces does not harm others."""

from __future__ import annotations

import pytest

from kvpipe.cache.hints import Action, Hint
from kvpipe.cache.policy import Sessions
from kvpipe.cache.policy.returns import DEMOTED
from kvpipe.cache.policy.sessions import CHAIN_MAX
from kvpipe.testing.policy_conformance import Item
from tests.cache.chains import chain_of


class Clients:
    """Prompts of several clients, in names of chunks; each is over at once."""

    def __init__(self) -> None:
        """An empty pool, with room for all."""
        self.policy, self.now_s = Sessions(1000), 0.0
        self.items: dict[str, Item] = {}

    def serve(self, *prompt: str) -> list[Item]:
        """Serve a prompt, some seconds later. Returns its chunks, the last first, as its end reports them."""
        self.now_s += 10
        there = [name for name in prompt if name in self.items]
        for name, before in zip(prompt, ["", *prompt], strict=False):
            self.items.setdefault(name, Item(name, before))
        items = [self.items[name] for name in prompt]
        self.policy.request(self.now_s, over=False)
        for name in there:
            self.policy.remove(self.items[name])
        for item in items:
            self.policy.insert(item, hit=item.identity in there)
        items.reverse()
        self.policy.request(self.now_s + 1, over=True)
        for item in items:
            self.policy.refresh(item)
        self.policy.request(self.now_s + 2, over=False)
        return items

    def hints(self, hint: Hint, *prompt: str) -> None:
        """Serve a prompt whose client sends this hint."""
        for item in self.serve(*prompt):
            self.policy.hint(item, hint)

    def gone(self, name: str) -> None:
        """The next victim is this one."""
        victim = self.policy.victim()
        assert victim is self.items.pop(name)

    def kinds(self, *names: str) -> set[int]:
        """Return what these chunks count as."""
        return {chain_of(self.policy, self.items[name]).hinted for name in names}


_HARM = [Hint(Action.DEMOTE), Hint(Action.RESUME, 30 * 86400.0)]


@pytest.mark.parametrize("harm", _HARM, ids=["demote", "resume"])
def test_a_conversation_is_not_demoted_by_who_sends_its_beginning(harm: Hint) -> None:
    """Another client knows the system prompt, and nothing of what follows it."""
    clients, chat = Clients(), ["s0", "s1", *(f"a{at}" for at in range(6))]
    for _ in range(4):
        clients.serve(*chat)
    clients.hints(harm, "s0")
    assert clients.kinds(*chat) == {0}
    clients.hints(Hint(Action.RESUME, 70.0), *chat)
    own = clients.kinds(*chat)
    clients.hints(harm, "s0")
    assert clients.kinds("s0") == {0}
    assert clients.kinds(*chat[1:]) == own
    clients.hints(harm, *chat)
    assert 0 not in clients.kinds(*chat)


@pytest.mark.parametrize("harm", _HARM, ids=["demote", "resume"])
def test_what_one_branch_is_left_of_is_not_demoted_for_one(harm: Hint) -> None:
    """Five users go on behind a prefix; a sixth went on elsewhere, and that is gone."""
    clients = Clients()
    users = [["s0", "s1", "t0", "t1", f"u{user}"] for user in range(5)]
    for user in users:
        clients.serve(*user)
    clients.hints(Hint(Action.DEMOTE), "s0", "s1", "x")
    assert clients.kinds("x") == {DEMOTED}
    clients.gone("x")
    for user in users:
        clients.serve(*user)
    clients.hints(harm, "s0", "s1")
    clients.hints(harm, "s0", "s1", "t0", "t1")
    assert clients.kinds(*(name for user in users for name in user)) == {0}


@pytest.mark.parametrize("harm", _HARM, ids=["demote", "resume"])
def test_a_long_prefix_is_shared_as_well(harm: Hint) -> None:
    """It is of several chains, and all of them but the last have one behind them."""
    clients, system = Clients(), [f"s{at}" for at in range(CHAIN_MAX + 40)]
    for user in "ab":
        clients.serve(*system, user)
    clients.hints(harm, *system[:4])
    clients.hints(harm, *system[:CHAIN_MAX])
    clients.hints(harm, *system)
    assert clients.kinds(*system, "a", "b") == {0}


def test_a_long_prompt_is_demoted_from_its_end() -> None:
    """Nobody else has gone on anywhere in it."""
    clients, prompt = Clients(), [f"p{at}" for at in range(2 * CHAIN_MAX + 40)]
    clients.serve(*prompt)
    clients.hints(Hint(Action.DEMOTE), *prompt)
    assert clients.kinds(*prompt) == {DEMOTED}


def test_what_others_are_using_is_not_demoted_for_their_wait() -> None:
    """It comes while another request runs that has been given the chain back from a load."""
    clients = Clients()
    items = clients.serve("a", "b")
    for item in items:
        clients.policy.refresh(item)
    for item in items:
        clients.policy.hint(item, Hint(Action.DEMOTE))
    clients.serve("a", "b")
    assert clients.kinds("a", "b") == {0}


def test_what_is_resumed_late_takes_no_slots_of_what_is_resumed_soon() -> None:
    """A request's hint counts from its first chunk on: it evicts one of the others', then its own.

    That is so although the other chain has begun to go, and was not hinted to come late.
    """
    clients = Clients()
    policy = clients.policy
    clients.hints(Hint(Action.RESUME, 20.0), *(f"a{at}" for at in range(6)))
    policy.request(14.0, over=False)
    clients.gone("a5")
    late = Hint(Action.RESUME, 3600.0)
    for name, before in (("x0", ""), ("x1", "x0")):
        item = clients.items[name] = Item(name, before)
        policy.insert(item, hit=False)
        policy.hint(item, late)
        clients.gone(name)
    item = Item("y0", "")
    policy.insert(item, hit=False)
    policy.hint(item, Hint(Action.RESUME, 15.0))
    clients.gone("a4")


def test_hints_that_are_taken_back_leave_no_debt() -> None:
    """A prompt of many chains is to be retained, and to resume, again and again: the second hint ends the first.

    Meanwhile what was counted of the first has been halved. Then somebody returns who was to be retained.
    """
    clients, prompt = Clients(), [f"p{at}" for at in range(520)]
    clients.policy = Sessions(4000)
    clients.serve(*prompt)
    for at in range(1, len(prompt)):
        clients.serve(*prompt[:at], f"x{at}")
    for at in range(1, len(prompt)):
        branch = clients.items.pop(f"x{at}")
        clients.policy.remove(branch)
        clients.policy.dropped(branch)
    for _ in range(6):
        items = clients.serve(*prompt)
        for hint in (Hint(Action.RETAIN, clients.now_s + 600), Hint(Action.RESUME, clients.now_s + 20)):
            for item in items:
                clients.policy.hint(item, hint)
    clients.hints(Hint(Action.RETAIN, clients.now_s + 612), "q0")
    clients.serve("q0", "q1")
    assert clients.kinds("q0", "q1") == {0}
    assert min(clients.policy._returns._ended) >= 0
