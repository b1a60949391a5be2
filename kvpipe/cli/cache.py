"""`kvpipe cache`: the KV that an engine holds (`held.py`), and what tiers hold: count, list, verify and purge it."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import anyio
import anyio.to_thread
from pydantic import ByteSize
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpipe import config_errors, plugins
from kvpipe.cli import held
from kvpipe.cli.asking import ASKS_ENGINE, list_commands
from kvpipe.cli.numbers import count_from_1
from kvpipe.config import load_settings
from kvpipe.errors import UsageError
from kvpipe.tiers.base import ALIGN_BYTES, Entry, Get, Read, Tier, TierError
from kvpipe.tiers.envelope import HEADER_BYTES, VERSION, DamagedError, Sealer, describe, pages, version_of
from kvpipe.tiers.guard import capacity_of
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.registry import make_tier, named, parse_tiers
from kvpipe.tiers.spec import TierSpec

LISTED_MAX: Final = 1000
BATCH: Final = 256  # keys dropped at a time
LARGE_BYTES: Final = 256 << 20
VALUE_BYTES_MAX: Final = 8 << 30
"""No rank's part of a chunk is longer."""
PIPE_COLUMNS: Final = 240
INTERRUPTED: Final = 130
GOOD, GONE = "good", "gone"
STALE, ODD = "stale", "odd"
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Report = dict[str, Any]
"""What a subcommand has found at one tier: one value per name, or a list of rows."""


class TierCommand(NamedTuple):
    """One subcommand at one tier, which is open. `tick` is called for every value seen."""

    tier: Tier
    spec: TierSpec
    args: argparse.Namespace
    tick: Callable[[], None]

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield what the tier holds, of `--namespace` if that is given."""
        async for entry in self.tier.scan():
            self.tick()
            if self.args.namespace in {None, entry.key.namespace}:
                yield entry

    async def batches(self, count: int) -> AsyncIterator[list[Entry]]:
        """Yield the same, `count` at a time."""
        batch: list[Entry] = []
        async for entry in self.entries():
            batch.append(entry)
            if len(batch) == count:
                yield batch
                batch = []
        if batch:
            yield batch


Action = Callable[[TierCommand, Report], Coroutine[Any, Any, bool]]
"""Adds its findings to the report; returns whether the tier is well. Raises TierError."""


def add_parsers(cache: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe cache`; each sets `run`."""
    cache.description = "The KV that is kept: by a running engine in its memory, and in tiers."
    sub = cache.add_subparsers(required=True, metavar="COMMAND", help="one of those below")
    held.add_parsers(sub)
    of_engine = list(sub.choices)
    _add_tiers(sub)
    of_tiers = [name for name in sub.choices if name not in of_engine]
    list_commands(
        cache,
        sub.choices,
        {ASKS_ENGINE: of_engine, "open tiers from here, by URL or path; they ask no engine": of_tiers},
    )


def _add_tiers(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    _parser(sub, "stats", _stats, "how much is there, of which namespaces, and is the tier well?")

    one = _parser(sub, "ls", _ls, "list keys with size and age, sorted by key")
    one.add_argument("--limit", type=count_from_1, default=LISTED_MAX, help=f"how many to list (default {LISTED_MAX})")

    one = _parser(sub, "verify", _verify, "read every value and check it; status 1 if any is damaged")
    one.add_argument("--delete", action="store_true", help="drop the damaged ones")

    one = _parser(sub, "purge", _purge, "drop values without asking first; prints how many")
    one.add_argument("--older-than", type=_duration_s, metavar="AGE", help="values of that age: 45s, 30m, 12h, 7d")
    one.add_argument(
        "--stale", action="store_true", help="values of formats before this one, which this version does not read"
    )
    one.add_argument("--all", action="store_true", help="every value of kvpipe's that is there")
    one.add_argument("--dry-run", action="store_true", help="only print what would be dropped")


def _parser(sub: Any, name: str, action: Action, description: str) -> argparse.ArgumentParser:  # noqa: ANN401
    one: argparse.ArgumentParser = sub.add_parser(name, description=description)
    one.add_argument("tier", nargs="*", help="URL or path, as in the configuration's `tiers`; none: those of it")
    one.add_argument("--namespace", type=_namespace, help="only values of this namespace, 32 hex digits")
    one.add_argument("--json", action="store_true", help="print a line of JSON per tier")
    one.set_defaults(run=lambda args: run(args, action))
    return one


def run(args: argparse.Namespace, action: Action) -> int:
    """Do `action` at every tier, one after the other. Returns the exit status: 1 if one was not well or not usable.

    Raises:
        UsageError: no tier is named, one is named wrongly, or `purge` has no selection.

    """
    if action is _purge and args.all == (bool(args.namespace) or args.older_than is not None or args.stale):
        raise UsageError("kvpipe: purge: choose the values: --all, or any of --namespace, --older-than and --stale")
    specs = parse_tiers(args.tier) if args.tier else load_settings().tiers
    if not specs:
        raise UsageError("kvpipe: no tier is named; write a URL or a path, or set KVPIPE_TIERS or KVPIPE_CONFIG_FILE")
    try:
        return max([anyio.run(_at, name, spec, args, action) for name, spec in named(specs)])
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("kvpipe: interrupted\n")
        return INTERRUPTED


async def _at(name: str, spec: TierSpec, args: argparse.Namespace, action: Action) -> int:
    """Do `action` at one tier and print its report. Returns the exit status. An interrupt cancels it."""
    if task := asyncio.current_task():
        # asyncio's own handler does not wake a loop that is about to wait: the interrupt would count after the wait
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    spec = spec.model_copy(update={"store": "never"})  # no folder is made, nothing makes room for values to come
    tier, report = make_tier(name, spec, writes=False), Report(tier=name)
    try:
        with _progress(name) as tick:
            async with _opened(tier):
                well = await action(TierCommand(tier, spec, args, tick), report)
    except TierError as error:
        sys.stderr.write(f"kvpipe: {error}\n")
        return 1
    except Exception as error:
        if isinstance(error, UsageError) or spec.kind in plugins.own(plugins.TIERS):
            raise
        sys.stderr.write(f"kvpipe: {name}: {config_errors.reason(repr(error))}, which no tier should raise\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(report)
    return 0 if well else 1


@asynccontextmanager
async def _opened(tier: Tier) -> AsyncIterator[None]:
    try:
        await tier.open()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await tier.close()


@contextmanager
def _progress(name: str) -> Iterator[Callable[[], None]]:
    """Show a count of values on a terminal; yields the function that counts one."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} values")
    quiet = not sys.stderr.isatty()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet) as shown:
        task = shown.add_task(escape(name))
        yield lambda: shown.advance(task)


async def _stats(job: TierCommand, report: Report) -> bool:
    held = await capacity_of(job.tier)
    report |= {"kind": job.spec.kind, "items": held.items, "bytes": held.bytes_used, "bytes_max": held.bytes_max}
    try:
        await job.tier.health()
    except TierError as error:
        report["health"] = str(error)
        return False
    report["health"] = "ok"
    items, sizes = Counter[str](), Counter[str]()
    async for entry in job.entries():
        items[entry.key.namespace] += 1
        sizes[entry.key.namespace] += entry.bytes
    report["namespaces"] = [
        {"namespace": namespace, "items": items[namespace], "bytes": size} for namespace, size in sizes.most_common()
    ]
    return True


async def _ls(job: TierCommand, report: Report) -> bool:
    limit, seen, first = job.args.limit, 0, list[Entry]()
    async for entry in job.entries():
        seen += 1
        first.append(entry)
        if len(first) >= 2 * limit:  # of millions only what is listed is kept
            first = sorted(first, key=_by_key)[:limit]
    first = sorted(first, key=_by_key)[:limit]
    report |= {"items": seen, "listed": len(first)}
    report["values"] = [{"key": one.key.text, "bytes": one.bytes, "age_s": one.age_s} for one in first]
    return True


def _by_key(entry: Entry) -> str:
    return entry.key.text


async def _verify(job: TierCommand, report: Report) -> bool:
    sealer, why, damaged, deleted = Sealer(secrets_of(job.spec)), Counter[str](), list[dict[str, str]](), 0
    buffers = [pages(HEADER_BYTES) for _ in range(job.spec.lanes)]

    def check(entry: Entry, header: memoryview, body: memoryview) -> str:
        try:
            sealer.unseal(entry.key, describe(header).units, header, body)
        except DamagedError as error:
            return str(error)
        return GOOD

    async for batch in job.batches(job.spec.lanes):
        verdicts = await _judged(job.tier, batch, buffers, check)
        why.update(verdicts)
        wrong = [
            (entry.key, message) for entry, message in zip(batch, verdicts, strict=True) if message not in {GOOD, GONE}
        ]
        damaged += [{"key": key.text, "why": message} for key, message in wrong[: LISTED_MAX - len(damaged)]]
        if wrong and job.args.delete:
            deleted += await job.tier.delete([key for key, _ in wrong])
    good, gone = why.pop(GOOD, 0), why.pop(GONE, 0)
    report |= {"good": good, "damaged": why.total(), "gone_meanwhile": gone, "deleted": deleted}
    report["reasons"] = [{"why": message, "items": items} for message, items in why.most_common()]
    report["damaged_values"] = damaged
    return not why


_Check = Callable[[Entry, memoryview, memoryview], str]
"""Returns the verdict on a value from its entry, header and body: GOOD, or what is wrong with it."""


async def _judged(tier: Tier, batch: list[Entry], buffers: list[memoryview], check: _Check) -> list[str]:
    """Read values, `len(buffers)` at once and larger ones alone; return each one's verdict, in the order of `batch`.

    A verdict is that of `check`, GONE or "length". Memory: `len(buffers)` times LARGE_BYTES, or VALUE_BYTES_MAX once.
    """
    small = [entry for entry in batch if entry.bytes <= LARGE_BYTES]
    found = dict(zip(small, await _verdicts(tier, check, small, buffers), strict=True))
    for entry in batch:
        if entry.bytes > VALUE_BYTES_MAX:  # it is not read, whatever reports that size
            found[entry] = "length"
        elif entry not in found:
            (found[entry],) = await _verdicts(tier, check, [entry], [_room(entry)])
    return [found[entry] for entry in batch]


def _room(entry: Entry) -> memoryview:
    try:
        return pages(_padded(entry.bytes))
    except OSError:
        raise TierError(f"{entry.key.text} is {entry.bytes} bytes long, for which there is no memory here") from None


def _padded(size: int) -> int:
    return max(HEADER_BYTES, -(-size // ALIGN_BYTES) * ALIGN_BYTES)  # a torn value will not fit


async def _verdicts(tier: Tier, check: _Check, batch: list[Entry], buffers: list[memoryview]) -> list[str]:
    """Return each value's verdict: that of `check`, GONE, or "length". Too short buffers are replaced in `buffers`."""
    parts = []
    for at, entry in enumerate(batch):
        size = _padded(entry.bytes)
        if size > buffers[at].nbytes:
            buffers[at] = pages(size)
        parts.append((buffers[at][:HEADER_BYTES], buffers[at][HEADER_BYTES:size]))
    gets = [Get(entry.key, tuple(filter(len, part))) for entry, part in zip(batch, parts, strict=True)]
    read = await tier.read(gets)

    def verdict(entry: Entry, got: Read, header: memoryview, body: memoryview) -> str:
        if got is not Read.HIT:
            return GONE if got is Read.MISS else "length"
        return check(entry, header, body)

    return await anyio.to_thread.run_sync(
        lambda: [verdict(entry, got, *part) for entry, got, part in zip(batch, read, parts, strict=True)]
    )


async def _purge(job: TierCommand, report: Report) -> bool:
    age, items, size, ageless, stale = job.args.older_than, 0, 0, 0, _OldFormats(job)
    async for batch in job.batches(BATCH):
        chosen = [one for one in batch if age is None or (one.age_s is not None and one.age_s >= age)]
        ageless += sum(one.age_s is None for one in batch) if age is not None else 0
        chosen = await stale.of(chosen) if job.args.stale else chosen
        items += len(chosen) if job.args.dry_run else await job.tier.delete([one.key for one in chosen])
        size += sum(one.bytes for one in chosen)
    report |= {"would_drop" if job.args.dry_run else "dropped": items, "bytes": size}
    if ageless:
        report["kept_of_unknown_age"] = ageless
    if stale.odd:
        report["kept_of_unknown_format"] = stale.odd
    return True


class _OldFormats:
    """Finds values of formats before this one. The format is part of what a namespace's name depends on.

    So of a namespace in use one value is read: reading is a use, and others keep their ages.
    """

    def __init__(self, job: TierCommand) -> None:
        self._tier, self._lanes = job.tier, job.spec.lanes
        self._buffers = [pages(HEADER_BYTES) for _ in range(self._lanes)]
        self._in_use, self._old = set[str](), set[str]()
        self.odd = 0
        """Values that were read and are of no format that is known here."""

    async def of(self, entries: list[Entry]) -> list[Entry]:
        """Return those that are stale."""
        out, left = list[Entry](), entries
        while left := [one for one in left if one.key.namespace not in self._in_use]:
            batch, spaces = list[Entry](), set[str]()
            for one in left:
                if len(batch) < self._lanes and (one.key.namespace in self._old or one.key.namespace not in spaces):
                    batch.append(one)
                    spaces.add(one.key.namespace)
            left = [one for one in left if one not in batch]
            for one, what in zip(batch, await _judged(self._tier, batch, self._buffers, self._judge), strict=True):
                out += [one] if what == STALE else []
                known = {STALE: self._old, GOOD: self._in_use}.get(what, set())
                known.add(one.key.namespace)
                self.odd += what not in {STALE, GOOD, GONE}
        return out

    @staticmethod
    def _judge(_: Entry, header: memoryview, __: memoryview) -> str:
        version = version_of(header)
        return STALE if 0 < version < VERSION else GOOD if version == VERSION else ODD


def _print(report: Report) -> None:
    """Print single values as one table, and each list of rows as another."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    lists = {name: rows for name, rows in report.items() if isinstance(rows, list)}
    single = {name: one for name, one in report.items() if name not in lists}
    for rows in ([single], *filter(None, lists.values())):
        table = Table(box=box.SIMPLE)
        for name, one in rows[0].items():
            head = name.removesuffix("_s").replace("_", " ")
            table.add_column(head, justify="left" if isinstance(one, str) else "right", overflow="fold")
        for row in rows:
            table.add_row(*(escape(_text(name, one)) for name, one in row.items()))
        console.print(table)


def _text(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.startswith("bytes") and isinstance(value, int):
        return ByteSize(value).human_readable()
    if name == "age_s" and isinstance(value, float):
        unit = next((one for one in "dhm" if _SECONDS[one] <= value), "s")
        return f"{value / _SECONDS[unit]:.1f} {unit}"
    return str(value)


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace: 32 hex digits, as `kvpipe cache stats` shows them")
    return text


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 45s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
