"""Hints reach kvpipe through vLLM's own interfaces. The engine is in this process, or behind vLLM's HTTP server."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.tenants import ANYBODY
from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from kvpipe.inputs.listening import Address
from kvpipe.manage.client import send_request
from kvpipe.testing.waiting import WAIT_S
from tests.engine.common import BLOCK, assert_clean, baseline, engine, prompt
from tests.engine.serving import Server

pytestmark = pytest.mark.engine
TOKEN = "t0" * 16
SLOT_BYTES = 64 * TOKEN_BYTES
"""The bytes of the KV of 64 tokens of the model."""
OWN: list[tuple[Any, str]] = [
    ({"retain": {"ttl_seconds": 60}}, "hints_applied.retain"),
    ({"retain": {"ttl_seconds": "60"}}, "hints_ignored.payload"),
    ({"retain": {}, "demote": {}}, "hints_ignored.contradiction"),
    ({"fetch": {}}, "hints_ignored.action"),
    ("retain", "hints_ignored.malformed"),
]
"""Pairs: the hint in the request's parameter, and the counter that the hint increments."""


def test_an_engine_in_the_process() -> None:
    """The policy is notified of every chunk of a finished request.

    Answers equal those of an engine without a connector.
    """
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    tokens = prompt(300, 71)
    expected = baseline([tokens], 12, enable_prefix_caching=False)[0]
    received: list[tuple[Chunk, Hint]] = []
    with engine(kvpipe={"chunk_tokens": 64}, enable_prefix_caching=False) as live:
        side = live.connector.scheduler
        assert side is not None
        catalog: Any = side.catalog
        catalog._hint = lambda chunk, hint: received.append((chunk, hint))

        def send(envelope: Any, own: Any) -> None:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
            if own is not None:
                params.extra_args = {"kv_transfer_params": {"kvpipe": own}}
            request = f"hinted-{len(side.counters)}-{len(received)}"
            live.llm.llm_engine.add_request(request, {"prompt_token_ids": tokens}, params, kv_hints=envelope)
            assert list(live.drain()[request].outputs[0].token_ids) == expected
            live.settle()

        before = catalog.now_s
        send(KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.resume", "1.0", {"after_seconds": 20})]), None)
        chunks = {chunk for chunk, _ in received}
        assert chunks == {*catalog.index(0).values()}
        assert len(chunks) == (300 + 12) // 64 + 1
        assert {hint.action for _, hint in received} == {Action.RESUME}
        # two kinds of times: from the request's arrival, and from its end
        soon_s, at_s = sorted({hint.at_s for _, hint in received})
        assert before + 20 <= soon_s < at_s
        for own, counted in OWN:
            send(None, own)
            assert live.connector.stats()[counted], counted
        assert_clean(live)


def test_announced_session_is_in_memory_before_its_request_arrives(tmp_path: Path) -> None:
    """A small pool has evicted the session's chunks, and a disk holds the chunks.

    The session's next request does not wait for the disk.
    """
    from vllm import SamplingParams

    chunk, slots, tokens, more = 64, 32, prompt(300, 73), prompt(20, 74)
    others = [prompt(300, 100 + i) for i in range(12)]
    plain: dict[str, Any] = {"enable_prefix_caching": False}
    answer = baseline([tokens], 12, **plain)[0]
    after = [*tokens, *answer, *more]
    expected = baseline([after], 12, **plain)[0]
    tier = {"kind": "disk", "path": str(tmp_path / "kv"), "store": "all"}
    kvpipe = {"chunk_tokens": chunk, "pool_bytes_max": slots * SLOT_BYTES, "tiers": [tier]}
    with engine(kvpipe=kvpipe, **plain) as live:
        side = live.connector.scheduler
        assert side is not None
        side.prefetching.idle_s_max = WAIT_S
        catalog: Any = side.catalog
        assert catalog.slots == slots
        catalog.ahead.of_account(ANYBODY)._used = slots  # makes all requests that were announced earlier arrive
        now_s = 1000.0
        catalog._clock = lambda: now_s
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
        params.extra_args = {"kv_transfer_params": {"kvpipe": {"resume": {"after_seconds": 1000}}}}
        assert live.generate([tokens], params=params) == [answer]
        live.settle()
        (known,) = side.prefetching.announced.prompts.values()
        whole = (300 + 12) // chunk
        for other in others:
            live.generate([other], 4)
            live.settle()
        missing = side.prefetching.prefixes.longest(known.asked, continued=True) * BLOCK < whole * chunk
        assert missing, "it was to be evicted"
        assert side.stats().get("chunks_prefetched", 0) == 0
        now_s += 950
        live.generate([others[-1]], 4)
        live.settle()
        brought = side.stats()["chunks_prefetched"]
        assert brought > 0
        assert side.prefetching.prefixes.longest(known.asked, continued=True) * BLOCK >= whole * chunk
        lookups = side.stats()["tier_lookup"]
        assert live.generate([after], 12) == [expected]
        stats = assert_clean(live)
        assert stats["prefetch_used"] == brought
        assert stats["tier_lookup"] == lookups, "it waited for a tier"
        assert stats["resumes_over.came"] == 1
        assert "hints_ignored" not in stats


def test_hints_sent_to_the_server_reach_the_engine(tmp_path: Path) -> None:
    """A client's hints in `kv_transfer_params` arrive at the engine, and no hint changes the answer."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN, encoding="utf-8")
    keys = {"manage": f"unix:{tmp_path}/{{engine}}.sock", "manage_token_file": str(token)}
    tokens, texts = prompt(200, 72), set[str]()
    with Server(tmp_path / "log", keys, "--no-enable-prefix-caching") as server:
        body = {
            "model": server.model, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True,
        }  # fmt: skip
        for own, _ in [(None, ""), *OWN]:
            params = {"kv_transfer_params": {"kvpipe": own}} if own is not None else {}
            status, text = server.ask("POST", "/v1/completions", body | params)
            assert status == http.client.OK, text
            texts.add(json.dumps(json.loads(text)["choices"][0]["token_ids"]))
        server.idle()
        (path,) = tmp_path.glob("*.sock")
        counted: Any = send_request(Address(str(path), "", 0), TOKEN, "GET", "/v1/counters", None)
    assert len(texts) == 1
    assert all(counted[name] for _, name in OWN)
