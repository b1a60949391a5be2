"""A prefix-aware router beside a real engine: all that it knows it has from the engine's KV cache events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpipe.connectors.vllm.trial.router import Router
from kvpipe.testing.models import make_adapter
from tests.engine.common import BLOCK, assert_clean, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine


def test_a_router_distinguishes_salts_and_adapters(tmp_path: Path) -> None:
    """It makes the block hashes itself, of each request, finds each where it is, and goes on after vLLM's own reset."""
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    adapter = LoRARequest("french", 1, str(make_adapter(tmp_path / "french", 1)))
    router = Router({"french": adapter.lora_path}, BLOCK)

    def publish(batch: KVEventBatch) -> None:
        router.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events)

    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "kv_events_config": reported}
    tokens, hasher, in_chunk = prompt(8 * BLOCK + 2, 1), get_request_block_hasher(BLOCK, sha256), 4
    with engine(kvpipe={"chunk_tokens": in_chunk * BLOCK}, enable_prefix_caching=True, **options) as live:
        live.scheduler.kv_event_publisher.publish = publish  # type: ignore[method-assign, assignment]
        asked: list[dict[str, Any]] = [{}, {"salt": "alice"}, {"lora": adapter}, {"salt": "bob", "lora": adapter}]
        blocks: list[set[bytes]] = []
        ends: set[bytes] = set()
        for one in asked:
            live.generate([tokens], 2, **one)
            live.settle()
            named = Request(
                "named", tokens, SamplingParams(), None,
                block_hasher=hasher, cache_salt=one.get("salt"), lora_request=one.get("lora"),
            )  # fmt: skip
            blocks.append(set(named.block_hashes))
            ends.update(named.block_hashes[in_chunk - 1 :: in_chunk])
        assert router.problems == []
        assert router.index["GPU", 0] == set().union(*blocks)
        assert router.index["CPU", 0] == ends, "kvpipe announces ends of chunks"
        assert len(ends) == 2 * len(asked), "no chunk is another's"
        assert live.llm.reset_prefix_cache()
        live.generate([prompt(40, 2)], 2)
        live.settle()
        assert router.problems == []
        assert ends <= router.index["CPU", 0], "kvpipe's blocks are announced again"
        assert not set().union(*blocks) & router.index["GPU", 0]
        live.generate([tokens], 2, **asked[3])
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, len(tokens))


def test_a_prompt_hits_what_a_router_counts_when_it_shares_part_of_a_chunk() -> None:
    """Every announced length is tried, and all lengths between: of a prompt of three chunks and its answer."""
    from vllm import SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    in_chunk, router = 4, Router({}, BLOCK)
    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    tokens, hasher = prompt(3 * in_chunk * BLOCK, 3), get_request_block_hasher(BLOCK, sha256)
    with engine(
        kvpipe={"chunk_tokens": in_chunk * BLOCK}, enable_prefix_caching=True, kv_events_config=reported
    ) as live:
        live.scheduler.kv_event_publisher.publish = lambda batch: router.apply(batch.events)  # type: ignore[method-assign]
        answer = live.generate([tokens[: -2 * BLOCK]], BLOCK + 2)[0]  # it ends within the third chunk
        live.settle()
        held = tokens[: -2 * BLOCK] + answer[:-1]
        hits: list[int] = []
        for shared in (2 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK, 7 * BLOCK + 1, 9 * BLOCK, 10 * BLOCK, 11 * BLOCK):
            assert live.llm.reset_prefix_cache()
            asked = held[:shared] + prompt(2 * BLOCK, 4 + shared)
            named = Request("named", asked, SamplingParams(), None, block_hasher=hasher)
            promised = router.promised(("CPU", 0), named.block_hashes) * BLOCK
            before = assert_clean(live).get("tokens_loaded", 0)
            live.generate([asked], 1)
            hits.append(assert_clean(live).get("tokens_loaded", 0) - before)
            assert hits[-1] == promised, f"{shared} tokens are shared"
        assert router.problems == []
        assert hits == [blocks * BLOCK for blocks in (0, 0, 4, 4, 8, 10, 11)]
