"""`kvpipe top`: a live view of engines that run with `manage`, and of the node's memory."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
from rich.console import Console
from rich.live import Live

from kvpipe.cli.asking import add_token, parse_address, token_of
from kvpipe.cli.numbers import count, seconds
from kvpipe.cli.screen import screen
from kvpipe.cli.seen import ANSWER_S_MAX, EngineList
from kvpipe.cli.seen_node import SeenNode
from kvpipe.config.settings import load_settings
from kvpipe.node.processes import folder_of_user, holder_of

INTERVAL_S_MIN: Final = 0.2
PROMPT_S: Final = 0.5
"""The time in seconds for an engine's answer. After this time, the engine is shown as late, with its last answer."""
INTERRUPTED: Final = 130


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe top`, and set `run`."""
    top.add_argument(
        "--at", action="append", metavar="ADDRESS",
        help="an engine's address; can be repeated. '{engine}' in a path stands for every engine that listens "
             "there; by default the configuration's `manage`",
    )  # fmt: skip
    top.add_argument(
        "--pool-dir", type=Path, metavar="DIR",
        help="the folder of the node's memory (default: the configuration's `pool_dir`, or the user's own folder)",
    )  # fmt: skip
    add_token(top)
    top.add_argument(
        "--interval", type=_interval_s, default=2.0, metavar="SECONDS", help="seconds between two updates (default 2)"
    )
    top.add_argument("--requests", type=count, default=10, metavar="N", help="number of requests to show (default 10)")
    top.add_argument("--once", action="store_true", help="update once and exit; status 1 if an engine does not answer")
    top.set_defaults(run=run)


def _interval_s(text: str) -> float:
    interval_s = seconds(text)
    if interval_s < INTERVAL_S_MIN:
        raise argparse.ArgumentTypeError(f"expected at least {INTERVAL_S_MIN} seconds")
    return interval_s


def run(args: argparse.Namespace) -> int:
    """Show the engines once or until an interrupt. Returns the exit status. Raises UsageError for wrong arguments."""
    settings = load_settings()
    folder = args.pool_dir or settings.pool_dir
    node = SeenNode(folder or folder_of_user(), always=folder is not None)
    given = args.at or [settings.manage]
    if given == [""] and (folder is not None or _has_holder(node.folder)):
        given = []  # without an address of an engine, only the node's memory is shown
    addresses = [parse_address(text) for text in given]
    watch = EngineList(addresses, token_of(args) if addresses else "", node)
    try:
        return anyio.run(_once if args.once else _live, watch, args)
    except KeyboardInterrupt:
        return INTERRUPTED


def _has_holder(folder: Path) -> bool:
    try:
        return bool(holder_of(folder))
    except OSError:  # the screen shows the error
        return True


async def _once(watch: EngineList, args: argparse.Namespace) -> int:
    async with anyio.create_task_group() as group:
        await watch.look(group, ANSWER_S_MAX)
        group.cancel_scope.cancel()
    engines, console = watch.engines, _console()
    node = watch.node
    console.print(screen(engines, args.requests, console, node=node))
    answers = [engine.last is not None for engine in engines]
    if node is not None and node.is_shown:
        answers.append(node.health is not None and node.health.status is not None)
    return 0 if answers and all(answers) else 1


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
    """Query the engines and `draw` the screen every `args.interval` seconds, until the task is cancelled."""
    async with anyio.create_task_group() as group:
        while True:
            next_s = anyio.current_time() + args.interval
            await watch.look(group, min(args.interval, PROMPT_S))
            draw(screen(watch.engines, args.requests, console, fits=fits, node=watch.node))
            await anyio.sleep_until(next_s)
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)
