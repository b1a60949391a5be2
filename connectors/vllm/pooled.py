"""Decides whether an engine uses its node's memory instead of private pools, and attaches a role to this memory."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.identity import models
from kvpipe.connectors.vllm.identity.engine_facts import check_hashes
from kvpipe.connectors.vllm.identity.shares import is_alike
from kvpipe.connectors.vllm.identity.source import tensor_parallel_only
from kvpipe.connectors.vllm.started import lasting_name
from kvpipe.errors import ConfigError, UnsupportedError
from kvpipe.node.attach import Attached, NodeEngine, attach_rank, attach_scheduler
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config.settings import Settings
    from kvpipe.connectors.vllm.roles import RoleFacts
    from kvpipe.protocol.geometry import Geometry


def attach_node(facts: RoleFacts, *, rank: int | None) -> RoleFacts:
    """Return `facts`, with the node's memory if `pool: node` is configured. `rank` is None on the scheduler.

    With `pool_or_private`, an engine that cannot use the memory gets a private pool, and a warning is logged. If the
    scheduler and a rank decide differently, the rank fails the scheduler's jobs.

    Raises:
        UsageError: the node's memory cannot be used.
    """
    if facts.settings.pool == "private":
        return facts
    engine = node_engine(facts)
    try:
        for why, remedy in unsupported(facts):
            raise UnsupportedError(  # noqa: TRY301  (the first reason)
                f"kvpipe: pool='node' with {why} is not supported; {remedy}, or set pool='private'"
            )
        check_hashes(facts.config, "pool='node'")
        if rank is None:
            attached = Attached(engine.parts, pool=attach_scheduler(facts.settings, facts.geometry, engine))
        else:
            memory, shared = attach_rank(facts.settings, facts.geometry, engine, rank)
            attached = Attached(engine.parts, memory=memory, shared=shared)
    except (ConfigError, UnsupportedError) as error:
        if not facts.settings.pool_or_private:
            raise
        warn("private_pool", why=str(error))
        ranks = facts.config.parallel_config.world_size
        size = max(facts.geometry.slot_bytes, facts.geometry.pool_bytes_max // ranks)
        return facts._replace(
            settings=facts.settings.model_copy(update={"pool": "private", "pool_bytes_max": size}),
            geometry=dataclasses.replace(facts.geometry, pool_bytes_max=size),
        )
    return facts._replace(node=attached)


def unsupported(facts: RoleFacts) -> Iterator[tuple[str, str]]:
    """Yield (what is not supported, remedy) for each setting that is not supported with a node's memory."""
    parallel = facts.config.parallel_config
    stages, dcp = parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    checks = [
        *_settings_unsupported(facts.settings),
        (facts.geometry.states, "recurrent states", "use a model with attention alone"),
        (stages > 1, f"pipeline_parallel_size={stages}", "use tensor parallelism instead"),
        (dcp > 1, f"decode_context_parallel_size={dcp}", "set it to 1"),
        (
            parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray",
            "ranks on several nodes",
            "use one node, and distributed_executor_backend='mp'",
        ),
    ]
    return ((what, remedy) for holds, what, remedy in checks if holds)


def _is_alike(config: VllmConfig, cache: KVCacheConfig) -> bool:
    """Return whether all ranks hold the same bytes, so that one copy is enough."""
    specs = (models.layer_specs(one.kv_cache_spec, one.layer_names).values() for one in cache.kv_cache_groups)
    alike = all(is_alike(spec) for of_group in specs for spec in of_group)
    return alike and tensor_parallel_only(config.parallel_config)


def _settings_unsupported(settings: Settings) -> list[tuple[object, str, str]]:
    return [(settings.quotas, "quotas", "unset quotas")]


def node_engine(facts: RoleFacts) -> NodeEngine:
    """Describe the engine to the holder.

    All processes of one engine get the same result, and different engines get different results.
    """
    config, geometry, transfer = facts.config, facts.geometry, facts.transfer
    token = hashlib.sha256(f"{transfer.engine_id or ''} {config.instance_id}".encode()).digest()[:16]
    per_group = -(-config.scheduler_config.max_num_batched_tokens // geometry.chunk_tokens)
    takes_slots = transfer.is_kv_producer or facts.settings.tiers  # saves and fetches need slots
    step_chunks = per_group * len(geometry.groups) if takes_slots else 0
    parts = 1 if _is_alike(config, facts.cache) else config.parallel_config.world_size
    name, _ = lasting_name(facts.settings.engine_name, config, str(transfer.engine_id or config.instance_id))
    policy = facts.settings.policy if "policy" in facts.settings.model_fields_set else ""
    return NodeEngine(token, parts, step_chunks, name, policy)


def check_rank(facts: RoleFacts, geometry: Geometry) -> None:
    """Raise `UnsupportedError` if this rank's chunks have another size than the node's memory assumes."""
    if facts.node is not None and geometry.slot_bytes != facts.geometry.slot_bytes:
        models.refuse("pool='node' with caches of another size than their specification", "set pool='private'")
