"""In the policy of sessions, announcements of one client do not harm other clients."""

from __future__ import annotations

import pytest

from kvpipe.cache.policy import Sessions
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.policy.returns import DEMOTED
from kvpipe.cache.policy.sessions import CHAIN_MAX
from kvpipe.testing.policy_conformance import Item
from tests.cache.chains import chain_of


class Clients:
    """Serves prompts of several clients. A prompt is a list of names of chunks. Each request ends at once."""

    def __init__(self) -> None:
        """Start with a policy for 1000 slots, which is enough for all chunks of a test."""
        self.policy, self.now_s = Sessions(1000), 0.0
        self.items: dict[str, Item] = {}

    def serve(self, *prompt: str) -> list[Item]:
        """Serve a prompt some seconds later.

        Return its chunks in the order of the report of its end: the last chunk first.
        """
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
        """Serve a prompt whose client sends a hint."""
        for item in self.serve(*prompt):
            self.policy.hint(item, hint)

    def gone(self, name: str) -> None:
        """Check that this chunk is the next victim."""
        victim = self.policy.victim()
        assert victim is self.items.pop(name)

    def kinds(self, *names: str) -> set[int]:
        """Return the kinds of these chunks."""
        return {chain_of(self.policy, self.items[name]).hinted for name in names}


_HARM = [Hint(Action.DEMOTE), Hint(Action.RESUME, 30 * 86400.0)]


@pytest.mark.parametrize("harm", _HARM, ids=["demote", "resume"])
def test_conversation_is_not_demoted_by_another_client_with_its_beginning(harm: Hint) -> None:
    """The other client knows only the system prompt, and sends a harmful hint for it."""
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
def test_prefix_is_not_demoted_when_one_of_its_branches_is_gone(harm: Hint) -> None:
    """Five users continue a prefix. The continuation of a sixth user was demoted and evicted.

    Harmful hints for the prefix still do not demote the chunks of the five users.
    """
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
def test_prefix_of_several_chains_is_shared(harm: Hint) -> None:
    """The shared prefix consists of several chains. One chain follows each chain of the prefix except the last."""
    clients, system = Clients(), [f"s{at}" for at in range(CHAIN_MAX + 40)]
    for user in "ab":
        clients.serve(*system, user)
    clients.hints(harm, *system[:4])
    clients.hints(harm, *system[:CHAIN_MAX])
    clients.hints(harm, *system)
    assert clients.kinds(*system, "a", "b") == {0}


def test_a_long_prompt_is_demoted_from_its_end() -> None:
    """The prompt consists of several chains, and no other prompt branches off.

    The prompt's last chunks are evicted first.
    """
    clients, prompt = Clients(), [f"p{at}" for at in range(2 * CHAIN_MAX + 40)]
    clients.serve(*prompt)
    clients.hints(Hint(Action.DEMOTE), *prompt)
    assert clients.kinds(*prompt) == {DEMOTED}


def test_chain_in_use_by_another_request_is_not_demoted() -> None:
    """One request's hint demotes the chain while another request uses it.

    The demotion has no effect until the other request has ended.
    """
    clients = Clients()
    items = clients.serve("a", "b")
    for item in items:
        clients.policy.refresh(item)
    for item in items:
        clients.policy.hint(item, Hint(Action.DEMOTE))
    clients.serve("a", "b")
    assert clients.kinds("a", "b") == {0}


def test_session_that_resumes_late_takes_one_slot_of_a_session_that_resumes_soon() -> None:
    """A late session's hint takes effect with its first chunk.

    So the late session evicts one chunk of the soon session, and after that only its own chunks. A third session, which
    resumes before both, evicts another chunk of the soon session.
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
    """A prompt of many chains gets retain and resume hints in alternation, and each hint replaces the hint before.

    Meanwhile the counts of the first hint are halved. Then a retained session returns.
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
