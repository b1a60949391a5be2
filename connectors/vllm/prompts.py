"""Hashes the prompts that operators name, in the same way in which vLLM hashes the prompts of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from kvpipe.manage.engine import BadRequestError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpipe.manage.models import Prompt

BLOCKS_PER_TURN: Final = 64


class PromptBlocks:
    """Computes the block hashes of operators' prompts. There is one per engine."""

    def __init__(self, config: VllmConfig, hash_tokens: int) -> None:
        """Start with `hash_tokens`, the number of tokens per block hash."""
        self._hash, self._size = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo), hash_tokens
        self._tokens_max, self._adapters = config.model_config.max_model_len, config.lora_config is not None

    def __call__(self, prompt: Prompt) -> Iterator[Sequence[bytes]]:
        """Yield the growing list of the prompt's block hashes, see `kvpipe.manage.engine.PromptHasher`."""
        tokens, size, adapter = prompt.tokens, self._size, prompt.adapter
        if len(tokens) > self._tokens_max:
            raise BadRequestError(f"tokens: {len(tokens)} are more than this engine's {self._tokens_max}")
        if adapter is not None and not self._adapters:
            raise BadRequestError("adapter: this engine serves no adapters")
        request = _request(prompt)
        hashes: list[BlockHash] = []
        for at in range(0, len(tokens) - size + 1, size):
            keys, _ = generate_block_hash_extra_keys(request, at, at + size, 0)
            last = hashes[-1] if hashes else None
            hashes.append(hash_block_tokens(self._hash, last, tokens[at : at + size], keys))
            if len(hashes) % BLOCKS_PER_TURN == 0:
                yield hashes
        yield hashes


def prompt_request(prompt: Prompt, hashes: Sequence[bytes]) -> Request:
    """Return a request with these hashes for the KV events of an operator's prompt. The request is never served."""
    request = _request(prompt)
    request.block_hashes = [BlockHash(key) for key in hashes]
    return request


def _request(prompt: Prompt) -> Request:
    one = prompt.adapter
    lora = LoRARequest(one.name, one.number, one.path) if one is not None else None
    return Request("", prompt.tokens, None, PoolingParams(), lora_request=lora, cache_salt=prompt.cache_salt)
