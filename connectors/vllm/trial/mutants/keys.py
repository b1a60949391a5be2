"""Bugs in which tokens count as final too early, or chunks are kept under a wrong key."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm.trial.mutants.base import (
    ADAPTERS,
    CATALOG,
    LOADING,
    PREFIXES,
    SAVING,
    WORKER_ROLE,
    Mutant,
    Patch,
    one,
)
from kvpipe.connectors.vllm.trial.shapes import BLOCK

if TYPE_CHECKING:
    from vllm.v1.request import Request


def keys(kind: str) -> tuple[Patch, ...]:
    """Make all code use the function named `kind` instead of the keys of vLLM and of the adapter."""
    other = f"__import__({__name__!r}, fromlist=['']).{kind}"
    return one(ADAPTERS, "keys", "hashes: Sequence[bytes] = request.block_hashes", f"return {other}(request)")


MUTANTS: dict[str, Mutant] = {
    # ---- blocks of several sizes ----------------------------------------------------------------------------------
    "one_hash_for_one_unit": Mutant(
        "The hash of a block is used as the hash of a unit, though blocks of some groups are smaller than a unit.",
        one(PREFIXES, "key", "units * self._hashes_per_unit - 1", "units - 1"),
        shape="block-sizes",
    ),
    "one_page_for_one_unit": Mutant(
        "A unit is loaded as one block of every group, though blocks of some groups are smaller.",
        (
            Patch(LOADING, "_group_rows", "if len(stored) < paging.pages(stop - base) - page:", "if False:"),
            Patch(
                LOADING,
                "_group_rows",
                "stored, page = paging.stored(table, first, stop), paging.pages(first - base)",
                "stored, page, in_chunk = table[first:stop], first - base, self._per_chunk",
            ),
        ),
        shape="block-sizes",
    ),
    # ---- what is final -----------------------------------------------------------------------------------------------
    "sliced_at_computed_tokens": Mutant(
        "Tokens count as final up to `num_computed_tokens`, which vLLM advances before they are final.",
        one(SAVING, "plan", "self._prefixes.hashed_units(hashes, min(end, request.num_tokens))", "end // self._unit"),
        shape="drafts",
    ),
    "volatile_drafter_kv_published": Mutant(
        "A drafter's KV is found by its own tokens alone, though the KV of the last one depends on the next token.",
        one(PREFIXES, "__init__", "-(-geometry.ahead_tokens // hash_tokens)", "0"),
        shape="drafter",
    ),
    "drafter_kv_by_another_token_ahead": Mutant(
        "Whole chunks are looked up by their own tokens, though a drafter's keys contain the next token, too.",
        one(PREFIXES, "_keys", "self._hashes_per_unit, self._ahead", "self._hashes_per_unit, 0"),
        shape="async-scheduler-drafter",
    ),
    "masks_published": Mutant(
        "A step's saves end with its forward, before a drafter that is fed context has overwritten its masks.",
        one(
            WORKER_ROLE,
            "start_load_kv",
            "self.worker.start_loads(",
            "self.worker.end_step()\n        self.worker.start_loads(",
        ),
        shape="async-scheduler-masks",
        by="findable_chunks_are_whole_and_true",
    ),
    "local_chunk_begins_late": Mutant(
        "A lookup leaves out the first unit of a chunk of local attention.",
        one(PREFIXES, "_window_gap", "best // window * window", "min(best, best // window * window + 1)"),
        shape="local",
    ),
    "not_saved_when_computed_runs_ahead": Mutant(
        "Tokens that are computed before they are final are never saved.",
        one(
            SAVING,
            "plan",
            "self._prefixes.hashed_units(hashes, min(end, request.num_tokens))\n",
            "self._prefixes.hashed_units(hashes, min(end, request.num_tokens))\n    if end > request.num_tokens:\n"
            "        progress.next_save_at_tokens = end + self._unit\n        return None\n",
        ),
        shape="drafts",
    ),
    "decode_not_saved": Mutant(
        "Tokens that a request generates are not saved.",
        one(SAVING, "plan", "min(end, request.num_tokens)", "min(end, request.num_prompt_tokens)"),
    ),
    "prompts_wait_for_a_step_that_saves": Mutant(
        "Units of prompts wait for the step in which units of answers are saved.",
        (
            Patch(SAVING, "plan_step", "due or request.num_computed_tokens < request.num_tokens - 1 or", "due or"),
            Patch(SAVING, "_urgent", " or first + self._unit <= tracked.request.num_prompt_tokens", ""),
        ),
        shape="grouped-saves",
    ),
    "no_step_saves_answers": Mutant(
        "Units of answers wait for a step that never comes, if not every step saves them.",
        one(
            SAVING,
            "plan_step",
            "not (self._steps.planned // self._stages) % every",
            "self._set_steps == 1",
        ),
        shape="grouped-saves",
    ),
    "draft_tokens_saved": Mutant(
        "Draft tokens are saved before they are accepted.",
        (
            *keys("keys_with_drafts"),
            Patch(SAVING, "plan", "min(end, request.num_tokens)", "end"),
            Patch(
                SAVING,
                "plan_step",
                "            tracked = tracked_of[request_id]\n",
                "            tracked = tracked_of[request_id]\n"
                "            tracked.request.drafts = step.scheduled_spec_decode_tokens.get(request_id, [])\n",
            ),
        ),
        shape="drafts",
    ),
    "saved_before_computed": Mutant(
        "The whole prompt is saved with its first piece.",
        one(SAVING, "plan", "min(end, request.num_tokens)", "request.num_tokens"),
        by="every_read_is_right",
    ),
    # ---- keys --------------------------------------------------------------------------------------------------------
    "key_without_salt": Mutant(
        "Requests with another `cache_salt` share keys.", keys("keys_without_salt"), by="every_read_is_right"
    ),
    "key_without_lora": Mutant(
        "Requests with another LoRA adapter share keys.", keys("keys_without_lora"), by="every_read_is_right"
    ),
    "key_without_group": Mutant(
        "Cache groups share one index.",
        (
            Patch(CATALOG, "index", "self._index[group]", "self._index[0]"),
            Patch(CATALOG, "find", "self._index[group]", "self._index[0]"),
            Patch(CATALOG, "known", "key in self._index[group]", "key in self._index[0]"),
        ),
        shape="hybrid",
    ),
    "tail_unchecked": Mutant(
        "A request continues a chunk that it has begun, though another request has continued the chunk meanwhile.",
        one(SAVING, "_claim", "opened.chunk if opened.chunk.tail == before else None", "opened.chunk"),
    ),
}


def keys_without_salt(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have without its `cache_salt`."""
    return _hashes_of(request, cache_salt=None) if request.cache_salt else request.block_hashes  # type: ignore[return-value]


def keys_without_lora(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have without its LoRA adapter."""
    return _hashes_of(request, lora_request=None) if request.lora_request else request.block_hashes  # type: ignore[return-value]


def keys_with_drafts(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have if its draft tokens were accepted."""
    drafts = [token for token in getattr(request, "drafts", ()) if token >= 0]
    if not drafts:
        return request.block_hashes  # type: ignore[return-value]
    return _hashes_of(request, _all_token_ids=[*request._all_token_ids, *drafts])  # noqa: SLF001


def _hashes_of(request: Request, **changes: object) -> list[bytes]:
    clone: Any = copy.copy(request)
    vars(clone).update(changes, block_hashes=[])
    if "_all_token_ids" in changes:
        clone.all_token_ids = changes["_all_token_ids"]
    hashes: list[bytes] = _hasher()(clone)
    return hashes


@functools.cache
def _hasher() -> Callable[[Any], Any]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(BLOCK, sha256)
