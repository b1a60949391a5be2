"""Shared by the commands that ask a running engine with `manage`: its address, its token, and printing its answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpipe import config_errors
from kvpipe.config import load_settings
from kvpipe.errors import UsageError
from kvpipe.listening import ENGINE, Address
from kvpipe.manage.client import ask
from kvpipe.tiers.spec import secret
from kvpipe.trace.log import printable

ASKS_ENGINE: Final = "ask a running engine with `manage`, at --at ADDRESS, with its token"
"""The heading of such commands in the help."""
_NAME_COLUMNS: Final = 16


def asking_parser(sub: Any, name: str, description: str) -> argparse.ArgumentParser:  # noqa: ANN401
    """Add a command that asks an engine to `sub`, argparse's subparsers."""
    one: argparse.ArgumentParser = sub.add_parser(name, description=description)
    one.add_argument("--at", metavar="ADDRESS", help="the engine's address; by default the configuration's `manage`")
    add_token(one)
    one.add_argument("--json", action="store_true", help="print the answer as JSON")
    return one


def list_commands(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    headed: Mapping[str, Sequence[str]],
) -> None:
    """Write `commands` into the help of `parser`, under headings. `headed`: the commands' names, by heading.

    Of a command's description, the part before the first semicolon is shown.
    """

    def row(name: str) -> str:
        return f"  {name:<{_NAME_COLUMNS}}{(commands[name].description or '').partition(';')[0]}\n"

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"{head}:\n{''.join(map(row, names))}" for head, names in headed.items())


def ask_and_print(args: argparse.Namespace, method: str, path: str, body: object = None) -> int:
    """Send a request to the engine and print its answer. Returns the exit status 0. Raises UsageError as `ask` does."""
    address = parse_address(args.at or load_settings().manage)
    if ENGINE in address.path:
        raise UsageError(f"kvpipe: {address}: give --at with the engine's name, as its log has it")
    answer = ask(address, token_of(args), method, path, body)
    if args.json:
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        _print(answer)
    return 0


def add_token(one: argparse.ArgumentParser) -> None:
    """Add the argument that `token_of` reads."""
    one.add_argument(
        "--token-file", type=Path, metavar="FILE", help="by default the configuration's `manage_token_file` or `_env`"
    )


def token_of(args: argparse.Namespace) -> str:
    """Return the token that the engine requires. Raises UsageError if none is configured or it cannot be read."""
    settings = load_settings()
    try:
        file = args.token_file or settings.manage_token_file
        token = secret("" if args.token_file else settings.manage_token_env, file, "manage_token")
    except ValueError as error:
        raise UsageError(f"kvpipe: {error}") from None
    if token is None:
        raise UsageError("kvpipe: no token is named; give --token-file, or set KVPIPE_MANAGE_TOKEN_FILE")
    return token.get_secret_value()


def parse_address(text: str) -> Address:
    """Return the parsed address. Raises UsageError if `text` is empty or is no address."""
    if not text:
        raise UsageError("kvpipe: no engine is named; give --at, or set KVPIPE_MANAGE")
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"kvpipe: --at {config_errors.name(text)}: {error}") from None


def _print(answer: dict[str, Any]) -> None:
    """Print an answer as a table of names and values; a list of objects is a table of its own."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table, lists = Table("", "", box=None, show_header=False), list[Table]()
    for key, value in _flat(answer):
        if not isinstance(value, list):
            table.add_row(_cell(key), _cell(value))
        elif rows := [row for row in value if isinstance(row, dict)]:
            lists.append(Table(title=_cell(key), title_justify="left", box=box.SIMPLE_HEAD))
            for head, one in rows[0].items():
                lists[-1].add_column(_cell(head), justify="left" if isinstance(one, str | bool) else "right")
            for row in rows:
                lists[-1].add_row(*map(_cell, row.values()))
    for one in (table, *lists):
        console.print(one)


def _cell(value: object) -> str:
    """Return a value as a terminal may show it: the ids of requests are what their clients wrote."""
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else "-" if value is None else str(value)
    return escape(str(printable(text)))


def _flat(answer: dict[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in answer.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield before + name, value
