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
    router = Router({"french": adapter.lora_path})

    def publish(batch: KVEventBatch) -> None:
        router.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events)

    reported = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "kv_events_config": reported}
    tokens, hasher = prompt(130, 1), get_request_block_hasher(BLOCK, sha256)
    with engine(kvpipe={"chunk_tokens": 64}, enable_prefix_caching=True, **options) as live:
        live.scheduler.kv_event_publisher.publish = publish  # type: ignore[method-assign, assignment]
        asked: list[dict[str, Any]] = [{}, {"salt": "alice"}, {"lora": adapter}, {"salt": "bob", "lora": adapter}]
        blocks: list[set[bytes]] = []
        for one in asked:
            live.generate([tokens], 2, **one)
            live.settle()
            named = Request(
                "named", tokens, SamplingParams(), None,
                block_hasher=hasher, cache_salt=one.get("salt"), lora_request=one.get("lora"),
            )  # fmt: skip
            blocks.append(set(named.block_hashes))
        assert router.problems == []
        for medium in ("CPU", "GPU"):
            assert router.index[medium, 0] == set().union(*blocks)
        assert len(router.index["CPU", 0]) == len(tokens) // BLOCK * len(asked), "no block is another's"
        assert live.llm.reset_prefix_cache()
        live.generate([prompt(40, 2)], 2)
        live.settle()
        assert router.problems == []
        assert set().union(*blocks) <= router.index["CPU", 0], "kvpipe's blocks are announced again"
        assert not set().union(*blocks) & router.index["GPU", 0]
        live.generate([tokens], 2, **asked[3])
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, len(tokens))
