"""Checks of the connectors that run beside kvpipe.

These checks need vLLM's whole `--kv-transfer-config` as the input of `kvpipe doctor`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvpipe.cli.doctor.facts import VLLM, HostFacts
from kvpipe.cli.doctor.findings import PendingFinding

if TYPE_CHECKING:
    from kvpipe.config.settings import Settings

NIXL: Final = "nixl"
"""The module that vLLM imports. The wheel `nixl` has this module. The wheel `nixl-cu12` has it under another name."""


class DoctorInput(NamedTuple):
    """The input of `kvpipe doctor`: kvpipe's extra config as JSON, its `kv_role`, and the names of all connectors.

    vLLM asks the connectors in the given order. If the input is an extra config, `role` and `connectors` are empty.
    """

    extra: str
    role: str = ""
    connectors: tuple[str, ...] = ()


def read_input(given: str) -> DoctorInput:
    """Split `given`, the JSON text of an extra config or of vLLM's `--kv-transfer-config`.

    A `--kv-transfer-config` may configure kvpipe alone, or a `MultiConnector` with several connectors.
    """
    try:
        config = json.loads(given)
    except (ValueError, RecursionError):  # the check of the configuration reports this error
        return DoctorInput(given)
    if not isinstance(config, dict) or "kv_connector" not in config:
        return DoctorInput(given)
    children = _extra(config).get("connectors")
    found = [one for one in children if isinstance(one, dict)] if isinstance(children, list) else [config]
    own = next((one for one in found if one.get("kv_connector") == VLLM.NAME), {})
    names = tuple(str(one.get("kv_connector")) for one in found)
    return DoctorInput(json.dumps(_extra(own)), str(own.get("kv_role", "")), names)


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def check_connectors(_: Settings, machine: HostFacts) -> PendingFinding | None:
    """Check that vLLM asks kvpipe before all other connectors, and that a NIXL connector finds its module.

    Returns None if the input does not tell the connectors.
    """
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
        detail = f"connectors={listed}: {names[0]} is asked before kvpipe, and loads even tokens that kvpipe holds"
        return PendingFinding("warn", detail, f"list {VLLM.NAME} first")
    return PendingFinding("ok", f"connectors={listed}")
