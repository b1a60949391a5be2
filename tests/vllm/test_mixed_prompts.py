"""Prompts of tokens and embeddings, as vLLM hashes their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from vllm.pooling_params import PoolingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvpipe.connectors.vllm.remedies import mixed_prompts

BLOCK = 4
ROWS = torch.randn(3 * BLOCK, 8, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _remedied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", kv_cache_utils._gen_prompt_embeds_extra_hash_keys
    )
    kv_cache_utils.init_none_hash(sha256)
    mixed_prompts.extend_hashes()
    mixed_prompts.extend_hashes()


def _hashes(
    rows: torch.Tensor | None, tokens: Sequence[int] | None = None, which: Sequence[bool] | None = None
) -> list[bytes]:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    request = Request(
        "", list(tokens) if tokens is not None else None, None, PoolingParams(), prompt_embeds=rows,
        prompt_is_token_ids=list(which) if which is not None else None, block_hasher=hasher,
    )  # fmt: skip
    return list(request.block_hashes)


def test_hashes_cover_tokens_and_used_embeddings() -> None:
    """Hashes differ from the first block on in which tokens or used embeddings differ.

    Unused embeddings do not count.
    """
    tokens, embedded, some = [0] * len(ROWS), [False] * len(ROWS), [False] * BLOCK + [True] * BLOCK + [False] * BLOCK
    one, other = _hashes(ROWS, tokens, embedded), _hashes(ROWS, tokens, some)
    assert len(one) == len(ROWS) // BLOCK
    assert one[0] == other[0]
    assert set(one[1:]).isdisjoint(other[1:])
    assert _hashes(ROWS, tokens, some) == other


def test_hashes_cover_the_type_of_embeddings() -> None:
    """Equal bytes of another type are different numbers."""
    assert set(_hashes(ROWS)).isdisjoint(_hashes(ROWS.view(torch.float16)))
    assert _hashes(ROWS) == _hashes(ROWS.clone())


def test_prompts_of_tokens_are_hashed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes equal vLLM's own hashes, so a router finds these prompts."""
    remedied = _hashes(None, range(len(ROWS)))
    wrapped = kv_cache_utils._gen_prompt_embeds_extra_hash_keys
    monkeypatch.setattr(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", wrapped.__wrapped__)
    assert _hashes(None, range(len(ROWS))) == remedied
