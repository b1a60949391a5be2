"""vLLM's fault tolerance continues after a failed step. Therefore kvpipe refuses to run with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpipe.connectors.vllm.support import check_engine
from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES, make_configs
from kvpipe.errors import UnsupportedError

BLOCKS = 3


def _config() -> Any:
    return copy.deepcopy(make_configs(SHAPES["sync"])[0])


def test_fault_tolerance_is_refused() -> None:
    """The refusal names the option, the option's value and the remedy."""
    config = _config()
    check_engine(config)
    config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(UnsupportedError, match=r"^kvpipe: enable_fault_tolerance=True .* set it to False$"):
        check_engine(config)


def test_vllm_keeps_uncomputed_blocks_of_a_failed_step() -> None:
    """All requests are aborted, but their uncomputed blocks stay in vLLM's prefix cache.

    The code that aborts them is `EngineCoreSentinel.on_fault`. The next request with the same prompt reads these
    blocks. When this test fails, kvpipe can support vLLM's fault tolerance.
    """
    config, cache = _config(), make_configs(SHAPES["sync"])[1]
    config.kv_transfer_config = None
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)

    def ask(name: str) -> int:
        params = SamplingParams(max_tokens=1)
        scheduler.add_request(Request(name, list(range(BLOCKS * BLOCK)), params, None, block_hasher=hasher))
        return scheduler.schedule().num_scheduled_tokens[name]

    assert ask("in the step that fails") == BLOCKS * BLOCK
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert ask("after it") == BLOCK, "two blocks that nobody has computed"
