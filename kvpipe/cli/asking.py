"""Functions of the commands that query a running engine: its address, its token, and the printing of its answers."""

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

from kvpipe.config.settings import load_settings
from kvpipe.errors import UsageError
from kvpipe.inputs import config_errors
from kvpipe.inputs.listening import ENGINE, Address, is_stale, sockets
from kvpipe.manage.client import send_request
from kvpipe.tiers.spec import secret
from kvpipe.trace.log import printable

ASKS_ENGINE: Final = "ask a running engine with `manage`, at --at ADDRESS, with its token"
"""The heading, in the command's help, above the commands that query an engine."""
_NAME_COLUMNS: Final = 16
_LISTED_MAX: Final = 8


def asking_parser(sub: Any, name: str, description: str) -> argparse.ArgumentParser:  # noqa: ANN401
    """Add the command `name` to argparse's subparsers `sub`, with the arguments that `ask_and_print` reads."""
    one: argparse.ArgumentParser = sub.add_parser(name, description=description)
    one.add_argument(
        "--at", metavar="ADDRESS",
        help="the engine's address; by default the configuration's `manage`. '{engine}' in the path stands for "
             "the only engine that listens there",
    )  # fmt: skip
    one.add_argument("--all-engines", action="store_true", help="ask every engine that '{engine}' stands for")
    add_token(one)
    one.add_argument("--json", action="store_true", help="print the answer as JSON")
    return one


def list_commands(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    headed: Mapping[str, Sequence[str]],
) -> None:
    """Write `commands` into the help of `parser`, under headings.

    `headed` has the names of the commands by heading. Each command is shown with its description up to the first
    semicolon.
    """

    def row(name: str) -> str:
        return f"  {name:<{_NAME_COLUMNS}}{(commands[name].description or '').partition(';')[0]}\n"

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"{head}:\n{''.join(map(row, names))}" for head, names in headed.items())


def ask_and_print(args: argparse.Namespace, method: str, path: str, body: object = None) -> int:
    """Send a request to one engine, or with `--all-engines` to each engine, and print the answers.

    Returns the exit status: 2 if any of several engines does not answer or refuses, else 0.

    Raises:
        UsageError: no engine is found, or several engines are found without `--all-engines`. For a single engine, the
            errors of `send_request` are also raised.

    """
    address, token, status = parse_address(args.at or load_settings().manage), token_of(args), 0
    engines = _engines(address, several=args.all_engines)
    if engines == [address]:
        _show(args, send_request(address, token, method, path, body))
        return 0
    for engine in engines:
        try:
            answer = send_request(engine, token, method, path, body)
        except UsageError as error:
            if not args.all_engines:
                raise
            sys.stderr.write(f"{error}\n")
            status = 2
        else:
            _show(args, {"at": str(engine), **answer} if args.all_engines else answer)
    return status


def _engines(address: Address, *, several: bool) -> list[Address]:
    """Return the addresses of the engines that listen at `address`.

    Raises UsageError if no engine listens there, or if several engines listen there and `several` is false.
    """
    if ENGINE not in address.path:
        return [address]
    found = [one for one in sockets(address) if not is_stale(one)]
    if not found:
        raise UsageError(f"kvpipe: no engine listens at {address}; start one with this `manage`, or give --at")
    if len(found) > 1 and not several:
        listed = ", ".join(map(str, found[:_LISTED_MAX])) + (", ..." if len(found) > _LISTED_MAX else "")
        raise UsageError(
            f"kvpipe: {len(found)} engines listen at {address}: {listed}; give --at with one, or --all-engines"
        )
    return found


def _show(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    if args.json:
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        _print(answer)


def add_token(one: argparse.ArgumentParser) -> None:
    """Add the argument that `token_of` reads."""
    one.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token; by default the configuration's token"
    )


def token_of(args: argparse.Namespace) -> str:
    """Return the token that the engine requires. Raises UsageError if no token is configured or readable."""
    settings = load_settings()
    try:
        file = args.token_file or settings.manage_token_file
        token = secret("" if args.token_file else settings.manage_token_env, file, "manage_token")
    except ValueError as error:
        raise UsageError(f"kvpipe: {error}") from None
    if token is None:
        raise UsageError("kvpipe: no token is given; give --token-file, or set KVPIPE_MANAGE_TOKEN_FILE")
    return token.get_secret_value()


def parse_address(text: str) -> Address:
    """Parse an engine's address. Raises UsageError if `text` is empty or is not an address."""
    if not text:
        raise UsageError("kvpipe: no address is given; give --at, or set KVPIPE_MANAGE")
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"kvpipe: --at {config_errors.safe_name(text)}: {error}") from None


def _print(answer: dict[str, Any]) -> None:
    """Print an answer as a table of names and values. Each list of objects is printed as another table."""
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
    """Return a value as text that is safe for a terminal, because clients choose the ids of requests."""
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else "-" if value is None else str(value)
    return escape(str(printable(text)))


def _flat(answer: dict[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in answer.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield before + name, value
