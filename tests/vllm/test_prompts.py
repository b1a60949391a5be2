"""A prompt from an operator has the same hashes as a request's prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvpipe.connectors.vllm.prompts import BLOCKS_PER_TURN, PromptBlocks
from kvpipe.manage.engine import BadRequestError
from kvpipe.manage.models import AdapterOf, Prompt


def blocks(algorithm: str, *, lora: bool = True) -> PromptBlocks:
    """Return the prompt blocks of an engine with blocks of 16 tokens."""
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        model_config=SimpleNamespace(max_model_len=5000),
        lora_config=object() if lora else None,
    )
    return PromptBlocks(config, 16)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 16 * BLOCKS_PER_TURN, 4999])
@pytest.mark.parametrize(("salt", "adapter"), [(None, None), ("tenant", None), (None, "x"), ("tenant", "x")])
def test_the_hashes_are_vllms(algorithm: str, tokens: int, salt: str | None, adapter: str | None) -> None:
    """The hashes are equal with a salt, an adapter, both or neither, for any length.

    The hashes are computed a few at a time.
    """
    hash_of = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_of)
    ids = [(7 * at) % 1000 for at in range(tokens)]
    lora = LoRARequest(adapter, 3, "/somewhere") if adapter else None
    hasher = kv_cache_utils.get_request_block_hasher(16, hash_of)
    own = Request("r", ids, None, PoolingParams(), lora_request=lora, cache_salt=salt, block_hasher=hasher)
    of = AdapterOf(name=adapter, number=3, path="/somewhere") if adapter else None
    turns = [len(some) for some in blocks(algorithm)(Prompt(tokens=ids, cache_salt=salt, adapter=of))]
    assert max(after - before for before, after in zip([0, *turns], turns, strict=False)) <= BLOCKS_PER_TURN
    *_, last = blocks(algorithm)(Prompt(tokens=ids, cache_salt=salt, adapter=of))
    assert last == own.block_hashes
    assert len(last) == tokens // 16


def test_prompt_that_the_engine_would_refuse_is_refused() -> None:
    """A prompt is refused if it is too long, or if it names an adapter that is not served."""
    with pytest.raises(BadRequestError, match="5001 are more than this engine's 5000"):
        next(blocks("sha256")(Prompt(tokens=[1] * 5001)))
    adapted = Prompt(tokens=[1], adapter=AdapterOf(name="x", number=1, path="/x"))
    with pytest.raises(BadRequestError, match="serves no adapters"):
        next(blocks("sha256", lora=False)(adapted))
