"""`kvpipe top`: a live view of engines that run with `manage`."""

from __future__ import annotations

import argparse
import functools
import glob
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
from pydantic import ByteSize, ValidationError
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpipe.cli.asking import add_token, parse_address, token_of
from kvpipe.config import load_settings
from kvpipe.errors import UsageError
from kvpipe.listening import ENGINE, Address
from kvpipe.manage.client import ask
from kvpipe.manage.models import EngineState, RequestHolds
from kvpipe.trace.log import printable

OVER_S: Final = 10.0
"""Seconds over which rates are averaged."""
ANSWER_S_MAX: Final = 5.0
INTERVAL_S_MIN: Final = 0.2
ENGINES_MAX: Final = 64
REQUESTS: Final = 50
BAR: Final = 20
INTERRUPTED: Final = 130
_REASONS: Final = 3
_QUOTAS: Final = 8
_LABEL_COLUMNS: Final = 10


def add_arguments(top: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe top`; sets `run`."""
    top.add_argument(
        "--at", action="append", metavar="ADDRESS",
        help="an engine's address, more than once for several; '{engine}' in a path stands for each that is found "
        "there; by default the configuration's `manage`",
    )  # fmt: skip
    add_token(top)
    top.add_argument("--interval", type=_interval_s, default=2.0, metavar="SECONDS", help="between two looks (2)")
    top.add_argument("--requests", type=int, default=10, metavar="N", help="how many requests to show (10)")
    top.add_argument("--once", action="store_true", help="look once and end; status 1 if an engine does not answer")
    top.set_defaults(run=run)


def _interval_s(text: str) -> float:
    seconds = float(text)
    if not INTERVAL_S_MIN <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected at least {INTERVAL_S_MIN} seconds")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show the engines until interrupted, or once. Returns the exit status. Raises UsageError for wrong arguments."""
    addresses = [parse_address(text) for text in args.at or [load_settings().manage]]
    watch = EngineList(addresses, token_of(args))
    try:
        return anyio.run(_once if args.once else _live, watch, args)
    except KeyboardInterrupt:
        return INTERRUPTED


async def _once(watch: EngineList, args: argparse.Namespace) -> int:
    await watch.look()
    engines = watch.engines
    _console().print(screen(engines, args.requests))
    return 0 if engines and all(engine.last is not None for engine in engines) else 1


async def _live(watch: EngineList, args: argparse.Namespace) -> int:
    console = _console()
    if not console.is_terminal or console.is_dumb_terminal:
        while True:
            await watch.look()
            console.print(screen(watch.engines, args.requests))
            await anyio.sleep(args.interval)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            await watch.look()
            live.update(screen(watch.engines, args.requests), refresh=True)
            await anyio.sleep(args.interval)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


# ---- queries -------------------------------------------------------------------------------------------------------


class StateSample(NamedTuple):
    """An engine's state, received at `at_s` seconds of this process's monotonic clock."""

    at_s: float
    state: EngineState


class SeenEngine:
    """One engine: its latest answers, or `error`: why it does not answer."""

    def __init__(self, address: Address) -> None:
        """Start without an answer."""
        self.address, self.error = address, ""
        self._samples: deque[StateSample] = deque()

    async def look(self, token: str) -> None:
        """Query the engine's state once, for at most `ANSWER_S_MAX` seconds. Never raises."""
        path = f"/v1/state?requests_max={REQUESTS}"
        asked = functools.partial(ask, self.address, token, "GET", path, answer_s_max=ANSWER_S_MAX)
        try:
            answer = await anyio.to_thread.run_sync(asked, abandon_on_cancel=True)
            self.took(EngineState.model_validate(answer), time.monotonic())
        except UsageError as error:
            self._lose(str(error).removeprefix("kvpipe: "))
        except ValidationError:
            self._lose("another version of kvpipe: use the one that the engine runs")

    def _lose(self, why: str) -> None:
        self._samples.clear()
        self.error = why

    def took(self, state: EngineState, now_s: float) -> None:
        """Store an answer, received at `now_s`. Earlier ones are dropped if another engine has answered."""
        self.error = ""
        last = self.last
        if last is not None and (state.engine != last.engine or state.step < last.step or state.up_s < last.up_s):
            self._samples.clear()  # another engine has taken its place
        self._samples.append(StateSample(now_s, state))
        while len(self._samples) > 2 and self._samples[1].at_s <= now_s - OVER_S:  # noqa: PLR2004  (a first and a last)
            self._samples.popleft()

    @property
    def last(self) -> EngineState | None:
        """The last answer; None if the engine does not answer."""
        return self._samples[-1].state if self._samples else None

    @property
    def since(self) -> tuple[EngineState, float] | None:
        """(the answer `OVER_S` before the last one, or the first; the seconds between the two); None: there is one."""
        first, last = self._samples[0], self._samples[-1]
        return (first.state, last.at_s - first.at_s) if last.at_s > first.at_s else None


class EngineList:
    """The engines at some addresses."""

    def __init__(self, addresses: Sequence[Address], token: str) -> None:
        """No engine is queried yet."""
        self._addresses, self._token = addresses, token
        self._engines: dict[Address, SeenEngine] = {}

    @property
    def engines(self) -> list[SeenEngine]:
        """Those found by the last `look`."""
        return list(self._engines.values())

    async def look(self) -> None:
        """Query all engines, concurrently."""
        there = list(dict.fromkeys(one for address in self._addresses for one in _found(address)))[:ENGINES_MAX]
        self._engines = {one: self._engines.get(one) or SeenEngine(one) for one in there}
        async with anyio.create_task_group() as group:
            for engine in self._engines.values():
                group.start_soon(engine.look, self._token)


def _found(address: Address) -> Iterator[Address]:
    """Yield the address, or those of the sockets that it stands for."""
    if ENGINE not in address.path:
        yield address
        return
    pattern = "*".join(map(glob.escape, address.path.split(ENGINE)))
    for path in sorted(glob.glob(pattern)):  # noqa: PTH207  (a pattern from the root)
        yield address._replace(path=path)


# ---- the screen ----------------------------------------------------------------------------------------------------


def screen(engines: Sequence[SeenEngine], requests_max: int) -> RenderableType:
    """Draw the state of `engines`, and the `requests_max` oldest of their requests."""
    parts: list[RenderableType] = [Text(time.strftime("kvpipe top  %H:%M:%S"), style="bold"), Text()]
    if not engines:
        parts.append(Text("no engine is found there"))
    for engine in engines:
        parts += [_drawn(engine), Text()]
    rows = sorted(_requests(engines), key=lambda row: -row[1].lived_s)[:requests_max]
    return Group(*parts, _table(rows)) if rows else Group(*parts)


def _requests(engines: Iterable[SeenEngine]) -> Iterator[tuple[str, RequestHolds]]:
    for engine in engines:
        if engine.last is not None:
            for request in engine.last.requests_shown:
                yield engine.last.engine, request


def _drawn(engine: SeenEngine) -> Text:
    state = engine.last
    if state is None:
        address = "" if str(engine.address) in engine.error else f"{engine.address}  "
        return Text.assemble(("● ", "red"), f"{address}{printable(engine.error)}")
    since = engine.since
    lines = [
        _head(state, since),
        _hits(state, since),
        _pool(state, since),
        _moving(state),
    ]
    if state.tiers:
        tiers = [
            Text(
                tier.name
                + (" ok" if tier.breaker == "CLOSED" and not tier.left_by_ranks else f" {_left(tier.breaker)}")
            )
            for tier in state.tiers
        ]
        lines.append(_line("tiers", Text("  ").join(tiers)))
    return Text("\n").join(lines)


def _left(breaker: str) -> str:
    return "left alone by a rank" if breaker == "CLOSED" else f"left alone ({breaker})"


def _line(label: str, *parts: Text | str) -> Text:
    return Text.assemble(f"  {label:<{_LABEL_COLUMNS}}", *parts)


def _head(state: EngineState, since: tuple[EngineState, float] | None) -> Text:
    up = timedelta(seconds=int(state.up_s))
    text = f"  up {up}  {state.requests} {'request' if state.requests == 1 else 'requests'}"
    if since is not None:
        text += f"  {(state.step - since[0].step) / since[1]:.0f} steps/s"
    faults = state.traffic.faults
    on = [name for name, is_on in state.switches.model_dump().items() if is_on]
    return Text.assemble(
        ("● ", "green"), (printable(state.engine), "bold"), text,
        (f"  {faults} {'fault' if faults == 1 else 'faults'}" if faults else "", "red"),
        (f"  {', '.join(on)}" if on else "", "yellow"),
    )  # fmt: skip


def _hits(state: EngineState, since: tuple[EngineState, float] | None) -> Text:
    """Return the sources of prompt tokens: over the last `OVER_S`, and since the engine's start."""
    hit, missed = state.traffic.hit_tokens, state.traffic.missed_tokens
    when, then = "since it began", ""
    if since is not None:
        lately = _less(hit, since[0].traffic.hit_tokens), _less(missed, since[0].traffic.missed_tokens)
        if any(lately[0].values()) or any(lately[1].values()):
            then = f"; {_percent(sum(hit.values()), sum(hit.values()) + sum(missed.values()))} {when}"
            (hit, missed), when = lately, f"in {since[1]:.0f} s"
    hits, total = sum(hit.values()), sum(hit.values()) + sum(missed.values())
    by_tier = "".join(f", {one}" for one in _shares(hit, total))
    text = f" {_percent(hits, total)} of {total:,} tokens that vLLM lacked {when}{by_tier}{then}"
    line = _line("hits", _bar(hits / max(1, total)), text)
    if reasons := _shares(missed, total)[:_REASONS]:
        line = Text("\n").join([line, _line("missed", ", ".join(reasons))])
    return line


def _less(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
    return {name: count - then.get(name, 0) for name, count in now.items()}


def _shares(tokens: dict[str, int], total: int) -> list[str]:
    """Return each name with its share of `total` in percent, the largest first."""
    named = sorted(((count, name) for name, count in tokens.items() if count > 0), reverse=True)
    return [f"{printable(name)} {_percent(count, total)}" for count, name in named]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _bar(share: float) -> Text:
    full = round(BAR * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, "green"), ("░" * (BAR - full), "dim"))


def _pool(state: EngineState, since: tuple[EngineState, float] | None) -> Text:
    pool = state.pool
    text = f" {_percent(pool.bytes_used, pool.bytes_max)} of {_size(pool.bytes_max)}, {pool.leases} leases"
    if since is not None:
        text += f", {(state.traffic.evicted - since[0].traffic.evicted) / since[1]:.1f} evictions/s"
    line = _line("pool", _bar(pool.bytes_used / max(1, pool.bytes_max)), text)
    for one in sorted(pool.quotas, key=lambda one: one.slots, reverse=True)[:_QUOTAS]:
        sure, most = _percent(one.slots_sure, pool.slots), _percent(one.slots_max, pool.slots)
        text = f" {_percent(one.slots, pool.slots)} {printable(one.name)}, of {sure} that are its own, {most} at most"
        line = Text("\n").join([line, _line("", _bar(one.slots / max(1, pool.slots)), text)])
    return line


def _moving(state: EngineState) -> Text:
    jobs = state.jobs
    return _line(
        "in flight",
        f"saves {jobs.saves} ({_size(jobs.save_bytes)}), loads {jobs.loads} ({_size(jobs.load_bytes)})",
        f", to and from tiers {jobs.tier_orders} (up to {_size(jobs.tier_bytes_max)})" if state.tiers else "",
    )


def _size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def _table(rows: Sequence[tuple[str, RequestHolds]]) -> Table:
    table = Table("oldest requests", "engine", "state", "saving", box=box.SIMPLE_HEAD)
    for name in ("lived", "tokens", "saved", "leases", "preempted"):
        table.add_column(name, justify="right")
    for engine, row in rows:
        state = f"{row.state} (tiers)" if row.waits_for_tiers else row.state
        texts = (printable(row.request), printable(engine), state, row.saving)
        numbers = (row.tokens, row.saved_tokens, row.chunks_held, row.preemptions)
        table.add_row(*map(Text, texts), f"{row.lived_s:.1f} s", *(f"{number:,}" for number in numbers))
    return table
