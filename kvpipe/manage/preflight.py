"""Checks of a configuration before an engine starts. A missing secret, folder or client library is refused."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from kvpipe.config.control import validate_control_file
from kvpipe.config.settings import Settings
from kvpipe.config.tracing import validate_trace_file
from kvpipe.errors import ConfigError
from kvpipe.inputs.listening import ENGINE, Address
from kvpipe.inputs.quota_spec import salts
from kvpipe.inputs.values import size_text
from kvpipe.manage.start import read_token
from kvpipe.protocol.geometry import SLOT_ALIGN_BYTES
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.registry import make_tier, named


def check_settings(settings: Settings) -> None:
    """Check the files, secrets and libraries that `settings` names. The check creates no file and calls no server.

    Raises:
        ConfigError: the pool has no room for any chunk, or a secret, a folder or a client library is missing or cannot
            be used.

    """
    if settings.pool_bytes_max < SLOT_ALIGN_BYTES:
        raise ConfigError(
            f"kvpipe: pool_bytes_max={size_text(settings.pool_bytes_max)} is smaller than one chunk, which takes at "
            f"least {size_text(SLOT_ALIGN_BYTES)}; set it to several GiB"
        )
    if settings.trace_file is not None:
        validate_trace_file(settings.trace_file)
    if settings.control_file is not None:
        validate_control_file(settings.control_file)
    if settings.manage:
        _check_manage(settings)
    elif settings.manage_token_file is not None or settings.manage_token_env:
        read_token(settings)
    salts(settings.quotas)
    for name, spec in named(settings.tiers):
        make_tier(name, spec, writes=False)
        secrets_of(spec)


def _check_manage(settings: Settings) -> None:
    read_token(settings)
    for module in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"kvpipe: manage needs {module}; pip install 'kvpipe[manage]'")
    path = Address.parse(settings.manage).path
    if not path:
        return
    folder = Path(path).parent
    if ENGINE in str(folder):
        return
    if not folder.is_dir():
        raise ConfigError(
            f"kvpipe: manage='{settings.manage}': the folder {folder} does not exist; create it for the engine's user"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"kvpipe: manage='{settings.manage}': {folder} cannot be written to; name another folder")
