"""Names an engine, starts its server for operators, and logs the engine's start."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from typing import TYPE_CHECKING

from kvpipe import __version__
from kvpipe.connectors.vllm.doctor_facts import device_type
from kvpipe.inputs import cache_names as names
from kvpipe.inputs.values import size_text
from kvpipe.manage.engine import ManagedEngine
from kvpipe.manage.start import start
from kvpipe.scheduler.records import MEMORY
from kvpipe.trace.log import info, warn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvpipe.connectors.vllm.scheduler_role import SchedulerRole
    from kvpipe.manage.server import OperatorServer


def traced_engine_name(engine_id: str) -> str:
    """Return the engine's name in traces: vLLM's id with its replica number. A UUID is cut to 8 characters."""
    head, replica, number = engine_id.partition("_dp")
    with contextlib.suppress(ValueError):  # an id that the user has chosen is no UUID
        head = str(uuid.UUID(head))[:8]
    return head + replica + number


def lasting_name(configured: str, config: VllmConfig, engine_id: str) -> tuple[str, bool]:
    """Return (the engine's name for operators, whether the name is a default). The name survives a restart.

    `configured` is the configuration key `engine_name`. `engine_id` is vLLM's id of the engine. An id that the user has
    chosen is used as the name.
    """
    head, replica, number = engine_id.partition("_dp")
    default = False
    if configured:
        head = configured
    elif traced_engine_name(head) != head:
        host = os.environ.get("POD_NAME") or socket.gethostname()
        head, default = names.default_engine_name(str(config.model_config.served_model_name), host), True
    return head + replica + number, default


def start_operators(role: SchedulerRole, config: VllmConfig, engine: str) -> OperatorServer | None:
    """Start the server for operators if `manage` is set, and log the engine's start. `engine` is its name in traces."""
    settings, transfer = role.settings, config.kv_transfer_config
    engine_id = str(transfer.engine_id or config.instance_id) if transfer is not None else engine
    name, numbered = lasting_name(settings.engine_name, config, engine_id)
    server, where = None, "off"
    if settings.manage:
        server, name = serve_operators(role, config, name, numbered=numbered)
        where = str(server.address)
    side = role.scheduler
    tiers = side.staging.finder.tiers if side.staging is not None else ()
    if (used := role.geometry.chunk_tokens) != settings.chunk_tokens:
        warn("chunk_tokens_rounded_up", chunk_tokens=settings.chunk_tokens, used=used, why="a chunk is whole blocks")
    info(
        "kvpipe_started",
        kvpipe=__version__,
        name=name,
        engine=engine,
        device=device_type(),
        pool=_pool_text(role, config),
        chunk_tokens=role.geometry.chunk_tokens,
        tiers=",".join([MEMORY, *(tier.name for tier in tiers)]),
        policy=settings.policy if side.node is None else side.node.pool.policy,
        manage=where,
    )
    return server


def _pool_text(role: SchedulerRole, config: VllmConfig) -> str:
    node = role.scheduler.node
    if node is None:
        return f"{size_text(role.settings.pool_bytes_max)} x {config.parallel_config.world_size}"
    layout = node.pool.layout
    return f"node, {size_text(layout.slots * layout.slot_bytes)}"


def serve_operators(
    role: SchedulerRole, config: VllmConfig, name: str, *, numbered: bool
) -> tuple[OperatorServer, str]:
    """Start the management server and return (server, engine's name). If `numbered`, the name may get a number."""
    from kvpipe.connectors.vllm.prompts import PromptBlocks, prompt_request  # noqa: PLC0415  (seldom needed)

    managed = ManagedEngine(
        role.scheduler,
        name,
        hash_tokens=role.hash_tokens,
        hash_prompt=PromptBlocks(config, role.hash_tokens),
        request_of=prompt_request if role.events is not None else None,
        set_freeze=role.set_freeze,
        set_bypass=role.set_bypass,
    )
    return start(role.settings, managed, role.counters, numbered=numbered), managed.name
