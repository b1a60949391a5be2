"""Hints through vLLM's own doors."""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.cache.catalog import Chunk
from kvpipe.cache.hints import Action, Hint
from tests.engine.common import assert_clean, baseline, engine, prompt

pytestmark = pytest.mark.engine
OWN: list[tuple[Any, str]] = [
    ({"retain": {"ttl_seconds": 60}}, "hints_told.retain"),
    ({"retain": {"ttl_seconds": "60"}}, "hints_ignored.payload"),
    ({"retain": {}, "demote": {}}, "hints_ignored.contradiction"),
    ({"fetch": {}}, "hints_ignored.action"),
    ("retain", "hints_ignored.malformed"),
]
"""What is in the parameter, and what is counted then."""


def test_an_engine_in_the_process() -> None:
    """The policy is told of every chunk of a request that has ended; answers are those without a connector."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    tokens = prompt(300, 71)
    expected = baseline([tokens], 12, enable_prefix_caching=False)[0]
    heard: list[tuple[Chunk, Hint]] = []
    with engine(kvpipe={"chunk_tokens": 64}, enable_prefix_caching=False) as live:
        side = live.connector.scheduler
        assert side is not None
        catalog: Any = side.catalog
        catalog._hint = lambda chunk, hint: heard.append((chunk, hint))

        def say(envelope: Any, own: Any) -> None:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
            if own is not None:
                params.extra_args = {"kv_transfer_params": {"kvpipe": own}}
            request = f"hinted-{len(side.counters)}-{len(heard)}"
            live.llm.llm_engine.add_request(request, {"prompt_token_ids": tokens}, params, kv_hints=envelope)
            assert list(live.drain()[request].outputs[0].token_ids) == expected
            live.settle()

        before = catalog.now_s
        say(KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.resume", "1.0", {"after_seconds": 20})]), None)
        chunks = {chunk for chunk, _ in heard}
        assert chunks == {*catalog.index(0).values()}
        assert len(chunks) == (300 + 12) // 64 + 1
        assert {hint.action for _, hint in heard} == {Action.RESUME}
        (at_s,) = {hint.at_s for _, hint in heard}  # also of what lands later
        assert at_s >= before + 20
        for own, counted in OWN:
            say(None, own)
            assert live.connector.stats()[counted], counted
        assert_clean(live)
