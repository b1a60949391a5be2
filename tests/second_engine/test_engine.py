"""The engine without kvpipe: an answer depends only on its prompt, and not on other requests in the batch."""

from __future__ import annotations

import pytest

from tests.second_engine.engine import Engine
from tests.second_engine.prompts import MODEL, check, prompt


@pytest.mark.parametrize("step_tokens", [3, 16, 1024])
def test_answers_do_not_depend_on_the_batch(step_tokens: int) -> None:
    """Requests that are computed together, in chunks of any size, get the answers that each request gets alone."""
    engine = Engine(MODEL, step_tokens=step_tokens, prefix_cache=False)
    requests = [engine.add(f"r{i}", prompt(9 + 4 * i, seed=i), 4 + i) for i in range(4)]
    engine.run()
    check(requests)
    assert engine.blocks.free() == engine.blocks.count


def test_first_token_of_a_prompt_changes_the_answer() -> None:
    """Another first token changes the answer, so wrong KV of any token changes an answer, too."""
    engine = Engine(MODEL)
    one, other = prompt(40, seed=1), (5, *prompt(40, seed=1)[1:])
    made = [engine.add("one", one), engine.add("other", other)]
    engine.run()
    assert not made[0].logits[0].equal(made[1].logits[0])


def test_the_prefix_cache_changes_no_answer() -> None:
    """If a prompt begins like an earlier prompt, only the other tokens are computed, with the same answer."""
    engine = Engine(MODEL)
    first = engine.add("first", prompt(30, shared=22))
    engine.run()
    assert len(engine.blocks.prefix(first.block_hashes)) == 37 // 4
    again = [engine.add("second", prompt(30, seed=2, shared=22)), engine.add("third", prompt(30, shared=22))]
    engine.step()
    assert [request.num_computed_tokens for request in again] == [30, 30]
    engine.run()
    check([first, *again])
    engine.reset()
    assert engine.blocks.prefix(first.block_hashes) == []


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_changes_no_answer(prefix_cache: bool) -> None:
    """When blocks run out, the youngest request is computed again."""
    engine = Engine(MODEL, blocks=12, prefix_cache=prefix_cache)
    requests = [engine.add(f"r{i}", prompt(14, seed=i), 16) for i in range(3)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 1
    check(requests)
    assert engine.blocks.free() == 12


def test_blocks_of_an_aborted_request_are_free() -> None:
    """The blocks of an aborted request become free, and other requests are answered."""
    engine = Engine(MODEL)
    one, other = engine.add("one", prompt(20)), engine.add("other", prompt(20, seed=1))
    engine.step()
    engine.abort(one)
    engine.run()
    check([other])
    assert engine.blocks.free() == engine.blocks.count


def test_more_than_the_caches_hold_is_refused() -> None:
    """A request that needs more blocks than the caches have could never be computed."""
    with pytest.raises(ValueError, match="more tokens"):
        Engine(MODEL, blocks=4).add("big", prompt(15), 2)
