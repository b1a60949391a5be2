"""Requests whose `kv_transfer_params` are not a dict. A front end other than vLLM's own may pass any value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpipe.connectors.vllm.trial.shapes import BLOCK, SHAPES, make_configs


@pytest.mark.parametrize("parameters", ["x", ["x"], 3, 0.5], ids=repr)
def test_invalid_parameters_do_not_end_the_engine(parameters: object) -> None:
    """After the connector, vLLM's scheduler reads a key from the parameters.

    An exception there would end the engine's process.
    """
    config, cache = make_configs(SHAPES["sync"])
    config = copy.deepcopy(config)
    scheduler: Any = Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )
    try:
        init_none_hash(sha256)
        scheduler.connector.scheduler.weights.awaited = False  # in this test no rank runs that could report
        hasher, params = get_request_block_hasher(BLOCK, sha256), SamplingParams(max_tokens=1)
        params.extra_args = {"kv_transfer_params": parameters}
        scheduler.add_request(Request("r", [*range(BLOCK + 1)], params, None, block_hasher=hasher))
        assert scheduler.schedule().num_scheduled_tokens["r"] == BLOCK + 1
    finally:
        scheduler.shutdown()
