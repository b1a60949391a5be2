"""`kvpipe cache lookup|warm|pin|…` shows and changes the KV that a running engine with `manage` holds."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from kvpipe.cli.asking import add_token, ask_and_print, asking_parser, token_of
from kvpipe.cli.numbers import count, seconds
from kvpipe.cli.prompts import add_prompt, prompt_of
from kvpipe.errors import UsageError
from kvpipe.manage.salts import salt_digest

COMMANDS: Final = ("lookup", "holders", "salt", "warm", "pin", "unpin", "pins", "evict", "evict-matching", "order")
_TIERS_KEEP: Final = "; tiers keep their chunks (`kvpipe cache purge` drops these)"


def add_parsers(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    """Add COMMANDS to `sub`, the subparsers of `kvpipe cache`. Each command sets `run`."""
    lookup = asking_parser(sub, "lookup", "show how much of a prompt is in the engine's memory")
    add_prompt(lookup)
    lookup.add_argument("--tiers", action="store_true", help="also ask the engine's tiers how much each of them has")
    lookup.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/lookup", prompt_of(args) | {"tiers": args.tiers})
    )
    holders = asking_parser(
        sub, "holders", "show the chunks in the pool by salt and adapter, and the holders of leases"
    )
    holders.add_argument(
        "--rows", type=count, default=100, metavar="N", help="the largest number of rows in each list (default 100)"
    )
    holders.set_defaults(run=lambda args: ask_and_print(args, "GET", f"/v1/holders?rows_max={args.rows}"))
    _add_salt(sub)
    warm = asking_parser(sub, "warm", "fetch the chunks of a prompt from tiers into memory")
    add_prompt(warm)
    warm.add_argument(
        "--seconds", type=seconds, default=0.0, help="then pin the prompt for this long (default: do not pin it)"
    )
    warm.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/warm", prompt_of(args) | {"seconds": args.seconds})
    )
    _add_pins(sub)
    _add_evict(sub)
    _add_matching(sub)
    order = asking_parser(sub, "order", "show the result of an order that was pending")
    order.add_argument("order", type=count, help="its number")
    order.set_defaults(run=lambda args: ask_and_print(args, "GET", f"/v1/orders/{args.order}"))


def _add_salt(sub: Any) -> None:  # noqa: ANN401
    salt = sub.add_parser("salt", description="print the digest that `holders` shows for a salt (asks no engine)")
    salt.add_argument("salt", help="the requests' cache_salt; -: the first line of standard input")
    add_token(salt)
    salt.set_defaults(run=_salt)


def _salt(args: argparse.Namespace) -> int:
    try:
        salt = sys.stdin.readline().rstrip("\r\n") if args.salt == "-" else args.salt
    except UnicodeDecodeError:
        raise UsageError("kvpipe: salt: standard input is not UTF-8 text; write the salt as one line") from None
    if not salt:
        raise UsageError("kvpipe: salt: it is empty; give a salt (requests without one are selected by --no-salt)")
    sys.stdout.write(salt_digest(token_of(args).encode(), salt) + "\n")
    return 0


def _add_pins(sub: Any) -> None:  # noqa: ANN401
    pin = asking_parser(sub, "pin", "keep the chunks of a prompt that are in memory, until a deadline")
    add_prompt(pin)
    pin.add_argument("--seconds", type=seconds, required=True, help="the time for which the prompt is pinned")
    pin.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/pins", prompt_of(args) | {"seconds": args.seconds})
    )
    unpin = asking_parser(sub, "unpin", "end a pin")
    unpin.add_argument("pin", type=count, help="the pin's number, as `pins` lists it")
    unpin.set_defaults(run=lambda args: ask_and_print(args, "DELETE", f"/v1/pins/{args.pin}"))
    pins = asking_parser(sub, "pins", "list the pins")
    pins.set_defaults(run=lambda args: ask_and_print(args, "GET", "/v1/pins"))


def _add_evict(sub: Any) -> None:  # noqa: ANN401
    evict = asking_parser(sub, "evict", f"evict the chunks of a prompt from memory{_TIERS_KEEP}")
    add_prompt(evict)
    evict.add_argument(
        "--from-token",
        type=count,
        default=0,
        metavar="N",
        help="evict the chunk with this token, and all later chunks (default 0)",
    )
    evict.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/evict", prompt_of(args) | {"from_token": args.from_token})
    )


def _add_matching(sub: Any) -> None:  # noqa: ANN401
    description = f"evict chunks from memory by salt, adapter or idle time{_TIERS_KEEP}"
    evict = asking_parser(sub, "evict-matching", description)
    evict.add_argument("--salt", dest="cache_salt", help="chunks of requests with this cache_salt")
    evict.add_argument("--salt-digest", help="the same salt, given by the digest that `holders` shows")
    evict.add_argument("--no-salt", action="store_true", help="chunks of requests without a salt")
    evict.add_argument("--adapter", metavar="NAME", help="chunks of the adapter with this lora_name of vLLM")
    evict.add_argument("--adapter-digest", help="chunks of the adapter with the digest that `holders` shows")
    evict.add_argument("--no-adapter", action="store_true", help="chunks of requests without an adapter")
    evict.add_argument(
        "--idle-s", type=seconds, metavar="N", help="only chunks that were not used for this number of seconds"
    )
    evict.add_argument("--all", action="store_true", help="all chunks")
    evict.set_defaults(run=_evict_matching)


def _evict_matching(args: argparse.Namespace) -> int:
    names = ("cache_salt", "salt_digest", "no_salt", "adapter", "adapter_digest", "no_adapter", "idle_s", "all")
    given = {name: getattr(args, name) for name in names}
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    return ask_and_print(args, "POST", "/v1/evict/matching", wanted)
