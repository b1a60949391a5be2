"""`kvpipe cache` shows the KV that an engine holds (`held.py`), and counts, lists, verifies or purges tiers."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import anyio
from pydantic import ByteSize
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpipe.cli import held
from kvpipe.cli.asking import ASKS_ENGINE, list_commands
from kvpipe.cli.judging import DAMAGED, GONE, GOOD, NOT_ENCRYPTED, STALE, UNJUDGED, Judge, Judgement
from kvpipe.cli.numbers import count_from_1
from kvpipe.config.settings import load_settings
from kvpipe.errors import UsageError
from kvpipe.inputs import config_errors, plugins
from kvpipe.tiers.base import Entry, Key, Tier, TierError
from kvpipe.tiers.guard import capacity_of
from kvpipe.tiers.registry import make_tier, named, parse_tiers
from kvpipe.tiers.spec import TierSpec

LISTED_MAX: Final = 1000
BATCH: Final = 256  # the number of keys that one call deletes
TRIES: Final = 8
"""The largest number of values that are read to learn a namespace's format and encryption key."""
PIPE_COLUMNS: Final = 240
WELL, NOT_WELL, DOUBTFUL, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. DOUBTFUL means that this command cannot judge some values, so no value is deleted."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Findings = dict[str, Any]
"""The report of a subcommand on one tier. Each name has a single value or a list of rows."""


class TierCommand(NamedTuple):
    """A run of a subcommand on one open tier. `tick` is called for every listed value. `show` prints a report."""

    tier: Tier
    spec: TierSpec
    args: argparse.Namespace
    tick: Callable[[], None]
    show: Callable[[Findings], None]

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield the entries of the tier. If `--namespace` is given, yield only entries of that namespace."""
        async for entry in self.tier.scan():
            self.tick()
            if self.args.namespace in {None, entry.key.namespace}:
                yield entry

    async def batches(self, count: int, only: Callable[[Entry], bool] | None = None) -> AsyncIterator[list[Entry]]:
        """Yield lists of `count` entries for which `only` is true. If `only` is None, yield lists of all entries."""
        batch: list[Entry] = []
        async for entry in self.entries():
            if only is None or only(entry):
                batch.append(entry)
            if len(batch) == count:
                yield batch
                batch = []
        if batch:
            yield batch


TierAction = Callable[[TierCommand, Findings], Coroutine[Any, Any, int]]
"""A subcommand. The function adds its findings to the report, and returns the exit status. Raises TierError."""


def add_parsers(cache: argparse.ArgumentParser) -> None:
    """Add the subcommands of `kvpipe cache`. Each subcommand sets `run`."""
    cache.description = "The KV that a running engine holds in memory, and the KV in tiers."
    sub = cache.add_subparsers(required=True, metavar="COMMAND", help="one of the commands below")
    held.add_parsers(sub)
    of_engine = list(sub.choices)
    _add_tiers(sub)
    of_tiers = [name for name in sub.choices if name not in of_engine]
    list_commands(
        cache,
        sub.choices,
        {ASKS_ENGINE: of_engine, "open tiers directly, by URL or path, without an engine": of_tiers},
    )


def _add_tiers(sub: Any) -> None:  # noqa: ANN401  (argparse hides its type)
    _parser(sub, "stats", _stats, "show the number and size of values by namespace, and whether the tier works")

    one = _parser(sub, "ls", _ls, "list keys with size and age, sorted by key")
    one.add_argument("--limit", type=count_from_1, default=LISTED_MAX, help=f"number of keys (default {LISTED_MAX})")

    judges = "if values cannot be judged, nothing is deleted and the status is 2: give their encryption key"
    one = _parser(sub, "verify", _verify, f"read every value and check it; status 1 if any is damaged; {judges}")
    one.add_argument("--delete", action="store_true", help="print the damaged values and why, then delete them")

    one = _parser(sub, "purge", _purge, f"show which values would be dropped, or drop them; {judges}")
    one.add_argument(
        "--older-than", type=_duration_s, metavar="AGE", help="values unused for this time: 45s, 30m, 12h, 7d"
    )
    one.add_argument("--stale", action="store_true", help="values in older formats, which this version does not read")
    one.add_argument("--all", action="store_true", help="every value of kvpipe in the tier")
    one.add_argument("--force", action="store_true", help="with --namespace: drop also values that cannot be judged")
    deletes = one.add_mutually_exclusive_group()
    deletes.add_argument("--delete", action="store_true", help="print the values to be dropped, then drop them")
    deletes.add_argument("--dry-run", action="store_true", help="only print the values that would be dropped (default)")


def _parser(sub: Any, name: str, action: TierAction, description: str) -> argparse.ArgumentParser:  # noqa: ANN401
    one: argparse.ArgumentParser = sub.add_parser(name, description=description)
    one.add_argument("tier", nargs="*", help="URL or path of a tier; default: all tiers of the configuration")
    one.add_argument("--namespace", type=_namespace, help="only values of this namespace, 32 hex digits")
    one.add_argument("--json", action="store_true", help="print a line of JSON per tier")
    one.set_defaults(run=lambda args: run(args, action))
    return one


def run(args: argparse.Namespace, action: TierAction) -> int:
    """Run `action` on one tier after the other, and return the highest of the exit statuses.

    Raises:
        UsageError: no tier is named, a tier's name is wrong, or the selection of `purge` is missing or contradictory.

    """
    if action is _purge and args.all == (bool(args.namespace) or args.older_than is not None or args.stale):
        raise UsageError("kvpipe: purge: choose the values: --all, or any of --namespace, --older-than and --stale")
    if action is _purge and args.force and (args.stale or not args.namespace):
        raise UsageError("kvpipe: purge: --force deletes values that cannot be judged; give their --namespace")
    specs = parse_tiers(args.tier) if args.tier else load_settings().tiers
    if not specs:
        raise UsageError("kvpipe: no tier is named; write a URL or a path, or set KVPIPE_TIERS or KVPIPE_CONFIG_FILE")
    try:
        return max([anyio.run(_at, name, spec, args, action) for name, spec in named(specs)])
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.stderr.write("kvpipe: interrupted\n")
        return INTERRUPTED


async def _at(name: str, spec: TierSpec, args: argparse.Namespace, action: TierAction) -> int:
    """Run `action` on one tier and print its report. Returns the exit status. An interrupt cancels `action`."""
    if task := asyncio.current_task():
        # asyncio's own handler does not wake a loop that is about to wait, and so would handle the interrupt late.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    spec = spec.model_copy(update={"store": "never"})  # a tier that never stores creates no folder and evicts no value
    tier, report = make_tier(name, spec, writes=False), Findings(tier=name)
    try:
        with _progress(name, args) as shown:
            async with _opened(tier):
                status = await action(TierCommand(tier, spec, args, *shown), report)
    except TierError as error:
        sys.stderr.write(f"kvpipe: {error}\n")
        return NOT_WELL
    except Exception as error:
        if isinstance(error, UsageError) or spec.kind in plugins.own(plugins.TIERS):
            raise
        why = config_errors.pydantic_reason(repr(error))
        sys.stderr.write(f"kvpipe: {name}: {why}: a bug in the tier, which may raise only TierError\n")
        return NOT_WELL
    _show(report, as_json=args.json)
    if doubts := report.get("unjudged_namespaces"):
        items, whys = sum(one["items"] for one in doubts), "; ".join(sorted({one["why"] for one in doubts}))
        sys.stderr.write(f"kvpipe: {name}: {items} values cannot be judged, so nothing is deleted. {whys}\n")
    return status


@asynccontextmanager
async def _opened(tier: Tier) -> AsyncIterator[None]:
    try:
        await tier.open()
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await tier.close()


@contextmanager
def _progress(name: str, args: argparse.Namespace) -> Iterator[tuple[Callable[[], None], Callable[[Findings], None]]]:
    """Show the number of listed values on a terminal. Yields the functions `tick` and `show` for `TierCommand`."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} values")
    quiet = not sys.stderr.isatty()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet) as shown:
        task = shown.add_task(escape(name))

        def show(report: Findings) -> None:
            shown.stop()  # a running progress display would capture the report, which goes to stdout
            _show(report, as_json=args.json)
            sys.stdout.flush()
            shown.start()

        yield lambda: shown.advance(task), show


async def _stats(job: TierCommand, report: Findings) -> int:
    held = await capacity_of(job.tier)
    report |= {"kind": job.spec.kind, "items": held.items, "bytes": held.bytes_used, "bytes_max": held.bytes_max}
    try:
        await job.tier.health()
    except TierError as error:
        report["health"] = str(error)
        return NOT_WELL
    report["health"] = "ok"
    items, sizes = Counter[str](), Counter[str]()
    async for entry in job.entries():
        items[entry.key.namespace] += 1
        sizes[entry.key.namespace] += entry.bytes
    report["namespaces"] = [
        {"namespace": namespace, "items": items[namespace], "bytes": size} for namespace, size in sizes.most_common()
    ]
    return WELL


async def _ls(job: TierCommand, report: Findings) -> int:
    limit, seen, first = job.args.limit, 0, list[Entry]()
    async for entry in job.entries():
        seen += 1
        first.append(entry)
        if len(first) >= 2 * limit:  # keep only `limit` entries, so that memory stays small
            first = sorted(first, key=_by_key)[:limit]
    first = sorted(first, key=_by_key)[:limit]
    report |= {"items": seen, "listed": len(first)}
    report["values"] = [{"key": one.key.text, "bytes": one.bytes, "age_s": one.age_s} for one in first]
    return WELL


def _by_key(entry: Entry) -> str:
    return entry.key.text


async def _verify(job: TierCommand, report: Findings) -> int:
    judge, plain, damaged = Judge(job.tier, job.spec), 0, dict[Key, str]()
    kinds, reasons, unjudged = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    async for batch in job.batches(job.spec.lanes):
        for entry, verdict in zip(batch, await judge.judged(batch), strict=True):
            kinds[verdict.kind] += 1
            plain += verdict == (GOOD, NOT_ENCRYPTED)
            if not verdict.judged:
                unjudged[entry.key.namespace, verdict.why] += 1
            if verdict.kind == DAMAGED:
                damaged[entry.key] = verdict.why
            if verdict.kind not in {GOOD, GONE}:
                reasons[verdict.why] += 1
    report |= {"good": kinds[GOOD], "damaged": len(damaged), "unjudged": unjudged.total()}
    report |= {"gone_meanwhile": kinds[GONE], "deleted": 0} | ({"not_encrypted": plain} if plain else {})
    report["reasons"] = [{"why": why, "items": items} for why, items in reasons.most_common()]
    rows = [{"key": key.text, "why": why} for key, why in damaged.items()]
    if job.args.delete and damaged and not unjudged:
        job.show({"tier": job.tier.name, "will_delete": len(rows), "values": rows})
        report["deleted"] = await _delete_damaged(job, judge, damaged)
    report["damaged_values"] = rows[:LISTED_MAX]
    return _doubts(report, unjudged) or (NOT_WELL if damaged else WELL)


async def _delete_damaged(job: TierCommand, judge: Judge, damaged: Mapping[Key, str]) -> int:
    """Delete the values that are still damaged, and return their number.

    Each value is judged again, because an engine may have replaced it since the first judgement.
    """
    deleted = 0
    async for batch in job.batches(job.spec.lanes, lambda entry: entry.key in damaged):
        verdicts = zip(batch, await judge.judged(batch), strict=True)
        deleted += await job.tier.delete([entry.key for entry, verdict in verdicts if verdict.kind == DAMAGED])
    return deleted


async def _purge(job: TierCommand, report: Findings) -> int:
    args, spaces, ageless = job.args, _Namespaces(job), 0
    items, sizes = Counter[str](), Counter[str]()

    def is_chosen(entry: Entry) -> bool:
        age = args.older_than
        return age is None or entry.key in spaces.read or (entry.age_s is not None and entry.age_s >= age)

    async for entry in job.entries():
        ageless += args.older_than is not None and entry.age_s is None
        if is_chosen(entry):
            items[entry.key.namespace] += 1
            sizes[entry.key.namespace] += entry.bytes
            await spaces.look(entry)
    chosen = {one for one in items if not args.stale or spaces.verdicts[one].kind == STALE}
    doubts = Counter({(one, why): items[one] for one in chosen if (why := spaces.doubt(one))})
    kept = sum(items[one] for one in items.keys() - chosen if not spaces.verdicts[one].judged)
    total, size = sum(items[one] for one in chosen), sum(sizes[one] for one in chosen)
    rows = [{"namespace": one, "items": items[one], "bytes": sizes[one]} for one in sorted(chosen)]
    if args.delete and not doubts:
        job.show({"tier": job.tier.name, "will_drop": total, "bytes": size, "why": _why(args), "namespaces": rows})
        dropped = 0
        async for batch in job.batches(BATCH, lambda one: one.key.namespace in chosen and is_chosen(one)):
            dropped += await job.tier.delete([one.key for one in batch])
        report |= {"dropped": dropped, "bytes": size}
    else:
        report |= {"would_drop": total, "bytes": size, "why": _why(args), "namespaces": rows}
    report |= {"kept_of_unknown_age": ageless} if ageless else {}
    report |= {"kept_unjudged": kept} if kept else {}
    return _doubts(report, doubts) or WELL


def _why(args: argparse.Namespace) -> str:
    """Return a text that names the values that `purge` selects."""
    age = args.older_than
    whys = {
        "of all namespaces": not args.namespace,
        "of one namespace": args.namespace,
        "of formats before this version's": args.stale,
        f"not used for {_text('age_s', age and float(age))}": age is not None,
    }
    return ", ".join(why for why, counts in whys.items() if counts)


class _Namespaces:
    """Judges the namespaces of a tier. All values of a namespace have the same format and encryption key.

    A namespace is GOOD or STALE as soon as one of its values is GOOD or STALE. If none of TRIES values is GOOD or
    STALE, the namespace gets the verdict of its first value that cannot be judged.
    """

    def __init__(self, job: TierCommand) -> None:
        self._judge, self._args = Judge(job.tier, job.spec), job.args
        self._tries = Counter[str]()
        self.verdicts = defaultdict[str, Judgement](lambda: Judgement(GONE))
        self.read = set[Key]()
        """The keys of values that were read. A read counts as a use, so their ages have restarted at 0."""

    async def look(self, entry: Entry) -> None:
        """Read and judge a value, unless the verdict on its namespace is final. Raises `TierError`."""
        space = entry.key.namespace
        if self._args.force or self._tries[space] == TRIES or self.verdicts[space].kind in {GOOD, STALE}:
            return
        self._tries[space] += 1
        self.read.add(entry.key)
        (verdict,) = await self._judge.judged([entry])
        if verdict.kind in {GOOD, STALE} or self.verdicts[space].judged:
            self.verdicts[space] = verdict

    def doubt(self, space: str) -> str:
        """Return the reason why the values of a namespace cannot be judged. Return "" if they can be judged."""
        verdict = self.verdicts[space]
        return verdict.why if verdict.kind == UNJUDGED else ""


def _doubts(report: Findings, doubts: Counter[tuple[str, str]]) -> int:
    """Report the values that cannot be judged, by namespace and reason. Returns 0 if there are none, else DOUBTFUL."""
    rows = [{"namespace": space, "items": items, "why": why} for (space, why), items in doubts.most_common()]
    report |= {"unjudged_namespaces": rows} if rows else {}
    return DOUBTFUL if rows else 0


def _show(report: Findings, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(report)


def _print(report: Findings) -> None:
    """Print the single values of a report as one table, and each list of rows as another table."""
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a namespace: give the 32 hex digits of `kvpipe cache stats`")
    return text


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: write 45s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
