"""An engine uses its node's memory, or a private pool."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm import pooled
from kvpipe.connectors.vllm.roles import RoleFacts
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs
from kvpipe.errors import UnsupportedError


def test_engine_whose_hashes_differ_uses_a_private_pool(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with `pool_or_private` uses a private pool.

    Without `pool_or_private`, the engine does not start, and the error names `pool`, because no tiers are set.
    """
    config, cache = copy.deepcopy(make_configs(SHAPES["sync"]))
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    keys = {"pool": "node", "pool_dir": str(short_path / "node"), "pool_bytes_max": "64MiB", "keep_s": 1}
    settings = load_settings(keys)
    geometry = make_geometry(cache, settings)
    transfer = KVTransferConfig(kv_connector="KVPipe", kv_role="kv_both")
    facts = RoleFacts(config, transfer, cache, settings, geometry, "e")
    with pytest.raises(UnsupportedError, match="'xxhash' with pool='node'"):
        pooled.attach_node(facts, rank=None)
    may = facts._replace(settings=load_settings(keys | {"pool_or_private": True}))
    assert pooled.attach_node(may, rank=None).settings.pool == "private"


def test_engine_on_cuda_may_use_the_node_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is no reason for a private pool."""
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    config, cache = make_configs(SHAPES["sync"])
    settings = load_settings({"pool": "node"})
    transfer = KVTransferConfig(kv_connector="KVPipe", kv_role="kv_both")
    facts = RoleFacts(config, transfer, cache, settings, make_geometry(cache, settings), "e")
    assert [*pooled.unsupported(facts)] == []


def test_engine_that_only_loads_has_a_stock_for_chunks_of_tiers() -> None:
    """Without tiers the engine takes no slots from the node, so it keeps no stock.

    With tiers the engine has a stock.
    """
    config, cache = make_configs(SHAPES["sync"])
    transfer = KVTransferConfig(kv_connector="KVPipe", kv_role="kv_consumer")
    stocks = list[bool]()
    for keys in ({}, {"tiers": ["/srv/kv"]}):
        settings = load_settings({"pool": "node"} | keys)
        facts = RoleFacts(config, transfer, cache, settings, make_geometry(cache, settings), "e")
        stocks.append(pooled.node_engine(facts).step_chunks > 0)
    assert stocks == [False, True]
