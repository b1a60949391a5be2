"""Starts the management interface of an engine. Only `start` imports the optional packages FastAPI and uvicorn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.config.settings import Settings
from kvpipe.errors import ConfigError
from kvpipe.inputs.listening import Address, listen
from kvpipe.tiers.spec import secret

if TYPE_CHECKING:
    from kvpipe.manage.engine import ManagedEngine
    from kvpipe.manage.server import OperatorServer
    from kvpipe.trace.log import Counters

TOKEN_CHARS_MIN: Final = 16
TOKEN_CHARS_MAX: Final = 4096
"""The largest number of characters of a token. A longer token would not fit into a request's header."""


def read_token(settings: Settings) -> bytes:
    """Return the token that every request must carry.

    Raises:
        ConfigError: the token is not configured or cannot be read, or other users may read its file. ConfigError is
            also raised if the token has too few or too many characters, or characters that no header can hold.

    """
    file, why = settings.manage_token_file, ""
    try:
        if file is not None and file.stat().st_mode & 0o077:
            why = "manage_token_file: other users may read the file; run chmod 0600 on it"
    except (OSError, ValueError):
        pass  # `secret` below reports the error
    try:
        found = secret(settings.manage_token_env, file, "manage_token")
    except ValueError as error:
        raise ConfigError(f"kvpipe: {error}") from None
    if found is None:
        why = f"manage={settings.manage!r} without a token; set manage_token_file or manage_token_env"
    elif not why and not TOKEN_CHARS_MIN <= len(found.get_secret_value()) <= TOKEN_CHARS_MAX:
        bounds = f"fewer than {TOKEN_CHARS_MIN} or more than {TOKEN_CHARS_MAX} characters"
        why = f"manage_token: it has {bounds}; make one with `openssl rand -hex 32`"
    if why or found is None:
        raise ConfigError(f"kvpipe: {why}")
    token = found.get_secret_value()
    check_token(token)
    return token.encode()


def check_token(token: str) -> None:
    """Check that a header can hold `token`.

    Raises:
        ConfigError: `token` has a blank or a character that is not printable ASCII. The message does not show `token`.

    """
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            "kvpipe: manage_token: it has a blank, or a character that is not printable ASCII; make a token with "
            "`openssl rand -hex 32`"
        )


def start(settings: Settings, engine: ManagedEngine, counters: Counters, *, numbered: bool = False) -> OperatorServer:
    """Start the thread that serves `engine`'s operators. With `numbered`, `listen` may append a number to its name.

    Raises:
        ConfigError: the token or the address cannot be used, or FastAPI or uvicorn is not installed.

    """
    token = read_token(settings)
    try:
        from kvpipe.manage.api import make_app  # noqa: PLC0415  (an extra)
        from kvpipe.manage.server import OperatorServer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"kvpipe: manage needs {error.name}; pip install 'kvpipe[manage]'") from None
    engine.name_salts(token)
    app = make_app(engine, counters)
    listener = listen(Address.parse(settings.manage), engine.name, "manage", numbered=numbered)
    engine.name = listener.name
    try:
        return OperatorServer(listener, app, token, counters, engine.tasks)
    except BaseException:
        listener.close()
        raise
