"""Features of vLLM that need more than the KV of a prompt's tokens are refused, because a hit has only KV."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, PackedBlockHashes
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.store import (
    BackgroundBlockObjectStore,
    BlockObjectStore,
    BlockObjectStoreError,
)
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput

from kvpipe.connectors.vllm.identity import models
from kvpipe.connectors.vllm.support import check_engine
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs
from kvpipe.errors import UnsupportedError

BLOCK, EXPERTS = 32, (2, 4)
"""`BLOCK`: the number of tokens per block.

`EXPERTS`: the number of layers, and the number of experts per token in each layer.
"""


def _config() -> Any:
    return copy.deepcopy(make_configs(SHAPES["sync"])[0])


def test_experts_that_are_returned_are_refused() -> None:
    """With this option vLLM returns the experts of every token of a prompt, even if the token's KV was loaded."""
    config = _config()
    check_engine(config)
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedError, match=r"^kvpipe: enable_return_routed_experts=True .* set it to False$"):
        check_engine(config)


def test_connector_that_invents_kv_is_refused() -> None:
    """kvpipe would store invented KV under ordinary keys, also in tiers that other engines use."""
    config = _config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [{"kv_connector": "KVPipeConnector"}, {"kv_connector": "DecodeBenchConnector"}]
        },
    )
    with pytest.raises(UnsupportedError, match=r"^kvpipe: DecodeBenchConnector beside .*; remove it, or kvpipe$"):
        check_engine(config)


@contextmanager
def _rank() -> Iterator[AuxOutputWorkerConnector]:
    """Yield the connector that collects experts on a rank, without the rank's model."""
    rank: AuxOutputWorkerConnector = object.__new__(AuxOutputWorkerConnector)
    size = BLOCK * int(np.prod(EXPERTS))
    store = BlockObjectStore(max_bytes=8 * size, object_nbytes=size)
    rank._store = BackgroundBlockObjectStore(store, max_pending_batches=4)
    rank._buffer = RoutedExpertsBuffer(np.dtype(np.uint8), EXPERTS, BLOCK, 2, 64, 2)
    rank._requests, rank._generation, rank._pending_outputs = {}, 0, []
    rank._lock = Lock()
    try:
        yield rank
    finally:
        rank.close()


def _step(rank: AuxOutputWorkerConnector, request: str, computed: int, scheduled: int) -> Any:
    """Compute the tokens [computed, computed + scheduled) of a prompt of two blocks and sample one more."""
    hashes = PackedBlockHashes(b"a" * 32 + b"b" * 32, 32)
    rank.begin_step(AuxOutputConnectorMetadata(0, {request: 0}, {request: hashes}, ()))
    experts = np.full((scheduled, *EXPERTS), 7, np.uint8)
    bounds, one, none = np.array([0, scheduled]), np.array([1]), np.array([0])
    return rank._commit_output(
        PendingAuxOutput(rank, [request], np.array([computed]), bounds, None, experts, one, none)
    )  # type: ignore[arg-type]


def test_vllm_fails_when_it_lacks_the_experts_of_a_hit() -> None:
    """The connector of vLLM knows experts only of tokens that this engine has computed.

    When this test fails, hits can be served in such engines.
    """
    with _rank() as rank:
        assert _step(rank, "cold", 0, 70)["cold"].rows.shape == (70, *EXPERTS)
        assert _step(rank, "local hit", 2 * BLOCK, 6)["local hit"].rows.shape == (70, *EXPERTS)
    with _rank() as rank, pytest.raises(BlockObjectStoreError):
        _step(rank, "loaded hit", 2 * BLOCK, 6)


@pytest.mark.parametrize(
    ("rate", "rotary", "refused"), [(0.75, True, True), (0.75, False, False), (0.0, True, False), (None, True, False)]
)
def test_pruned_videos_are_refused(
    monkeypatch: pytest.MonkeyPatch, rate: float | None, rotary: bool, refused: bool
) -> None:
    """Positions after a video may depend on the parts of the video that are kept.

    Only the video's embeddings show these parts.
    """
    monkeypatch.setattr(models, "check_model", lambda _: None)
    config = _config()
    media = MultiModalConfig(video_pruning_rate=rate)
    config.model_config = SimpleNamespace(enable_sleep_mode=False, multimodal_config=media, uses_mrope=rotary)
    if not refused:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=r"^kvpipe: video_pruning_rate=0.75 with M-RoPE .* set it to 0$"):
        check_engine(config)
