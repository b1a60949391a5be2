"""Checks of the installed software: Python, torch, vLLM, the plugin, OpenTelemetry."""

from __future__ import annotations

import importlib
import re
from typing import Final

from kvpipe.cli.doctor.facts import PLUGIN, VLLM, HostFacts
from kvpipe.cli.doctor.findings import PendingFinding, dotted, one_line
from kvpipe.config.settings import Settings
from kvpipe.errors import UnsupportedError

PYTHON_MIN: Final = (3, 11)
TORCH_MIN: Final = (2, 9)
_MODULE_PATH_REMEDY: Final = f'give vLLM "kv_connector_module_path": "{VLLM.MODULE}" as well'


def check_python(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that Python is new enough."""
    found = ".".join(map(str, machine.python))
    if machine.python < PYTHON_MIN:
        return PendingFinding(
            "fail", f"{found} is too old", f"create the environment with Python {dotted(PYTHON_MIN)} or newer"
        )
    return PendingFinding("ok", found)


def check_torch(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that torch can be imported and is new enough."""
    remedy = f"install torch {dotted(TORCH_MIN)} or newer, in the build that vLLM was made for"
    try:
        found = machine.torch_version()
    except Exception as e:  # noqa: BLE001  (a broken library raises anything)
        return PendingFinding("fail", f"it cannot be imported ({one_line(e)})", remedy)
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or (int(match[1]), int(match[2])) < TORCH_MIN:
        return PendingFinding("fail", f"{found} is too old, or not a release", remedy)
    return PendingFinding("ok", found)


def check_vllm(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that vLLM can be imported, and that kvpipe supports its version."""
    remedy = f"install vLLM {' or '.join(map(dotted, VLLM.SUPPORTED))} into this environment"
    try:
        found = machine.vllm_version()
        if found is None:
            return PendingFinding("fail", "it is not installed", remedy)
        VLLM.check_version(found)
    except UnsupportedError as e:
        return PendingFinding("fail", one_line(e), remedy)
    except Exception as e:  # noqa: BLE001  (a broken library raises anything)
        return PendingFinding(
            "fail", f"it is installed, but cannot be imported ({one_line(e)})", f"repair the installation, or {remedy}"
        )
    return PendingFinding("ok", found)


def check_plugin(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that the entry point is installed, and that after its import vLLM knows the connector by its name."""
    plugins = machine.plugins()
    if not plugins:
        detail = f"no entry point {PLUGIN!r} of {VLLM.GROUP} is installed, so vLLM does not know {VLLM.NAME}"
        return PendingFinding("fail", detail, f"install kvpipe into vLLM's environment, or {_MODULE_PATH_REMEDY}")
    for plugin in plugins:
        try:
            plugin.load()()
        except Exception as e:  # noqa: BLE001  (vLLM would run without a plugin that raises)
            detail = f"entry point {plugin.value} does not load ({one_line(e)})"
            return PendingFinding("fail", detail, "correct the named error, or install kvpipe again")
    if not machine.connector_known():
        detail = f"entry point {plugins[0].value} loads, but vLLM does not know {VLLM.NAME} after it"
        return PendingFinding(
            "fail", detail, "an older kvpipe or another package holds the entry point: install kvpipe again"
        )
    return PendingFinding("ok", f"{plugins[0].value} loads, vLLM knows {VLLM.NAME}")


def check_plugin_filter(_: Settings, machine: HostFacts) -> PendingFinding:
    """Check that VLLM_PLUGINS does not exclude the entry point.

    vLLM splits the variable at commas and compares the names exactly. So a name with a blank before or after it does
    not match.
    """
    value = machine.environ.get("VLLM_PLUGINS")
    if value is None:
        return PendingFinding("ok", "not set, every plugin is loaded")
    names = value.split(",")
    if PLUGIN in names:
        return PendingFinding("ok", f"{value!r} includes {PLUGIN}")
    others = [name.strip() for name in names if name.strip() and name.strip() != PLUGIN]
    remedy = f"set VLLM_PLUGINS={','.join([*others, PLUGIN])} (no spaces), or {_MODULE_PATH_REMEDY}"
    return PendingFinding("fail", f"{value!r} excludes {PLUGIN}, so vLLM does not load it", remedy)


def check_hash_seed(settings: Settings, machine: HostFacts) -> PendingFinding:
    """Check that engines that share or keep a cache compute equal block hashes.

    vLLM seeds the hash of a prefix's first block with PYTHONHASHSEED, for every algorithm. If PYTHONHASHSEED is not
    set, the seed is a constant for sha256 and sha256_cbor. For xxhash and xxhash_cbor the seed is random in each
    process.
    """
    value = machine.environ.get("PYTHONHASHSEED")
    if value is not None:
        detail = f"PYTHONHASHSEED={value} seeds the hashes of blocks"
        return PendingFinding(
            "ok", f"{detail}: only engines with the same value find each other's KV in a shared cache"
        )
    default, random = machine.hash_seeds()
    if default in random and settings.name:
        detail = (
            f"PYTHONHASHSEED is not set and vLLM seeds {default} at random, so engines named {settings.name!r} differ"
        )
        remedy = (
            f"set one PYTHONHASHSEED for all engines named {settings.name!r}, or use --prefix-caching-hash-algo sha256"
        )
        return PendingFinding("warn", detail, remedy)
    if default in random:
        detail = (
            f"not set, and vLLM seeds {default} at random, which does not matter for a cache in one engine's memory"
        )
        return PendingFinding("ok", f"{detail}; caches that are shared or outlive a process need PYTHONHASHSEED")
    detail = f"not set: {default} (vLLM's default) gives equal hashes in all processes without it"
    if random:
        detail += f"; a shared cache would need PYTHONHASHSEED with {' or '.join(sorted(random))}"
    return PendingFinding("ok", detail)


def check_otel(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Check that OpenTelemetry can be imported. Returns None if the settings do not use OpenTelemetry."""
    if not settings.otel:
        return None
    names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError as e:
        return PendingFinding("fail", f"otel=true, and {one_line(e)}", "pip install 'kvpipe[otel]', or set otel=false")
    return PendingFinding("ok", "OpenTelemetry is installed; OTEL_EXPORTER_OTLP_ENDPOINT sets where spans go")
