"""`kvpipe top`: a live view of engines that run with `manage`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Final

import anyio
from rich.console import Console
from rich.live import Live

from kvpipe.cli.asking import add_token, parse_address, token_of
from kvpipe.cli.numbers import count, seconds
from kvpipe.cli.screen import screen
from kvpipe.cli.seen import ANSWER_S_MAX, EngineList
from kvpipe.config import load_settings

INTERVAL_S_MIN: Final = 0.2
PROMPT_S: Final = 0.5
"""Who has not answered after so many seconds is shown as late, with what it has answered before."""
INTERRUPTED: Final = 130


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe top`; sets `run`."""
    top.add_argument(
        "--at", action="append", metavar="ADDRESS",
        help="an engine's address, more than once for several; '{engine}' in a path stands for each that is found "
        "there; by default the configuration's `manage`",
    )  # fmt: skip
    add_token(top)
    top.add_argument("--interval", type=_interval_s, default=2.0, metavar="SECONDS", help="between two looks (2)")
    top.add_argument("--requests", type=count, default=10, metavar="N", help="how many requests to show (10)")
    top.add_argument("--once", action="store_true", help="look once and end; status 1 if an engine does not answer")
    top.set_defaults(run=run)


def _interval_s(text: str) -> float:
    interval_s = seconds(text)
    if interval_s < INTERVAL_S_MIN:
        raise argparse.ArgumentTypeError(f"expected at least {INTERVAL_S_MIN} seconds")
    return interval_s


def run(args: argparse.Namespace) -> int:
    """Show the engines until interrupted, or once. Returns the exit status. Raises UsageError for wrong arguments."""
    addresses = [parse_address(text) for text in args.at or [load_settings().manage]]
    watch = EngineList(addresses, token_of(args))
    try:
        return anyio.run(_once if args.once else _live, watch, args)
    except KeyboardInterrupt:
        return INTERRUPTED


async def _once(watch: EngineList, args: argparse.Namespace) -> int:
    async with anyio.create_task_group() as group:
        await watch.look(group, ANSWER_S_MAX)
        group.cancel_scope.cancel()
    engines, console = watch.engines, _console()
    console.print(screen(engines, args.requests, console))
    return 0 if engines and all(engine.last is not None for engine in engines) else 1


async def _live(watch: EngineList, args: argparse.Namespace) -> int:
    console = _console()
    if not console.is_terminal or console.is_dumb_terminal:
        return await _drawing(watch, args, console, console.print)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        await _drawing(watch, args, console, functools.partial(live.update, refresh=True), fits=True)
    return 0


async def _drawing(
    watch: EngineList, args: argparse.Namespace, console: Console, draw: Callable[..., None], *, fits: bool = False
) -> int:
    """Look and `draw` again and again, until it is cancelled."""
    async with anyio.create_task_group() as group:
        while True:
            next_s = anyio.current_time() + args.interval
            await watch.look(group, min(args.interval, PROMPT_S))
            draw(screen(watch.engines, args.requests, console, fits=fits))
            await anyio.sleep_until(next_s)
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)
