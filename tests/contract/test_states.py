"""Assumptions of kvpipe about states that vLLM keeps within blocks, checked against vLLM's sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.contract.test_drafters import _source
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

MANAGERS = "v1/core/single_type_kv_cache_manager.py"


def check_offers(folder: Path) -> None:
    """Check that vLLM offers a state after the step that writes it, with the state's boundary and block."""
    cached = _source(folder / MANAGERS, "cache_blocks", "MambaManager")
    keyed, offered = cached.index("self._cache_partial_tail_block("), cached.index("self._pending_boundary_state")
    assert keyed < offered  # the block of an exported state has the key of the state that is overwritten
    assert "block.block_hash_num_tokens)" in cached[offered:]
    tail = _source(folder / MANAGERS, "_cache_partial_tail_block", "MambaManager")
    assert "checkpoint_block, num_tokens=checkpoint_position" in tail
    assert "replace_existing_hashes=True" in tail
    allocated = _source(folder / MANAGERS, "allocate_new_blocks", "MambaManager")
    copied = "self._pending_cow_copies.append((source_block, cow_block))"
    offer = "(request_id, self.kv_cache_group_id, cow_block, boundary_tokens)"
    assert allocated.index("move_block_hashes(source_block, cow_block)") < allocated.index(copied)
    assert allocated.index(copied) < allocated.index(offer)
    moves = _source(folder / "v1/core/block_pool.py", "move_block_hashes", "BlockPool")
    assert "self._insert_block_hash(block_hash, dst_block, num_tokens=num_tokens)" in moves


def check_copies(folder: Path) -> None:
    """Check that copy-on-write copies run before the connector's step begins.

    Retained blocks are freed after the step.
    """
    one, other = folder / "v1/worker/gpu_model_runner.py", folder / "v1/worker/gpu/model_runner.py"
    copies, gone = "copy_kv_cache_blocks_inplace(self.kv_caches", "self.kv_block_zeroer.zero_block_ids("
    updated = _source(one, "_update_states", "GPUModelRunner")
    assert copies in updated
    text = other.read_text(encoding="utf-8")
    assert gone in text
    assert "copy_kv_cache_blocks_inplace(" in text[text.index(gone) :]
    scheduled = _source(folder / "v1/core/sched/scheduler.py", "schedule", "Scheduler")
    assert "self._free_cow_retained_blocks(cow_retained_blocks, self.sched_step_seq + 1)" in scheduled


def check_hits(folder: Path) -> None:
    """Check that vLLM reads the state of a hit from the block of the hit's last token. Earlier blocks are null."""
    known: dict[str, Any] = {}
    exec(_source(folder / MANAGERS, "get_num_skipped_tokens", "MambaManager"), known)  # noqa: S102
    assert known["get_num_skipped_tokens"](None, 40) == 39
    begun = _source(folder / "v1/worker/mamba_utils.py", "preprocess_mamba")
    assert "prev_state_idx = (req_state.num_computed_tokens - 1) // block_size" in begun
    scheduled = _source(folder / "v1/core/sched/scheduler.py", "schedule", "Scheduler")
    asked = "self.connector.get_num_new_matched_tokens(request, block_aligned_local)"
    assert scheduled.index(asked) < scheduled.index("if partial_tail and ext_tokens > partial_tail:")


def check_exports(folder: Path) -> None:
    """Check that layers, `MambaManager` and the scheduler call the same function for exported states.

    The function returns the state that a step exports, and the state's block.
    """
    interface = folder / "v1/kv_cache_interface.py"
    known: dict[str, Any] = {"cdiv": lambda tokens, size: -(-tokens // size)}
    for name in ("get_mamba_prefill_checkpoint_position", "is_mamba_prefill_checkpoint_valid"):
        exec("from __future__ import annotations\n" + _source(interface, name), known)  # noqa: S102
    exported = folder / "model_executor/layers/mamba/checkpoint.py"
    source = _source(exported, "compute_mamba_prefill_checkpoints")
    exec("from __future__ import annotations\n" + source, known)  # noqa: S102
    compute = known["compute_mamba_prefill_checkpoints"]
    sizes: dict[str, Any] = {"hash_block_size": 128, "mamba_block_size": 768, "checkpoint_alignment": 16}
    for start in range(0, 1600, 128):
        for stop in range(start + 1, 3200, 61):
            (tokens,), (place,) = compute(
                [stop], [stop - start], **sizes, drop_eagle_block=False, cache_hit_alignment_tokens=128
            )
            assert not tokens or (start + tokens == (stop - 1) // 128 * 128 and place == -(-stop // 768) - 2)
            assert (place < 0) == (not tokens)
            # the place is neither the step's first block nor its last block
            assert place < 0 or place > (start - 1) // 768
    for path, name, owner in (
        (MANAGERS, "get_num_blocks_to_allocate", "MambaManager"),
        ("v1/core/sched/scheduler.py", "_mamba_block_aligned_split", "Scheduler"),
    ):
        assert "get_mamba_prefill_checkpoint_position(" in _source(folder / path, name, owner)
    needed = _source(folder / MANAGERS, "_needs_internal_checkpoint", "MambaManager")
    assert "is_mamba_prefill_checkpoint_valid(" in needed
    layer = (folder / "models/kimi_k3/nvidia/kda.py").read_text(encoding="utf-8")
    assert "num_prefill_checkpoint_blocks=int(alignment is not None)" in layer
    assert "prefill_checkpoint_alignment=alignment" in layer


CHECKS = (check_offers, check_copies, check_hits, check_exports)


@pytest.mark.parametrize("one", CHECKS)
def test_states_within_blocks(one: object) -> None:
    """The installed vLLM satisfies each assumption."""
    assert callable(one)
    one(Path(vllm.__file__).parent)


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + 60)
def test_states_within_blocks_of_other_supported_releases() -> None:
    """Each recorded release that is not installed satisfies every assumption."""
    for _, sources in other_releases():
        for one in CHECKS:
            one(sources / "vllm")
