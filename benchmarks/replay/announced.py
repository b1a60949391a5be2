"""Measures the gain from prefetching: clients announce when they will resume, and the scheduler side prefetches.

Each replay is compared with a replay of the same requests, memory, tiers and policy without announcements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, Final, NamedTuple

from benchmarks.replay import hints
from benchmarks.replay.engine import Engine
from benchmarks.replay.report import AGENTS, Row, load_of, percent
from benchmarks.replay.setting import Setting

SHARES: Final = (0.02, 0.05)
"""The sizes of memory, as shares of the workload's number of different chunks."""
BEHIND: Final = ("disk", "network", "disk, network")
HEADS: Final = (
    "memory, tiers, policy", "announced", "draws", "mean TTFT s", "of that without", "95 % s", "of that without",
    "chunks fetched ahead", "of use", "GB read more",
)  # fmt: skip
_SAME: Final = ("workload", "seed", "host", "behind", "policy")


class Announced(NamedTuple):
    """One replay of the whole scheduler side. `host` is the share of all chunks that fits into memory.

    `announced` and `sigma` are the model and the error of the announcements (`hints.py`).
    """

    workload: str
    seed: int
    host: float
    behind: str
    policy: str
    announced: str
    sigma: float
    setting: Setting = Setting()

    def row(self) -> Row:
        """Replay the requests, and return the result. In the result, `read` is the number of bytes from all tiers."""
        load, setting = load_of(self.workload, self.seed), self.setting
        pauses_s = hints.pauses(load, self.announced, self.sigma, setting.model.answer_s_per_token)
        host = replace(setting.host(load), slots=load.slots(self.host))
        tiers = setting.stores(self.behind, load)
        out = Engine(load, self.policy, model=setting.model, host=host, tiers=tiers, pauses_s=pauses_s).run()
        assert not out.faults, out.faults
        whole = {name: value for name, value in self._asdict().items() if name != "setting"}
        return whole | {
            "requests": out.requests,
            "shares": out.shares,
            "ttft_s": {str(point): out.ttft(point) for point in (0.5, 0.95)},
            "ttft_s_mean": mean(out.ttft_s),
            "prefetched": out.stats.get("chunks_prefetched", 0),
            "used": out.stats.get("prefetch_used", 0),
            "read": sum(out.moved[f"{tier.name} to memory"] for tier in tiers),
        }


def cases(
    policies: Iterable[str], seeds: int, announced: Iterable[str], sigma: float, shares: Sequence[float],
    setting: Setting,
) -> list[Announced]:  # fmt: skip
    """Return the replays of coding agents. The `sigma` of a replay without announcements is 0."""
    each = [(one, 0.0 if one == hints.NONE else sigma) for one in dict.fromkeys((hints.NONE, *announced))]
    all_ = itertools.product(range(seeds), shares, BEHIND, policies, each)
    return [Announced(AGENTS, seed, host, behind, policy, *how, setting) for seed, host, behind, policy, how in all_]


def table(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows below `HEADS`. Each value is a mean over the seeds. A ratio is the mean of the seeds' ratios."""
    rows: list[Row] = found.get("prefetch", [])
    plain = {_same(row): row for row in rows if row["announced"] == hints.NONE}
    by = dict[tuple[Any, ...], list[tuple[Row, Row]]]()
    for row in rows:
        if row["announced"] != hints.NONE and _same(row) in plain:
            key = row["host"], row["behind"], row["policy"], row["announced"], row["sigma"]
            by.setdefault(key, []).append((row, plain[_same(row)]))
    for (host, behind, policy, announced, sigma), pairs in sorted(by.items()):
        late = [(one["ttft_s"]["0.95"], without["ttft_s"]["0.95"]) for one, without in pairs]
        yield (
            f"{percent(host)}, {behind}, {policy}",
            f"{announced}, sigma {sigma:g}" if announced != hints.DEAD else "only what never comes",
            str(len(pairs)),
            f"{mean(one['ttft_s_mean'] for one, _ in pairs):.3f}",
            f"{mean(one['ttft_s_mean'] / without['ttft_s_mean'] for one, without in pairs):.3f}",
            f"{mean(ours for ours, _ in late):.3f}",
            f"{mean(ours / theirs for ours, theirs in late):.3f}",
            f"{mean(one['prefetched'] for one, _ in pairs):,.0f}",
            f"{sum(one['used'] for one, _ in pairs) / max(1, sum(one['prefetched'] for one, _ in pairs)):.0%}",
            f"{mean(one['read'] - without['read'] for one, without in pairs) / 1e9:,.0f}",
        )


def _same(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SAME)
