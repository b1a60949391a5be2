"""`kvpipe engine state|counters|switch` queries or switches a running engine with `manage`.

`held.py` has the commands for the engine's KV.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from kvpipe.cli import held
from kvpipe.cli.asking import ASKS_ENGINE, ask_and_print, asking_parser, list_commands
from kvpipe.cli.numbers import count
from kvpipe.errors import UsageError

_ON: Final = {"on": True, "off": False}


def add_parsers(engine: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe engine`. Each subcommand sets `run`."""
    engine.description = "Show or switch a running engine with `manage`. Its KV: `kvpipe cache`."
    sub = engine.add_subparsers(required=True, metavar="COMMAND", help="one of the commands below")
    state = asking_parser(sub, "state", "show the engine's pool, requests, jobs, tiers and switches")
    state.add_argument(
        "--requests",
        type=count,
        default=100,
        metavar="N",
        help="the largest number of requests in the list (default 100)",
    )
    state.set_defaults(run=lambda args: ask_and_print(args, "GET", f"/v1/state?requests_max={args.requests}"))
    counters = asking_parser(sub, "counters", "show the counters and gauges by name")
    counters.set_defaults(run=lambda args: ask_and_print(args, "GET", "/v1/counters"))
    switch = asking_parser(sub, "switch", "stop or resume saving (freeze), or saving and loading (bypass)")
    switch.add_argument("--freeze", choices=_ON, help="on: hits are served, nothing new is saved")
    switch.add_argument("--bypass", choices=_ON, help="on: no hit is served, and nothing is saved")
    switch.set_defaults(run=_switch)
    list_commands(engine, sub.choices, {ASKS_ENGINE: list(sub.choices)})


def misplaced(words: Sequence[str]) -> str:
    """Return an error message if `words` is `kvpipe engine` with a subcommand of `kvpipe cache`, else ""."""
    match list(words[:2]):
        case ["engine", name] if name in held.COMMANDS:
            return f"engine {name}: this is a command of `kvpipe cache`: kvpipe cache {name}"
    return ""


def _switch(args: argparse.Namespace) -> int:
    wanted = {key: _ON[value] for key in ("freeze", "bypass") if (value := getattr(args, key)) is not None}
    if not wanted:
        raise UsageError("kvpipe: switch: give --freeze on|off or --bypass on|off")
    return ask_and_print(args, "PUT", "/v1/switches", wanted)
