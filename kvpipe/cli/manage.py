"""`kvpipe engine COMMAND`: asks, and switches, a running engine with `manage`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpipe import files
from kvpipe.config import load_settings
from kvpipe.errors import UsageError
from kvpipe.listening import ENGINE, Address
from kvpipe.manage.client import ask
from kvpipe.manage.salts import salt_digest
from kvpipe.tiers.spec import secret

TOKENS_BYTES_MAX: Final = 16 << 20
_ON: Final = {"on": True, "off": False}


def add_parsers(engine: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe engine`; each sets `run`."""
    sub = engine.add_subparsers(required=True, metavar="COMMAND")
    state = _parser(sub, "state", "what it holds and does")
    state.add_argument("--requests", type=int, default=100, metavar="N", help="how many requests to list (default 100)")
    state.set_defaults(run=lambda args: _told(args, "GET", f"/v1/state?requests_max={args.requests}"))
    counters = _parser(sub, "counters", "counters and gauges, by name")
    counters.set_defaults(run=lambda args: _told(args, "GET", "/v1/counters"))
    lookup = _parser(sub, "lookup", "how much of a prompt is held in memory")
    _add_prompt(lookup)
    lookup.add_argument("--tiers", action="store_true", help="and in each tier, which is asked")
    lookup.set_defaults(run=lambda args: _told(args, "POST", "/v1/lookup", _prompt(args) | {"tiers": args.tiers}))
    holders = _parser(sub, "holders", "whose the pool is, by salt and adapter, and who has leases")
    holders.add_argument("--rows", type=int, default=100, metavar="N", help="how many of each (default 100)")
    holders.set_defaults(run=lambda args: _told(args, "GET", f"/v1/holders?rows_max={args.rows}"))
    _add_salt(sub)
    _add_orders(sub)
    _add_matching(sub)
    switch = _parser(sub, "switch", "stop or resume saving (freeze), or saving and loading (bypass)")
    switch.add_argument("--freeze", choices=_ON)
    switch.add_argument("--bypass", choices=_ON)
    switch.set_defaults(run=_switch)


def _add_orders(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    pin = _parser(sub, "pin", "keep what memory has of a prompt, for a while")
    _add_prompt(pin)
    pin.add_argument("--seconds", type=float, required=True, help="for so long at most")
    pin.set_defaults(run=lambda args: _told(args, "POST", "/v1/pins", _prompt(args) | {"seconds": args.seconds}))
    unpin = _parser(sub, "unpin", "give a pin back")
    unpin.add_argument("pin", type=int, help="its number")
    unpin.set_defaults(run=lambda args: _told(args, "DELETE", f"/v1/pins/{args.pin}"))
    pins = _parser(sub, "pins", "what is pinned")
    pins.set_defaults(run=lambda args: _told(args, "GET", "/v1/pins"))
    evict = _parser(sub, "evict", "drop what memory has of a prompt; tiers keep what they have")
    _add_prompt(evict)
    evict.add_argument(
        "--from-token", type=int, default=0, metavar="N", help="from the chunk on that has it (default 0)"
    )
    evict.set_defaults(
        run=lambda args: _told(args, "POST", "/v1/evict", _prompt(args) | {"from_token": args.from_token})
    )
    warm = _parser(sub, "warm", "fetch what tiers have of a prompt into memory")
    _add_prompt(warm)
    warm.add_argument("--seconds", type=float, default=0.0, help="pin it there for so long at most (default: not)")
    warm.set_defaults(run=lambda args: _told(args, "POST", "/v1/warm", _prompt(args) | {"seconds": args.seconds}))
    order = _parser(sub, "order", "what has come of an order that was pending")
    order.add_argument("order", type=int, help="its number")
    order.set_defaults(run=lambda args: _told(args, "GET", f"/v1/orders/{args.order}"))


def _add_matching(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    says = "drop what memory has of a salt, of an adapter, or what was not of use for long; tiers keep what they have"
    evict = _parser(sub, "evict-matching", says)
    evict.add_argument("--salt", dest="cache_salt", help="the requests' cache_salt")
    evict.add_argument("--salt-digest", help="as `holders` shows it")
    evict.add_argument("--no-salt", action="store_true", help="of requests without one")
    evict.add_argument("--adapter", metavar="NAME", help="vLLM's lora_name")
    evict.add_argument("--adapter-digest", help="as `holders` shows it")
    evict.add_argument("--no-adapter", action="store_true", help="of requests without one")
    evict.add_argument("--idle-s", type=float, metavar="N", help="only what was of no use for so many seconds")
    evict.add_argument("--all", action="store_true", help="everything")
    evict.set_defaults(run=_evict_matching)


def _evict_matching(args: argparse.Namespace) -> int:
    names = ("cache_salt", "salt_digest", "no_salt", "adapter", "adapter_digest", "no_adapter", "idle_s", "all")
    given = {name: getattr(args, name) for name in names}
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    return _told(args, "POST", "/v1/evict/matching", wanted)


def _add_salt(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    says = "the digest by which `holders` calls a salt; asks no engine"
    salt = sub.add_parser("salt", help=says, description=says)
    salt.add_argument("salt", help="the requests' cache_salt; -: the first line of what is piped in")
    add_token(salt)
    salt.set_defaults(run=_salt)


def _salt(args: argparse.Namespace) -> int:
    salt = sys.stdin.readline().rstrip("\r\n") if args.salt == "-" else args.salt
    sys.stdout.write(salt_digest(token_of(args).encode(), salt) + "\n")
    return 0


def _add_prompt(one: argparse.ArgumentParser) -> None:
    one.add_argument("tokens", help="token ids with commas or blanks between them; @FILE: a file of them")
    one.add_argument("--salt", help="the requests' cache_salt")
    one.add_argument(
        "--adapter", nargs=3, metavar=("NAME", "NUMBER", "PATH"), help="vLLM's lora_name, lora_int_id, lora_path"
    )


def _parser(sub: Any, name: str, says: str) -> argparse.ArgumentParser:  # noqa: ANN401  (argparse hides its type)
    one: argparse.ArgumentParser = sub.add_parser(name, help=says, description=says)
    one.add_argument("--at", help="the engine's address; by default the configuration's `manage`")
    add_token(one)
    one.add_argument("--json", action="store_true", help="print the answer as JSON")
    return one


def _switch(args: argparse.Namespace) -> int:
    wanted = {key: _ON[value] for key in ("freeze", "bypass") if (value := getattr(args, key)) is not None}
    if not wanted:
        raise UsageError("kvpipe: switch: say --freeze on|off or --bypass on|off")
    return _told(args, "PUT", "/v1/switches", wanted)


def _told(args: argparse.Namespace, method: str, path: str, body: object = None) -> int:
    """Ask, and print the answer."""
    address = parse_address(args.at or load_settings().manage)
    if ENGINE in address.path:
        raise UsageError(f"kvpipe: engine: {address}: say --at with the engine's name, as its log has it")
    told = ask(address, token_of(args), method, path, body)
    if args.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        _print(told)
    return 0


def add_token(one: argparse.ArgumentParser) -> None:
    """Add the argument that `token_of` reads."""
    one.add_argument("--token-file", type=Path, help="by default the configuration's `manage_token_file` or `_env`")


def token_of(args: argparse.Namespace) -> str:
    """Return the token that engines ask for. Raises UsageError: none is named, or it cannot be read."""
    settings = load_settings()
    try:
        file = args.token_file or settings.manage_token_file
        token = secret("" if args.token_file else settings.manage_token_env, file, "manage_token")
    except ValueError as error:
        raise UsageError(f"kvpipe: engine: {error}") from None
    if token is None:
        raise UsageError("kvpipe: engine: say --token-file, or set KVPIPE_MANAGE_TOKEN_FILE")
    return token.get_secret_value()


def parse_address(text: str) -> Address:
    """Return an address. Raises UsageError."""
    if not text:
        raise UsageError("kvpipe: engine: say --at, or set KVPIPE_MANAGE")
    try:
        return Address.parse(text)
    except ValueError as error:
        raise UsageError(f"kvpipe: engine: {error}") from None


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    text = args.tokens
    if text.startswith("@"):
        try:
            text = files.read_small(Path(text[1:]), TOKENS_BYTES_MAX).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"kvpipe: engine: {args.tokens[1:]} cannot be read ({files.why(error)})") from None
    words = re.split(r"[\s,\[\]]+", text.strip(" \n\t,[]"))
    if not all(re.fullmatch("[0-9]{1,10}", word) for word in words):
        raise UsageError("kvpipe: engine: tokens are whole numbers with commas or blanks between them")
    prompt: dict[str, Any] = {"tokens": [int(word) for word in words]}
    if args.salt is not None:
        prompt["cache_salt"] = args.salt
    if args.adapter is not None:
        name, number, path = args.adapter
        if not re.fullmatch("[0-9]{1,9}", number):
            raise UsageError("kvpipe: engine: --adapter: its number is a whole number")
        prompt["adapter"] = {"name": name, "number": int(number), "path": path}
    return prompt


def _print(told: dict[str, Any]) -> None:
    """Print an answer as a table of names and values; a list of objects is a table of its own."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table("", "", box=None, show_header=False)
    for name, value in _flat(told):
        table.add_row(escape(name), escape(str(value)))
    console.print(table)
    for name, rows in told.items():
        if isinstance(rows, list) and rows:
            many = Table(*map(escape, rows[0]), title=escape(name), title_justify="left", box=box.SIMPLE_HEAD)
            for row in rows:
                many.add_row(*(escape(str(value)) for value in row.values()))
            console.print(many)


def _flat(told: dict[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in told.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None and not isinstance(value, list):
            yield before + name, value
