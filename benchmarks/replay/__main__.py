"""`python -m benchmarks.replay` replays all policies and Belady's optimum at all capacities, then memory and tiers.

The results are written to `docs/results/traces.json`, and drawn on a page and in a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay import announced, hints, page, report
from benchmarks.replay.replay import BELADY, SHARES, policies
from benchmarks.replay.setting import PARTS, Setting


def main(arguments: list[str]) -> int:
    """Run the replays, print each result as soon as the replay ends, and print the tables at the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument(
        "--policy", nargs="*", default=[*policies(), BELADY], help="replay these; others stay as they are"
    )
    parser.add_argument("--workload", nargs="*", default=[report.AGENTS, report.SHARED, report.MOONCAKE])
    parser.add_argument("--hints", nargs="*", default=[], choices=hints.MODELS, help="replay policies that take hints")
    parser.add_argument(
        "--announce", nargs="*", default=[], choices=hints.MODELS, help="replay with tiers: clients announce resumes"
    )
    parser.add_argument("--sigma", type=float, default=0.7, help="of the logarithm of the pauses that are hinted at")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0, help="replays at once; default: as many as there are cores")
    parser.add_argument(
        "--share",
        type=_share,
        nargs="+",
        default=None,
        help="of all chunks: capacities, for the catalog alone or with --announce",
    )
    for part in PARTS:
        parser.add_argument(
            f"--{part}", nargs="+", default=[], metavar="NAME=NUMBER", help=f"with tiers: set these of {part}"
        )
    parser.add_argument("--json", type=Path, default=report.RESULTS, help="a file has one set of parameters")
    parser.add_argument("--page", action="store_true", help="replay nothing")
    options = parser.parse_args(arguments)
    setting = Setting()
    try:
        for part in PARTS:
            setting = setting.with_set(part, getattr(options, part))
        if not options.page:
            report.check_file(options.json, setting)
    except ValueError as error:
        parser.error(str(error))
    todo = [one for one in _cases(options, setting) if one.workload in options.workload]
    for row in () if options.page else report.measure(todo, options.jobs):
        _print(row)
        report.keep([row], options.json, setting)
    found = json.loads(options.json.read_text(encoding="utf-8"))
    report.show(found)
    page.write(found, options.json)
    return 0


def _cases(options: argparse.Namespace, setting: Setting) -> Sequence[report.Case]:
    if options.announce:
        policies = [name for name in options.policy if name != BELADY]
        shares = options.share or announced.SHARES
        return announced.cases(policies, options.seeds, options.announce, options.sigma, shares, setting)
    shares = options.share or SHARES
    if options.hints:
        return report.hinted(options.policy, options.seeds, options.hints, options.sigma, shares)
    return report.cases(options.policy, options.seeds, shares, setting)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("expected a share above 0, of 1 at most")
    return share


def _print(row: dict[str, Any]) -> None:
    rate = row["hit_rate"] if "share" in row else 1 - row["shares"]["computed"]
    share = row["share"] if "share" in row else row["host"]
    where = " ".join(str(row[name]) for name in ("behind", "hints", "announced") if row.get(name))
    place = f"{report.percent(share)} {where}"
    print(f"{row['workload']}, seed {row['seed']}, {place}, {row['policy']}: {rate:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
