"""The list of all replays, their results as JSON, and the tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.replay import workload as w
from benchmarks.replay.engine import Engine
from benchmarks.replay.replay import BELADY, SHARES, replay
from benchmarks.replay.setting import Setting
from benchmarks.report import Figure, write
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy.guard import takes_hints

RESULTS: Final = Path(__file__).parents[2] / "docs" / "results" / "traces.json"
AGENTS, SHARED, MOONCAKE = "coding agents", "coding agents, system prompts shared", "Mooncake's conversations"
ANSWERING: Final = "coding agents, answers take time"
NONE: Final = "none"
"""The policy's name of an engine without kvpipe."""
CPU_S_MAX: Final = 60.0
"""The goal for the processor time of one core, in seconds, for a replay of all `RECORDED` requests."""
RECORDED: Final = 23_041
DEFAULT: Final = Setting()
POINTS: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
Row = dict[str, Any]


@cache
def load_of(name: str, seed: int) -> w.Workload:
    """Return a workload by its name. `seed` does not affect Mooncake's workload."""
    if name == MOONCAKE:
        return w.mooncake()
    answer_s = w.ANSWER_S_PER_TOKEN if name == ANSWERING else 0.0
    return w.coding_agents(seed, shared_system=name == SHARED, answer_s_per_token=answer_s)


class Yardstick(NamedTuple):
    """One replay of the catalog alone, with a pool for `share` of all chunks."""

    workload: str
    seed: int
    share: float
    policy: str

    def row(self) -> Row:
        """Replay, and return the result."""
        out = replay(load_of(self.workload, self.seed), self.policy, self.share)
        more = {
            "hit_rate": out.hit_rate,
            "requests": len(out.hits),
            "slots": out.slots,
            "us_per_request": out.microseconds,
        }
        return self._asdict() | more


class Hinted(NamedTuple):
    """One replay of the catalog alone, with clients that hint when they resume.

    `hints` is the model of the hints (`hints.py`). `sigma` is the hints' error.
    """

    workload: str
    seed: int
    share: float
    policy: str
    hints: str
    sigma: float

    def row(self) -> Row:
        """Replay, and return the result."""
        out = replay(load_of(self.workload, self.seed), self.policy, self.share, self.hints, self.sigma)
        return self._asdict() | {"hit_rate": out.hit_rate, "requests": len(out.hits), "slots": out.slots}


class Tiered(NamedTuple):
    """One replay of the whole scheduler side, with memory and the tiers `behind` it.

    `setting` has the parameters of memory and tiers.
    """

    workload: str
    seed: int
    behind: str
    policy: str
    setting: Setting = Setting()

    def row(self) -> Row:
        """Replay, and return the result."""
        load, setting = load_of(self.workload, self.seed), self.setting
        host, policy, share = setting.host(load), self.policy, setting.memory.share
        if policy == NONE:
            host, policy, share = replace(host, slots=0), "lru", 0.0
        out = Engine(load, policy, model=setting.model, host=host, tiers=setting.stores(self.behind, load)).run()
        assert not out.faults, out.faults
        return {
            "workload": self.workload,
            "seed": self.seed,
            "host": share,
            "behind": self.behind,
            "policy": self.policy,
            "requests": out.requests,
            "shares": out.shares,
            "ttft_s": {str(point): out.ttft(point) for point in POINTS},
            "ttft_s_mean": mean(out.ttft_s),
            "moved": out.moved,
            "us_per_request": out.scheduler_s / out.requests * 1e6,
            "ended_at_h": out.ended_at_s / 3600,
        }


def cases(
    policies: Iterable[str], seeds: int, shares: Sequence[float] = SHARES, setting: Setting = DEFAULT
) -> list[Yardstick | Tiered]:
    """Return all replays: first of the catalog alone, for each of `shares`, then of the scheduler side by `setting`."""
    names, out = list(policies), list[Yardstick | Tiered]()
    for name in (AGENTS, ANSWERING, SHARED):
        out += [Yardstick(name, seed, share, one) for seed in range(seeds) for share in shares for one in names]
    out += [Yardstick(MOONCAKE, 0, share, one) for share in shares for one in names]
    kvpipe = [one for one in names if one != BELADY]
    for name in (AGENTS, MOONCAKE):
        out += [Tiered(name, 0, "", one, setting) for one in kvpipe]
        if "lru" in kvpipe:
            out += [Tiered(name, 0, behind, "lru", setting) for behind in ("disk", "network", "disk, network")]
            out.append(Tiered(name, 0, "", NONE, setting))
    return out


def hinted(
    policies: Iterable[str], seeds: int, models: Iterable[str], sigma: float, shares: Sequence[float] = SHARES
) -> list[Hinted]:
    """Return the replays of coding agents with hints, for each of `policies` that uses hints."""
    takes = [one for one in policies if one != BELADY and takes_hints(make_policy(one, 1))]
    models = list(models)
    return [
        Hinted(AGENTS, seed, share, one, model, sigma)
        for seed in range(seeds)
        for share in shares
        for one in takes
        for model in models
    ]


def percent(share: float) -> str:
    """Return a share as percent, in the tables' format."""
    return f"{100 * share:g}%"


class Case(Protocol):
    """One replay."""

    @property
    def workload(self) -> str:
        """The name of the replay's workload."""

    def row(self) -> Row:
        """Replay, and return the result."""


def measure(todo: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Run all replays, `jobs` of them in parallel, each in its own process, and yield each result."""
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_row, todo)


def _row(case: Case) -> Row:
    return case.row()


_CASE: Final = ("share", "host", "behind", "hints", "sigma", "announced")
_PARTS: Final = ("yardstick", "hinted", "tiers", "prefetch")


def _key(row: Row) -> str:
    named = [row[name] for name in ("workload", "seed", "policy")]
    return json.dumps(named + [row.get(name) for name in _CASE])


def _part(row: Row) -> str:
    """Return the part of the file to which a replay's result belongs."""
    if "announced" in row:
        return "prefetch"
    return "hinted" if "hints" in row else "yardstick" if "share" in row else "tiers"


def check_file(path: Path, setting: Setting) -> None:
    """Raise ValueError if the rows of a file have other parameters. All rows of a file have equal parameters."""
    if path.exists() or path == RESULTS:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        there = found.get("model", asdict(DEFAULT.model)), found.get("places", DEFAULT.places())
        if there != (asdict(setting.model), setting.places()):
            raise ValueError(f"{path} is of other parameters: name another file with --json")


def keep(rows: list[Row], path: Path = RESULTS, setting: Setting = DEFAULT) -> dict[str, Any]:
    """Write results into the file, and keep the file's results of other cases. Returns the file's content."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = [row for part in _PARTS for row in before.get(part, ())]
    parts: dict[str, list[Row]] = {part: [] for part in _PARTS}
    for row in {_key(row): row for row in (*kept, *rows)}.values():
        parts[_part(row)].append(row)
    write(
        figures(parts["yardstick"], parts["tiers"]), path, model=asdict(setting.model), places=setting.places(), **parts
    )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rates(yardstick: list[Row], workload: str) -> dict[str, dict[float, float]]:
    """Return the mean hit rate over all seeds, by policy and capacity. Belady's policy comes last."""
    rows = [row for row in yardstick if row["workload"] == workload]
    names = sorted({row["policy"] for row in rows}, key=lambda name: (name == BELADY, name))
    return {
        name: {
            share: mean(row["hit_rate"] for row in rows if (row["policy"], row["share"]) == (name, share))
            for share in sorted({row["share"] for row in rows if row["policy"] == name})
        }
        for name in names
    }


def hinted_rates(found: dict[str, Any]) -> dict[str, dict[float, float]]:
    """Return the mean hit rate over all seeds, by policy and kind of hints, and by capacity."""
    out = dict[str, dict[float, list[float]]]()
    for row in found.get("hinted", ()):
        name = f"{row['policy']}, hints: {row['hints']}, sigma {row['sigma']:g}"
        out.setdefault(name, {}).setdefault(row["share"], []).append(row["hit_rate"])
    return {name: {share: mean(some[share]) for share in sorted(some)} for name, some in out.items()}


def figures(yardstick: list[Row], tiers: list[Row]) -> list[Figure]:
    """Return the ratio of each policy's hit rate to Belady's, and the processor time for all recorded requests."""
    out = []
    for workload in dict.fromkeys(row["workload"] for row in yardstick):
        by = rates(yardstick, workload)
        best = by.get(BELADY, {})
        for name, some in by.items():
            for share, rate in some.items():
                if name != BELADY and share in best:
                    title, beside = f"{workload}, {percent(share)}: {name}", f"{rate:.1%} of all tokens"
                    out.append(Figure(title, rate / best[share], 0, "of Belady's", beside, at_least=True))
    for rows, what in ((yardstick, "catalog"), (tiers, "scheduler side")):
        mine = [row for row in rows if row["policy"] not in {BELADY, NONE}]
        if mine:
            worst = max(mine, key=lambda row: float(row["us_per_request"]))
            seconds = worst["us_per_request"] * RECORDED / 1e6
            beside = f"{worst['us_per_request']:.0f} us per request, at most: {worst['policy']}, {worst['workload']}"
            out.append(Figure(f"{what}: all {RECORDED} requests", seconds, CPU_S_MAX, "s of one core", beside))
    return out


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=132)
    for workload in dict.fromkeys(row["workload"] for row in found["yardstick"]):
        by = rates(found["yardstick"], workload)
        best = by.get(BELADY, {})
        table = Table(title=f"{workload}: share of all tokens that hit (of Belady's)", box=box.SIMPLE_HEAD)
        table.add_column("policy")
        shares = sorted({share for some in by.values() for share in some})
        for share in shares:
            table.add_column(f"{percent(share)} of chunks", justify="right")
        for name, some in by.items():
            cells = [
                f"{some[share]:.3f}" + (f" ({some[share] / best[share]:.2f})" if share in best else "")
                if share in some
                else ""
                for share in shares
            ]
            table.add_row(name, *cells)
        console.print(table)
    for hinted, some in hinted_rates(found).items():
        rates_of = ", ".join(f"{percent(share)}: {rate:.3f}" for share, rate in some.items())
        console.print(f"coding agents, {hinted}: {rates_of}")
    table = Table(title="The whole scheduler side, in virtual time", box=box.SIMPLE_HEAD)
    for heading in (
        "workload",
        "memory",
        "behind it",
        "policy",
        "tokens from",
        "TTFT s 50/90/99 %",
        "GB moved",
        "us/request",
    ):
        table.add_column(heading)
    for row in found["tiers"]:
        parts = ", ".join(f"{where} {share:.1%}" for where, share in row["shares"].items())
        ttft = " / ".join(f"{row['ttft_s'][point]:.2f}" for point in ("0.5", "0.9", "0.99"))
        moved = sum(row["moved"].values()) / 1e9
        table.add_row(
            row["workload"], percent(row["host"]), row["behind"], row["policy"], parts, ttft, f"{moved:.0f}",
            f"{row['us_per_request']:.0f}",
        )  # fmt: skip
    console.print(table)
