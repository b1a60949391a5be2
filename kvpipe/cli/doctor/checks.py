"""`kvpipe doctor`: checks the machine and what is installed on it, and names remedies.

A check is a function of the settings and of a `HostFacts` (`facts.py`), from which it gets all facts about the machine;
tests replace these.
"""

from __future__ import annotations

from kvpipe.cli.doctor import beside, hardware, installed, operators, storage
from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import Check, Finding, PendingFinding, one_line
from kvpipe.config import Settings, load_settings, parse_extra
from kvpipe.errors import UsageError
from kvpipe.tiers.registry import named

TIERS: list[Check] = [
    Check("memory pool", storage.check_memory_pool, "fail"),
    Check("tiers", storage.check_tiers, "fail"),
    Check("first hash", storage.check_first_hash, "warn"),
]
"""The checks of the places in which chunks are kept."""

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
    Check("copy core", hardware.check_copy_core, "warn"),
    Check("state_dir", storage.check_state_dir, "warn"),
    Check("trace_file", storage.check_trace_file, "warn"),
    Check("control_file", storage.check_control_file, "warn"),
    Check("otel", installed.check_otel, "fail"),
    Check("manage", operators.check_manage, "fail"),
    Check("quotas", operators.check_quotas, "fail"),
]


def examine(settings: Settings, machine: HostFacts | None = None) -> list[Finding]:
    """Run every check and return the findings. Never raises: a check that does becomes a finding."""
    facts = machine or HostFacts()
    findings = []
    for check in (*CHECKS, *TIERS):
        try:
            answer = check.ask(settings, facts)
        except UsageError as e:  # its sentence names the remedy
            answer = PendingFinding(check.if_raised, one_line(e), "change the configuration as this message asks")
        except Exception as e:  # noqa: BLE001  (see above)
            detail = f"could not be checked ({type(e).__name__}: {one_line(e)})"
            answer = PendingFinding(check.if_raised, detail, "mend what failed before it, then run this again")
        if answer is not None:
            findings.append(Finding(check.name, *answer))
    return findings


def examine_extra(extra: str, *, ranks: int = 1) -> list[Finding]:
    """Check the configuration `extra`, in JSON, then as `examine`; with the defaults if the configuration is wrong.

    `extra`: kvpipe's `kv_connector_extra_config`, or vLLM's whole `--kv-transfer-config`.
    """
    extra, connectors = beside.apart(extra)
    try:
        settings = load_settings(parse_extra(extra))
        given = ", ".join(f"{key}={_given(settings, key)}" for key in sorted(settings.model_fields_set))
        first = Finding("configuration", "ok", f"valid ({given})" if given else "valid (all defaults)", "")
    except Exception as e:  # noqa: BLE001  (whatever it is, the checks go on)
        settings = Settings.model_construct()  # without the environment, which may be what is wrong
        detail = one_line(e) if isinstance(e, UsageError) else f"{type(e).__name__}: {one_line(e)}"
        remedy = "change the configuration as this message asks; the other checks were made with the defaults"
        first = Finding("configuration", "fail", detail, remedy)
    return [first, *examine(settings, HostFacts(ranks=ranks, connectors=connectors))]


def _given(settings: Settings, key: str) -> str:
    """Return a setting's value for people: the names, for tiers and quotas."""
    if key == "tiers":
        return ",".join(name for name, _ in named(settings.tiers))
    if key == "quotas":
        return ",".join(one.name for one in settings.quotas)
    return str(getattr(settings, key))
