"""`kvpipe doctor` checks the machine and the installed software, and names solutions.

A check is a function of the settings and of a `HostFacts` (`facts.py`). `HostFacts` supplies all facts about the
machine, so that tests can replace these facts.
"""

from __future__ import annotations

from kvpipe.cli.doctor import beside, hardware, installed, operators, storage
from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import Check, Finding, PendingFinding, one_line
from kvpipe.config.settings import Settings, check_stores, load_settings, parse_extra
from kvpipe.errors import UsageError
from kvpipe.tiers.registry import named

TIERS: list[Check] = [
    Check("memory pool", storage.check_memory_pool, "fail"),
    Check("node pool", storage.check_node_pool, "fail"),
    Check("tiers", storage.check_tiers, "fail"),
    Check("first hash", storage.check_first_hash, "warn"),
]
"""The checks of the memory pool and of the tiers."""

CHECKS: list[Check] = [
    Check("python", installed.check_python, "fail"),
    Check("torch", installed.check_torch, "fail"),
    Check("vllm", installed.check_vllm, "fail"),
    Check("plugin", installed.check_plugin, "fail"),
    Check("VLLM_PLUGINS", installed.check_plugin_filter, "fail"),
    Check("connectors", beside.check_connectors, "fail"),
    Check("device", hardware.check_device, "fail"),
    Check("cuda graphs", hardware.check_graphs, "warn"),
    Check("hash seed", installed.check_hash_seed, "warn"),
    Check("locked memory", hardware.check_locked_memory, "warn"),
    Check("free memory", hardware.check_memory, "warn"),
    Check("shared memory", hardware.check_shared_memory, "warn"),
    Check("huge pages", hardware.check_huge_pages, "warn"),
    Check("copy core", hardware.check_copy_core, "warn"),
    Check("state_dir", storage.check_state_dir, "warn"),
    Check("trace_file", storage.check_trace_file, "warn"),
    Check("control_file", storage.check_control_file, "warn"),
    Check("otel", installed.check_otel, "fail"),
    Check("manage", operators.check_manage, "fail"),
    Check("quotas", operators.check_quotas, "fail"),
]


def examine(settings: Settings, machine: HostFacts | None = None) -> list[Finding]:
    """Run every check and return the findings. An exception of a check becomes a finding, so nothing is raised."""
    facts = machine or HostFacts()
    findings = []
    for check in (*CHECKS, *TIERS):
        try:
            answer = check.ask(settings, facts)
        except UsageError as e:  # the error's text also has the solution
            answer = PendingFinding(check.if_raised, one_line(e), "change the configuration as this message asks")
        except Exception as e:  # noqa: BLE001  (a finding reports it)
            detail = f"could not be checked ({type(e).__name__}: {one_line(e)})"
            answer = PendingFinding(
                check.if_raised, detail, "correct the failed checks, then run `kvpipe doctor` again"
            )
        if answer is not None:
            findings.append(Finding(check.name, *answer))
    return findings


def examine_extra(extra: str, *, ranks: int = 1) -> list[Finding]:
    """Check the configuration `extra`, then run every check with it, and return the findings.

    `extra`: kvpipe's `kv_connector_extra_config`, or vLLM's whole `--kv-transfer-config`, as JSON. If the configuration
    is wrong, the checks run with the default settings.
    """
    given = beside.read_input(extra)
    try:
        settings = load_settings(parse_extra(given.extra))
        check_stores(settings, loads=given.role != "kv_producer")
        keys = ", ".join(f"{key}={_given(settings, key)}" for key in sorted(settings.model_fields_set))
        first = Finding("configuration", "ok", f"valid ({keys})" if keys else "valid (all defaults)", "")
    except Exception as e:  # noqa: BLE001  (the other checks must run)
        # the defaults without the environment, which may be the cause of the error
        settings = Settings.model_construct()
        detail = one_line(e) if isinstance(e, UsageError) else f"{type(e).__name__}: {one_line(e)}"
        remedy = "change the configuration as this message asks; the other checks were made with the defaults"
        first = Finding("configuration", "fail", detail, remedy)
    return [first, *examine(settings, HostFacts(ranks=ranks, connectors=given.connectors))]


def _given(settings: Settings, key: str) -> str:
    """Return a setting's value as text. For tiers and quotas, return their names."""
    if key == "tiers":
        return ",".join(name for name, _ in named(settings.tiers))
    if key == "quotas":
        return ",".join(one.name for one in settings.quotas)
    return str(getattr(settings, key))
