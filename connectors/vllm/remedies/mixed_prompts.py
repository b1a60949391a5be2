"""Extends vLLM's block hashes for prompts that mix token positions with embedding positions.

vLLM's hash covers the token numbers and the embeddings, but not which positions are tokens. At a token position the
model ignores the row of the embeddings. At an embedding position the token number is 0. So two prompts may differ only
in which positions are tokens. Such prompts have equal hashes but different KV. vLLM's hash also covers the embeddings'
bytes without their dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.request import Request

Keys = list[tuple[str, bytes]]


def extend_hashes() -> None:
    """Make block hashes in this process cover which positions are embeddings, and the embeddings' dtype. Idempotent."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415  (slow)

    wrap(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", _keys)


def _keys(keys: Callable[[Any, int, int], Keys], request: Request, start: int, stop: int) -> Keys:
    embeddings = request.prompt_embeds
    if embeddings is None:
        return keys(request, start, stop)
    which = request.prompt_is_token_ids
    more = f"{embeddings.dtype}:".encode() + bytes(which[start:stop] if which is not None else b"")
    return [(name, hashlib.sha256(digest + more).digest()) for name, digest in keys(request, start, stop)]
