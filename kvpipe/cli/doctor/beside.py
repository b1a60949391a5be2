"""Checks of the connectors beside kvpipe, where `kvpipe doctor` is given vLLM's whole `--kv-transfer-config`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvpipe.cli.doctor.facts import VLLM, HostFacts
from kvpipe.cli.doctor.findings import PendingFinding

if TYPE_CHECKING:
    from kvpipe.config import Settings

NIXL: Final = "nixl"
"""The module that vLLM imports. Only the wheel of this name has it; `nixl-cu12` alone has it under another name."""


def apart(given: str) -> tuple[str, tuple[str, ...]]:
    """Return kvpipe's extra config in `given`, as JSON, and the names of all connectors in the order they are asked.

    `given`: the extra config itself, or vLLM's `--kv-transfer-config`, with kvpipe perhaps under `MultiConnector`.
    No names are returned for an extra config.
    """
    try:
        config = json.loads(given)
    except (ValueError, RecursionError):  # the check of the configuration reports it
        return given, ()
    if not isinstance(config, dict) or "kv_connector" not in config:
        return given, ()
    children = _extra(config).get("connectors")
    found = [one for one in children if isinstance(one, dict)] if isinstance(children, list) else [config]
    own = next((_extra(one) for one in found if one.get("kv_connector") == VLLM.NAME), {})
    return json.dumps(own), tuple(str(one.get("kv_connector")) for one in found)


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def check_connectors(_: Settings, machine: HostFacts) -> PendingFinding | None:
    """Kvpipe is among the connectors, is asked first, and NIXL can be imported."""
    names = machine.connectors
    if not names:
        return None
    listed = ", ".join(names)
    if VLLM.NAME not in names:
        return PendingFinding("fail", f"connectors={listed}: kvpipe is not among them", f"add {VLLM.NAME} in front")
    if any(name.startswith("Nixl") for name in names) and not machine.has_module(NIXL):
        remedy = (
            "pip install --no-deps nixl nixl-cu12 (or nixl-cu13): nixl-cu12 alone lacks the module that vLLM imports"
        )
        return PendingFinding("fail", f"connectors={listed}: the module {NIXL} is missing", remedy)
    if names[0] != VLLM.NAME:
        detail = f"connectors={listed}: {names[0]} is asked before kvpipe, and reads what kvpipe has in memory"
        return PendingFinding("warn", detail, f"list {VLLM.NAME} first")
    return PendingFinding("ok", f"connectors={listed}")
