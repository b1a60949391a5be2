"""This module prints a trace in the terminal: slow requests, reasons of misses, and a request's life as a waterfall."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpipe.statemachine import copy
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.log import bounded, printable
from kvpipe.trace.miss_reasons import REASONS
from kvpipe.trace.reader import Trace, files_of

SLOWEST = 10
OPEN_MAX = 200_000  # the largest number of requests without an end that are kept; further requests are only counted
_BAR = 40
_OVERVIEW = tuple(
    f'{{"event":"{e.tag_of(kind)}"'.encode()
    for kind in (
        e.Started, e.Ended, e.Dropped, e.RequestAdmitted, e.RequestReadmitted, e.RequestDone, e.FreezeSwitched,
        e.CacheReset, e.TierSlow, e.TierLost, e.Stuck, e.Fault, transitions.Illegal,
    )
)  # fmt: skip
_COPIES = tuple(f'{{"event":"{e.tag_of(kind)}"'.encode() for kind in (e.LayerSubmitted, e.LayerCopied))
_COMMON = frozenset(e.Event.__struct_fields__)
_NS_PER_MS = 1e6


class RequestRow(NamedTuple):
    """One finished request in the table of the slowest requests. Rows are ordered by the time from begin to end."""

    lived_ms: float
    request: str
    waited_ms: float
    loading_ms: float
    prompt: int
    hit: int
    preemptions: int
    status: str


class Overview:
    """The summary of a trace. Its memory is proportional to the number of requests that live at once."""

    def __init__(self, slowest: int) -> None:
        """`slowest` is the number of slow requests to keep."""
        self._keep = slowest
        self._slowest: list[RequestRow] = []
        self._admitted: dict[tuple[str, str], e.RequestAdmitted] = {}
        self.engines: Counter[str] = Counter()
        self.done = self.events = self.dropped = 0
        self.tokens: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.missed_tokens: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()
        self._seen: dict[tuple[str, int, str], int] = {}  # the last value of each fault's counter, by side
        self.first_ns, self.last_ns = 0, 0

    def feed(self, event: e.Event) -> None:
        """Add one event of the trace to the summary."""
        self.events += 1
        self.first_ns = min(self.first_ns or event.wall_ns, event.wall_ns)
        self.last_ns = max(self.last_ns, event.wall_ns)
        match event:
            case e.RequestAdmitted():
                self._admit(event)
            case e.RequestDone():
                self._end(event)
            case e.Started():
                self.engines[event.engine] += 1
            case e.Dropped():
                self.dropped += event.count
            case e.Fault():
                self._seen[event.engine, event.rank, event.name] = event.seen
            case e.TierSlow() | e.TierLost() | e.Stuck() | transitions.Illegal() | e.CacheReset() | e.FreezeSwitched():
                self._wrong[e.tag_of(event)] += 1
            case _:
                pass

    @property
    def wrong(self) -> Counter[str]:
        """The faults and warnings, each with the number of times that it has surely occurred.

        Events missing in the trace may add more.
        """
        counts = Counter(self._wrong)
        for (_, _, name), seen in self._seen.items():
            counts[name] += seen
        return counts

    @property
    def slowest(self) -> list[RequestRow]:
        """The slowest requests. The slowest request is first."""
        return sorted(self._slowest, reverse=True)

    def _admit(self, event: e.RequestAdmitted) -> None:
        self.tokens["local"] += event.local_tokens
        self.tokens["missed"] += event.missed_tokens
        for tier, tokens in event.hit_tokens.items():
            self.tokens[tier] += tokens
        if event.why:
            self.misses[event.why] += 1
            self.missed_tokens[event.why] += event.missed_tokens
        if not isinstance(event, e.RequestReadmitted) and len(self._admitted) < OPEN_MAX:
            self._admitted[event.engine, event.request] = event

    def _end(self, event: e.RequestDone) -> None:
        self.done += 1
        began = self._admitted.pop((event.engine, event.request), None)
        waited, hit = (began.waited_ms, sum(began.hit_tokens.values())) if began is not None else (event.lived_ms, 0)
        row = RequestRow(
            event.lived_ms, event.request, waited, event.loading_ms, event.prompt_tokens, hit, event.preemptions,
            event.status,
        )  # fmt: skip
        if len(self._slowest) < self._keep:
            heapq.heappush(self._slowest, row)
        else:
            heapq.heappushpop(self._slowest, row)


def _is_of_interest(line: bytes) -> bool:
    """Return whether the overview may need `line`, which is not decoded yet."""
    return line.startswith(_OVERVIEW) or not line.startswith(b'{"event":"')


def show_overview(path: Path, console: Console, slowest: int) -> int:
    """Print the summary of a trace and return 0.

    Raises:
        UsageError: a file of the trace cannot be read.

    """
    traces = [Trace(part, _is_of_interest) for part in files_of(path)]
    found = Overview(slowest)
    for event in itertools.chain.from_iterable(traces):
        found.feed(event)
    lines = sum(trace.lines for trace in traces)
    seconds = (found.last_ns - found.first_ns) / 1e9
    console.print(
        f"[bold]{_safe(path)}[/]: {lines} lines, {len(found.engines)} engine{'s' * (len(found.engines) != 1)}, "
        f"{seconds:.1f} s, {found.done} requests over"
    )
    if total := found.tokens.total():
        names = {"local": "held by vLLM itself", "missed": "computed"}
        shares = (
            f"{tokens / total:.0%} {names.get(what, f'from {_safe(what)}')}"
            for what, tokens in found.tokens.most_common()
            if tokens
        )
        console.print(f"{total} tokens were asked for: {', '.join(shares)}.", highlight=False)
    for trace in traces:
        if sentence := trace.unread_summary():
            console.print(f"{_safe(trace.path)}: {sentence}", style="yellow")
    if found.dropped:
        console.print(f"{found.dropped} events were dropped while tracing.", style="yellow")
    if found.slowest:
        console.print(_slowest(found.slowest))
    if found.misses:
        console.print(_misses(found))
    if found.wrong:
        console.print(_wrong(found.wrong))
    if not lines:
        console.print("The trace is empty: no request has come, or trace_file was set on another engine.")
    return 0


def show_request(path: Path, request: str, console: Console, *, every: bool) -> int:
    """Print the life of `request`. If the trace has no such request, return 1.

    `request` is vLLM's id of the request, or the client's id, to which vLLM adds a suffix. `every` says whether to
    print every event.

    Raises:
        UsageError: a file of the trace cannot be read.

    """
    request = bounded(request)
    needle = msgspec.json.encode(request)[1:-1]
    events = [
        one
        for one in _read(path, lambda line: needle in line)
        if one.request == request or one.request.startswith(f"{request}-")
    ]
    if not events:
        console.print(
            f"{_safe(path)} has no event of request {_safe(request)}; "
            f"`kvpipe trace show {_safe(path)}` lists the slowest."
        )
        return 1
    if every:
        jobs = {one.job for one in events if isinstance(one, e.LoadPlanned | e.SavePlanned)}
        copies = _read(path, lambda line: line.startswith(_COPIES))
        shared = [one for one in copies if isinstance(one, e.LayerSubmitted | e.LayerCopied) and not one.request]
        events += [one for one in shared if jobs.intersection(one.jobs)]  # events of copies that serve several requests
    for name in sorted({one.request for one in events if one.request}):
        _waterfall(name, [one for one in events if one.request in {name, ""}], console, every=every)
    return 0


def _read(path: Path, wanted: Callable[[bytes], bool]) -> Iterator[e.Event]:
    return itertools.chain.from_iterable(Trace(part, wanted) for part in files_of(path))


def _safe(text: object) -> str:
    """Escape `text`, so that neither the terminal nor rich interprets parts of `text` as commands."""
    return escape(str(printable(str(text))))


def _waterfall(name: str, events: list[e.Event], console: Console, *, every: bool) -> None:
    events.sort(key=lambda one: one.t_ns)
    begin, end = events[0].t_ns, events[-1].t_ns
    lines = sorted(_each(events) if every else _phases(events))
    scale = (_BAR - 1) / max(1, end - begin)
    console.print(f"[bold]request {_safe(name)}[/], {(end - begin) / _NS_PER_MS:.1f} ms", highlight=False)
    for first, last, what, message in lines:
        at = int((first - begin) * scale)
        bar = " " * at + "━" * max(1, round((min(last, end) - first) * scale))
        console.print(
            f"{(first - begin) / _NS_PER_MS:10.2f} ms  [cyan]{bar[:_BAR]:{_BAR}}[/]  [bold]{what:18}[/] {message}",
            highlight=False, markup=True, no_wrap=True, overflow="ellipsis",
        )  # fmt: skip


Line = tuple[int, int, str, str]
"""A line of the waterfall: first and last nanosecond, a name, and details."""


def _phases(events: list[e.Event]) -> Iterator[Line]:
    """Yield a line per event that matters to a user. A job has one line for all layers on all ranks."""
    jobs: dict[tuple[str, int], list[transitions.Transition]] = {}
    planned: dict[int, e.LoadPlanned | e.SavePlanned] = {}
    for event in events:
        match event:
            case e.LoadPlanned() | e.SavePlanned():
                planned[event.job] = event
            case transitions.Transition(machine="save" | "load") if not isinstance(event, transitions.NoOp):
                jobs.setdefault((event.machine, event.cursor), []).append(event)
            case transitions.Preempted() | transitions.Resumed() | transitions.Recomputing() | transitions.Illegal():
                yield event.t_ns, event.t_ns, e.tag_of(event), _safe(event.why)
            case e.RequestAdded() | e.Lookup() | e.RequestAdmitted() | e.RequestDone() | e.Stuck() | e.Fault():
                yield event.t_ns, event.t_ns, e.tag_of(event), _fields(event)
            case _:
                pass
    for (machine, job), moves in jobs.items():
        plan = planned.get(job)
        ranks = {one.rank for one in moves}
        layers = sum(one.on == copy.LANDED_NEXT for one in moves) // len(ranks)
        ends = {f"{one.now} {one.why}".strip() for one in moves if isinstance(one, transitions.JOB_ENDS)}
        blocks = f"{plan.pages} blocks, " if plan is not None else ""
        end = _safe(", ".join(sorted(ends))) or "not over"
        message = f"job {job}: {blocks}{layers} layers on {len(ranks)} rank{'s' * (len(ranks) > 1)}, {end}"
        yield plan.t_ns if plan is not None else moves[0].t_ns, moves[-1].t_ns, machine, message


def _each(events: list[e.Event]) -> Iterator[Line]:
    """Yield a line per event."""
    for event in events:
        where = "scheduler" if event.rank < 0 else f"rank {event.rank}"
        last = event.t_ns + (event.took_ns if isinstance(event, e.LayerCopied) else 0)
        yield event.t_ns, last, e.tag_of(event), f"{where} {_fields(event)}"


def _fields(event: e.Event) -> str:
    message = ((key, getattr(event, key)) for key in event.__struct_fields__ if key not in _COMMON)
    return _safe(" ".join(f"{key}={value}" for key, value in message if value not in ("", 0, {}, [])))


def _slowest(rows: list[RequestRow]) -> Table:
    table = Table(title="slowest requests", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("lived\nms", "waited\nms", "loading\nms", "prompt\ntokens", "hit\ntokens", "pre-\nempted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    table.add_column("request", no_wrap=True, overflow="fold")
    for row in rows:
        table.add_row(
            f"{row.lived_ms:.0f}", f"{row.waited_ms:.0f}", f"{row.loading_ms:.0f}", str(row.prompt),
            str(row.hit), str(row.preemptions), _safe(row.status.removeprefix("finished_")), _safe(row.request),
        )  # fmt: skip
    return table


def _misses(found: Overview) -> Table:
    table = Table(title="misses by reason", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("reason", no_wrap=True)
    table.add_column("admissions", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("it means", overflow="fold")
    for why, times in found.misses.most_common():
        table.add_row(_safe(why), str(times), str(found.missed_tokens[why]), REASONS.get(why, ""))
    return table


def _wrong(counts: Counter[str]) -> Table:
    table = Table(title="what went wrong, or was switched", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("times, at least", justify="right")
    for what, times in counts.most_common():
        table.add_row(_safe(what), str(times))
    return table
