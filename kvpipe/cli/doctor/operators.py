"""Checks of settings for operators: the management interface and quotas."""

from __future__ import annotations

import importlib
from pathlib import Path

from kvpipe.cli.doctor.facts import HostFacts
from kvpipe.cli.doctor.findings import PendingFinding, one_line
from kvpipe.config.settings import Settings
from kvpipe.inputs.listening import ENGINE, Address
from kvpipe.inputs.quota_spec import salts
from kvpipe.manage.start import read_token


def check_manage(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Check that the engine can serve its operators.

    The token must be usable. The optional packages must be installed, and the socket's folder must exist.
    """
    if not settings.manage:
        return None
    read_token(settings)  # the error's text names the solution
    try:
        for name in ("fastapi", "uvicorn"):
            importlib.import_module(name)
    except ImportError as error:
        return PendingFinding("fail", f"manage is set, and {one_line(error)}", "pip install 'kvpipe[manage]'")
    folder = Path(Address.parse(settings.manage).path).parent
    if ENGINE not in str(folder) and not folder.is_dir():
        remedy = "create it for the engine's user alone; the engine does not create it"
        return PendingFinding("fail", f"the socket's folder {folder} does not exist", remedy)
    return PendingFinding("ok", f"operators are served at {settings.manage}, with the token")


def check_quotas(settings: Settings, _: HostFacts) -> PendingFinding | None:
    """Check that each quota's salt can be read, and that no two quotas have the same salt."""
    if not settings.quotas:
        return None
    salts(settings.quotas)  # the error's text names the solution
    return PendingFinding("ok", "every salt can be read, and no two quotas have the same salt")
