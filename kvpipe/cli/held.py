"""`kvpipe cache lookup|warm|pin|…`: the KV that a running engine with `manage` holds."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, Final

from kvpipe import files
from kvpipe.cli.asking import add_token, ask_and_print, asking_parser, token_of
from kvpipe.cli.numbers import count, seconds
from kvpipe.errors import UsageError
from kvpipe.manage.salts import salt_digest

TOKENS_BYTES_MAX: Final = 16 << 20
COMMANDS: Final = ("lookup", "holders", "salt", "warm", "pin", "unpin", "pins", "evict", "evict-matching", "order")
_TIERS_KEEP: Final = "; tiers keep what they have (`kvpipe cache purge` drops that)"


def add_parsers(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    """Add COMMANDS to `sub`, the subparsers of `kvpipe cache`; each sets `run`."""
    lookup = asking_parser(sub, "lookup", "how much of a prompt is in its memory")
    _add_prompt(lookup)
    lookup.add_argument("--tiers", action="store_true", help="and in each of its tiers, which the engine then asks")
    lookup.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/lookup", _prompt(args) | {"tiers": args.tiers})
    )
    holders = asking_parser(sub, "holders", "whose its pool is, by salt and adapter, and who has leases")
    holders.add_argument("--rows", type=count, default=100, metavar="N", help="how many of each (default 100)")
    holders.set_defaults(run=lambda args: ask_and_print(args, "GET", f"/v1/holders?rows_max={args.rows}"))
    _add_salt(sub)
    warm = asking_parser(sub, "warm", "fetch what its tiers have of a prompt into its memory")
    _add_prompt(warm)
    warm.add_argument("--seconds", type=seconds, default=0.0, help="pin it there for so long at most (default: not)")
    warm.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/warm", _prompt(args) | {"seconds": args.seconds})
    )
    _add_pins(sub)
    _add_evict(sub)
    _add_matching(sub)
    order = asking_parser(sub, "order", "what has come of an order that was pending")
    order.add_argument("order", type=count, help="its number")
    order.set_defaults(run=lambda args: ask_and_print(args, "GET", f"/v1/orders/{args.order}"))


def _add_salt(sub: Any) -> None:  # noqa: ANN401
    salt = sub.add_parser("salt", description="the digest by which `holders` calls a salt (asks nobody)")
    salt.add_argument("salt", help="the requests' cache_salt; -: the first line of what is piped in")
    add_token(salt)
    salt.set_defaults(run=_salt)


def _salt(args: argparse.Namespace) -> int:
    try:
        salt = sys.stdin.readline().rstrip("\r\n") if args.salt == "-" else args.salt
    except UnicodeDecodeError:
        raise UsageError("kvpipe: salt: what is piped in is no text") from None
    if not salt:
        raise UsageError("kvpipe: salt: it is empty; requests without a salt are those of --no-salt")
    sys.stdout.write(salt_digest(token_of(args).encode(), salt) + "\n")
    return 0


def _add_pins(sub: Any) -> None:  # noqa: ANN401
    pin = asking_parser(sub, "pin", "keep what its memory has of a prompt, until a deadline")
    _add_prompt(pin)
    pin.add_argument("--seconds", type=seconds, required=True, help="for so long at most")
    pin.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/pins", _prompt(args) | {"seconds": args.seconds})
    )
    unpin = asking_parser(sub, "unpin", "give a pin back")
    unpin.add_argument("pin", type=count, help="its number")
    unpin.set_defaults(run=lambda args: ask_and_print(args, "DELETE", f"/v1/pins/{args.pin}"))
    pins = asking_parser(sub, "pins", "what is pinned")
    pins.set_defaults(run=lambda args: ask_and_print(args, "GET", "/v1/pins"))


def _add_evict(sub: Any) -> None:  # noqa: ANN401
    evict = asking_parser(sub, "evict", f"drop what its memory has of a prompt{_TIERS_KEEP}")
    _add_prompt(evict)
    evict.add_argument(
        "--from-token", type=count, default=0, metavar="N", help="from the chunk on that has it (default 0)"
    )
    evict.set_defaults(
        run=lambda args: ask_and_print(args, "POST", "/v1/evict", _prompt(args) | {"from_token": args.from_token})
    )


def _add_matching(sub: Any) -> None:  # noqa: ANN401
    description = f"drop what its memory has of a salt, an adapter or an age{_TIERS_KEEP}"
    evict = asking_parser(sub, "evict-matching", description)
    evict.add_argument("--salt", dest="cache_salt", help="the requests' cache_salt")
    evict.add_argument("--salt-digest", help="as `holders` shows it")
    evict.add_argument("--no-salt", action="store_true", help="of requests without one")
    evict.add_argument("--adapter", metavar="NAME", help="vLLM's lora_name")
    evict.add_argument("--adapter-digest", help="as `holders` shows it")
    evict.add_argument("--no-adapter", action="store_true", help="of requests without one")
    evict.add_argument("--idle-s", type=seconds, metavar="N", help="only what was of no use for so many seconds")
    evict.add_argument("--all", action="store_true", help="everything")
    evict.set_defaults(run=_evict_matching)


def _evict_matching(args: argparse.Namespace) -> int:
    names = ("cache_salt", "salt_digest", "no_salt", "adapter", "adapter_digest", "no_adapter", "idle_s", "all")
    given = {name: getattr(args, name) for name in names}
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    return ask_and_print(args, "POST", "/v1/evict/matching", wanted)


def _add_prompt(one: argparse.ArgumentParser) -> None:
    one.add_argument("tokens", help="token ids with commas or blanks between them; @FILE: a file of them")
    one.add_argument("--salt", help="the requests' cache_salt")
    one.add_argument(
        "--adapter", nargs=3, metavar=("NAME", "NUMBER", "PATH"), help="vLLM's lora_name, lora_int_id, lora_path"
    )


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    text = args.tokens
    if text.startswith("@"):
        try:
            text = files.read_small(Path(text[1:]), TOKENS_BYTES_MAX).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"kvpipe: {args.tokens[1:]} cannot be read ({files.why(error)})") from None
    words = re.split(r"[\s,\[\]]+", text.strip(" \n\t,[]"))
    if not all(re.fullmatch("[0-9]{1,10}", word) for word in words):
        raise UsageError(
            "kvpipe: tokens are whole numbers with commas or blanks between them; @FILE for a file of them"
        )
    prompt: dict[str, Any] = {"tokens": [int(word) for word in words]}
    if args.salt is not None:
        prompt["cache_salt"] = args.salt
    if args.adapter is not None:
        name, number, path = args.adapter
        if not re.fullmatch("[0-9]{1,9}", number):
            raise UsageError("kvpipe: --adapter: its number is a whole number")
        prompt["adapter"] = {"name": name, "number": int(number), "path": path}
    return prompt
