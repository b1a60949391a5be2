"""The screen of `kvpipe top`: the node's memory, several lines for each engine, and at last the slowest requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Final

from pydantic import ByteSize
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpipe.cli import node_view
from kvpipe.cli.seen import SeenEngine
from kvpipe.cli.seen_node import SeenNode
from kvpipe.manage.models import EngineState, Holders, RequestHolds, TierState, slowness
from kvpipe.trace.log import printable

WIDE: Final = 100
"""On screens of at least this width, in characters, bars are long and every column is shown."""
BARS: Final = (10, 18)
USERS_MAX: Final = 5
"""The largest number of users that are shown for each engine. If the screen has too few lines, fewer are shown."""
LEAST_REQUESTS: Final = 4
"""The number of slowest requests that are shown before any line is used for users."""
_REASONS: Final = 3
_QUOTAS: Final = 8
_LABEL_COLUMNS: Final = 9
_SECONDS_MAX: Final = 1e10


def screen(
    engines: Sequence[SeenEngine], requests_max: int, console: Console, *, fits: bool = False,
    node: SeenNode | None = None,
) -> RenderableType:  # fmt: skip
    """Draw the state of `engines` and of the `node`'s memory, and at most `requests_max` of the slowest requests.

    With `fits`, users and requests are left out until the drawing fits on `console`.
    """
    wide = console.width >= WIDE
    rows = sorted(_requests(engines), key=lambda row: slowness(row[1].lived_s, row[1].answer_tokens), reverse=True)
    rows = rows[:requests_max]
    many, users = len(engines) > 1, USERS_MAX
    if fits:
        bare = _height(console, _blocks(engines, 0, node, wide=wide))
        table = _height(console, _table(rows[:1], many=many, wide=wide)) - 1 if rows else 0
        room = console.height - bare - table
        users = min(users, max(0, room - min(len(rows), LEAST_REQUESTS)) // max(1, len(engines)))
        rows = rows[: max(0, console.height - _height(console, _blocks(engines, users, node, wide=wide)) - table)]
    blocks = _blocks(engines, users, node, wide=wide)
    return Group(blocks, _table(rows, many=many, wide=wide)) if rows else blocks


def _height(console: Console, drawn: RenderableType) -> int:
    return len(console.render_lines(drawn, pad=False))


def _requests(engines: Iterable[SeenEngine]) -> Iterator[tuple[str, RequestHolds]]:
    for engine in engines:
        if engine.last is not None:
            for request in engine.last.requests_shown:
                yield engine.last.engine, request


def _blocks(engines: Sequence[SeenEngine], users_max: int, node: SeenNode | None, *, wide: bool) -> Group:
    parts: list[RenderableType] = [Text(time.strftime("kvpipe top  %H:%M:%S"), style="bold"), Text()]
    shown = node is not None and node.is_shown
    if node is not None and shown:
        parts += [*_drawn_node(node, wide=wide), Text()]
    if not engines and not shown:
        parts.append(Text("no engine listens there"))
    for engine in engines:
        parts += [*_drawn(engine, users_max, wide=wide), Text()]
    return Group(*parts)


def _drawn_node(node: SeenNode, *, wide: bool) -> Iterator[RenderableType]:
    """Yield the memory of the node: its holder, a bar for each use of its slots, and its engines."""
    health, late = node.health, f"  no answer for {node.late_s:.1f} s" if node.late_s else ""
    if health is None:
        yield Text.assemble(("● ", "red"), ("node", "bold"), f"  {printable(node.error)}{late}")
        return
    colour = "red" if health.status is None else "yellow" if late else "green"
    yield Text.assemble(("● ", colour), ("node", "bold"), f"  {node_view.head(node.folder, health)}", (late, "yellow"))
    lines = _grid()
    for memory in health.status.memories if health.status is not None else ():
        lines.add_row("  memory", Text(node_view.title(memory)))
        for one in node_view.used(memory):
            lines.add_row("", _bar(one.share, BARS[wide], f" {one.share:.0%} {one.use}, {one.size}"))
        lines.add_row("  chunks", Text(f"{node_view.counted(memory)}, since the holder began"))
        for at, engine in enumerate(memory.clients):
            name, state = node_view.engine_name(engine), node_view.engine_state(engine)
            lines.add_row("  engines" if not at else "", Text.assemble((name, "bold"), f"  {state}"))
            lines.add_row("", Text(node_view.engine_slots(engine, memory.slot_bytes)))
    if health.status is None:
        lines.add_row("", Text(health.remedy))
    elif not health.status.memories:
        lines.add_row("  memory", Text("none yet: the first engine makes it"))
    yield lines


def _grid() -> Table:
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(width=_LABEL_COLUMNS + 2)
    lines.add_column()
    return lines


def _drawn(engine: SeenEngine, users_max: int, *, wide: bool) -> Iterator[RenderableType]:
    state, late = engine.last, f"no answer for {engine.late_s:.1f} s"
    if state is None:
        address = "" if str(engine.address) in engine.error else f"{engine.address}  "
        why = engine.error or (late if engine.late_s else "it was not queried yet")
        yield Text.assemble(("● ", "red"), f"{printable(address)}{printable(why)}")
        return
    since = engine.since
    yield _head(state, since, late if engine.late_s else "")
    lines = _grid()
    bar = BARS[wide]
    for label, text in (
        *_hits(state, since, bar),
        *_pool(state, since, bar),
        ("in flight", _moving(state)),
        *_tiers(state),
        *(_users(engine.holders, state, bar, users_max) if engine.holders is not None else ()),
    ):
        lines.add_row(f"  {label}", text)
    yield lines


def _head(state: EngineState, since: tuple[EngineState, float] | None, late: str) -> Text:
    up = _duration(state.up_s)
    text = f"  up {up}  {state.requests} {'request' if state.requests == 1 else 'requests'}"
    if since is not None:
        text += f"  {(state.step - since[0].step) / since[1]:.0f} steps/s"
    faults = state.traffic.faults
    on = [name for name, is_on in state.switches.model_dump().items() if is_on]
    return Text.assemble(
        ("● ", "yellow" if late else "green"), (printable(state.engine), "bold"), text,
        (f"  {faults} {'fault' if faults == 1 else 'faults'}" if faults else "", "red"),
        (f"  {', '.join(on)}" if on else "", "yellow"), (f"  {late}" if late else "", "yellow"),
    )  # fmt: skip


def _hits(state: EngineState, since: tuple[EngineState, float] | None, bar: int) -> Iterator[tuple[str, Text]]:
    """Yield lines with the sources of prompt tokens, over the last seconds and since the engine's start."""
    hit, missed = state.traffic.hit_tokens, state.traffic.missed_tokens
    when, then = "since it began", ""
    if since is not None:
        lately = _less(hit, since[0].traffic.hit_tokens), _less(missed, since[0].traffic.missed_tokens)
        if any(lately[0].values()) or any(lately[1].values()):
            then = f"; {_percent(sum(hit.values()), sum(hit.values()) + sum(missed.values()))} {when}"
            (hit, missed), when = lately, f"in {since[1]:.0f} s"
    hits, total = sum(hit.values()), sum(hit.values()) + sum(missed.values())
    by_tier = "".join(f", {one}" for one in _shares(hit, total))
    text = f" {_percent(hits, total)} of {total:,} tokens vLLM lacked {when}{by_tier}{then}"
    yield "hits", _bar(hits / max(1, total), bar, text)
    if reasons := _shares(missed, total)[:_REASONS]:
        yield "missed", Text(", ".join(reasons))


def _less(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
    return {name: count - then.get(name, 0) for name, count in now.items()}


def _shares(tokens: dict[str, int], total: int) -> list[str]:
    """Return each name with its share of `total` in percent, the largest share first."""
    named = sorted(((count, name) for name, count in tokens.items() if count > 0), reverse=True)
    return [f"{printable(name)} {_percent(count, total)}" for count, name in named]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _bar(share: float, columns: int, text: str) -> Text:
    full = round(columns * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, "green"), ("░" * (columns - full), "dim"), text)


def _pool(state: EngineState, since: tuple[EngineState, float] | None, bar: int) -> Iterator[tuple[str, Text]]:
    pool = state.pool
    text = f" {_percent(pool.bytes_used, pool.bytes_max)} of {_size(pool.bytes_max)}, {pool.leases} leases"
    if since is not None:
        text += f", {(state.traffic.evicted - since[0].traffic.evicted) / since[1]:.1f} evictions/s"
    yield "pool", _bar(pool.bytes_used / max(1, pool.bytes_max), bar, text)
    for one in sorted(pool.quotas, key=lambda one: one.slots, reverse=True)[:_QUOTAS]:
        sure, most = _percent(one.slots_sure, pool.slots), _percent(one.slots_max, pool.slots)
        text = f" {_percent(one.slots, pool.slots)} {printable(one.name)}, {sure} guaranteed, {most} at most"
        yield "", _bar(one.slots / max(1, pool.slots), bar, text)


def _users(holders: Holders, state: EngineState, bar: int, users_max: int) -> Iterator[tuple[str, Text]]:
    """Yield a line for each user of the pool, the user with most chunks first.

    No line is yielded if the only user has neither a salt nor an adapter.
    """
    shown, slots = holders.tenants_shown[:users_max], max(1, state.pool.slots)
    if not shown or (holders.tenants == 1 and not shown[0].salt_digest and not shown[0].adapter):
        return
    for at, one in enumerate(shown):
        name = printable(one.salt_digest) or "no salt"
        name += f" with {printable(one.adapter)}" if one.adapter else ""
        text = f" {_percent(one.chunks, slots)} {name}, " + (f"{one.held} held" if one.held else _idle(one.idle_s))
        others = holders.tenants - len(shown)
        if at == len(shown) - 1 and others:
            rest = holders.chunks - sum(other.chunks for other in shown)
            text += f"; {others} more {_percent(rest, slots)}"
        line = _bar(one.chunks / slots, bar, text)
        line.no_wrap, line.overflow = True, "ellipsis"
        yield "users" if not at else "", line


def _idle(idle_s: float) -> str:
    return f"idle {_duration(idle_s)}"


def _duration(seconds: float) -> timedelta:
    """Return a duration in whole seconds. Durations above `_SECONDS_MAX` are shown as `_SECONDS_MAX`."""
    return timedelta(seconds=int(min(max(0.0, seconds), _SECONDS_MAX)))


def _moving(state: EngineState) -> Text:
    jobs = state.jobs
    text = f"saves {jobs.saves} ({_size(jobs.save_bytes)}), loads {jobs.loads} ({_size(jobs.load_bytes)})"
    if state.tiers:
        text += f", to and from tiers {jobs.tier_orders} (up to {_size(jobs.tier_bytes_max)})"
    return Text(text)


def _tiers(state: EngineState) -> Iterator[tuple[str, Text]]:
    if state.tiers:
        yield "tiers", Text(printable("  ".join(f"{tier.name} {_how(tier)}" for tier in state.tiers)))


def _how(tier: TierState) -> str:
    if tier.breaker != "CLOSED":
        return f"left alone ({tier.breaker})"
    if tier.left_by_ranks:
        return "not read by a rank"
    read = f" {_size(int(tier.read_bytes_per_s))}/s" if tier.read_bytes_per_s else ""
    return ("slow" if tier.slow else "ok") + read


def _size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def _table(rows: Sequence[tuple[str, RequestHolds]], *, many: bool, wide: bool) -> Table:
    """Return the table of `rows`. `many` means several engines. `wide` means that every column fits on the screen."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("slowest requests", overflow="ellipsis", min_width=16)
    names = ["engine"] * many + ["state"] + ["saving"] * wide
    numbers = ["lived", "prompt", "answer", "saved", *(("leases", "preempted") if wide else ())]
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for engine, row in rows:
        of_row = {
            "engine": engine, "state": f"{row.state} (tiers)" if row.waits_for_tiers else row.state,
            "saving": row.saving, "lived": f"{row.lived_s:.1f} s", "prompt": f"{row.tokens - row.answer_tokens:,}",
            "answer": f"{row.answer_tokens:,}", "saved": f"{row.saved_tokens:,}", "leases": f"{row.chunks_held:,}",
            "preempted": f"{row.preemptions:,}",
        }  # fmt: skip
        table.add_row(Text(printable(row.request)), *(Text(printable(of_row[name])) for name in (*names, *numbers)))
    return table
