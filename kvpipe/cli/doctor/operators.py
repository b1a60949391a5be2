"""Checks of what operators set: the management interface, quotas."""

from __future__ import annotations

import importlib
from pathlib import Path

from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import PendingFinding, one_line
from kvpipe.config import Settings
from kvpipe.listening import ENGINE, Address
from kvpipe.manage.start import read_token
from kvpipe.quota_spec import salts


def check_manage(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """The engine can serve its operators: the token can be used, the extra and the socket's folder are there."""
    if not settings.manage:
        return None
    read_token(settings)  # its sentence names the remedy
    try:
        for name in ("fastapi", "uvicorn"):
            importlib.import_module(name)
    except ImportError as error:
        return PendingFinding("fail", f"manage is set, and {one_line(error)}", "pip install 'kvpipe[manage]'")
    folder = Path(Address.parse(settings.manage).path).parent
    if ENGINE not in str(folder) and not folder.is_dir():
        remedy = "make it, for the engine's user alone: the engine does not"
        return PendingFinding("fail", f"{folder}, the socket's folder, is not there", remedy)
    return PendingFinding("ok", f"operators are served at {settings.manage}, with the token")


def check_quotas(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Each quota's salt can be read, and is no other's."""
    if not settings.quotas:
        return None
    salts(settings.quotas)  # its sentence names the remedy
    return PendingFinding("ok", "every salt can be read, and is no other's")
