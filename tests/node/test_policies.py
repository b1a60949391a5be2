"""One policy evicts the chunks of all engines. The holder or the first engine chooses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvpipe.node.holder import Holder
from kvpipe.node.messages import Unwelcome, Welcome
from kvpipe.node.rules import DEFAULT_POLICY, NodeRules, rules_of, write_rules
from kvpipe.node.segment import create
from tests.node.test_holder import Caller, _hello, _holding, _unused_memory
from tests.rigs.node_engine import SLOT_BYTES, SLOTS


@pytest.fixture
def folder(short_path: Path) -> Path:
    """Return the folder of the node's socket."""
    return short_path / "node"


def _policies(holder: Holder) -> set[str]:
    return {memory.policy for memory in holder.status().memories}


def test_first_engine_chooses_the_policy(folder: Path) -> None:
    """An engine that needs another policy is refused, with one sentence. An engine without a policy is accepted."""
    with _holding(folder) as holder:
        answer, _ = Caller(holder, folder).ask(_hello(policy="s3fifo"))
        assert isinstance(answer, Welcome)
        assert (answer.policy, answer.takes_hints, _policies(holder)) == ("s3fifo", False, {"s3fifo"})
        assert isinstance(Caller(holder, folder).ask(_hello(2))[0], Welcome)
        refused, _ = Caller(holder, folder).ask(_hello(3, policy="lru"))
        assert isinstance(refused, Unwelcome)
        assert refused.why.startswith("the node's memory evicts by the policy 's3fifo', this engine needs 'lru'; unset")
        assert not refused.again


def test_memory_without_engines_gets_the_policy_of_the_next_engine(folder: Path) -> None:
    """The memory and its chunks stay. An engine without a policy changes nothing."""
    with _holding(folder) as holder:
        memory = _unused_memory(holder, folder)
        assert _policies(holder) == {DEFAULT_POLICY}
        answer, fd = Caller(holder, folder).ask(_hello(2, policy="sessions"))
        assert isinstance(answer, Welcome)
        assert fd is not None
        assert (answer.policy, os.fstat(fd).st_ino) == ("sessions", memory)
        os.close(fd)


def test_policy_of_the_service_holds_for_all_engines(folder: Path) -> None:
    """`kvpipe pool start --policy` names the policy. An engine that needs another one does not change it."""
    with _holding(folder, policy="lru") as holder:
        _unused_memory(holder, folder)
        assert isinstance(Caller(holder, folder).ask(_hello(2, policy="sessions"))[0], Unwelcome)
        assert isinstance(Caller(holder, folder).ask(_hello(3))[0], Welcome)
        assert _policies(holder) == {"lru"}


def test_adopted_memory_gets_the_policy_of_the_service_when_it_has_no_engines(folder: Path) -> None:
    """With engines, the memory keeps its policy, because these engines may need it."""
    fd = create(SLOTS, SLOT_BYTES)
    write_rules(fd, NodeRules("s3fifo"))
    holder = Holder(folder, adopt_s=0, keep_s=600, fd=fd, policy="sessions")
    assert isinstance(Caller(holder, folder).ask(_hello(2))[0], Welcome)
    assert _policies(holder) == {"sessions"}
    memory = os.dup(fd)
    holder.close()
    second = Holder(folder, adopt_s=0, keep_s=600, fd=memory, policy="lru")
    refused, _ = Caller(second, folder).ask(_hello(3, policy="lru"))
    assert isinstance(refused, Unwelcome)
    assert isinstance(Caller(second, folder).ask(_hello(4, policy="sessions"))[0], Welcome)
    second.close()


def test_policy_that_the_holder_lacks_is_refused(folder: Path) -> None:
    """The policy's package may be missing where the holder runs. No memory is made."""
    with _holding(folder) as holder:
        refused, _ = Caller(holder, folder).ask(_hello(policy="mine"))
        assert isinstance(refused, Unwelcome)
        assert "no eviction policy 'mine' (it has lru, s3fifo, sessions" in refused.why
        assert holder.status().memories == ()


def test_new_holder_keeps_the_policy(folder: Path) -> None:
    """The policy is in the memory. Without whole rules there, a memory has the default policy."""
    fd = create(SLOTS, SLOT_BYTES)
    assert rules_of(fd) == NodeRules(DEFAULT_POLICY)
    write_rules(fd, NodeRules("s3fifo"))
    holder = Holder(folder, adopt_s=0, keep_s=600, fd=os.dup(fd))
    assert _policies(holder) == {"s3fifo"}
    holder.close()
    os.pwrite(fd, b"x", 1040)
    assert rules_of(fd) == NodeRules(DEFAULT_POLICY)
    os.close(fd)
