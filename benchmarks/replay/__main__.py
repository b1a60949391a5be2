"""`python -m benchmarks.replay`: token hit rates of every policy, at every capacity, and their time per request."""

from __future__ import annotations

import argparse
import sys
from statistics import mean

from benchmarks.replay import workload as w
from benchmarks.replay.replay import BELADY, SHARES, policies, replay


def main(arguments: list[str]) -> int:
    """Print a line per policy as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--policy", nargs="*", default=[*policies(), BELADY], help="default: all, and Belady's")
    parser.add_argument("--share", nargs="*", type=float, default=SHARES, help="of all different chunks")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--shared-system", action="store_true")
    parser.add_argument("--mooncake", action="store_true")
    options = parser.parse_args(arguments)
    loads = (
        [w.mooncake()]
        if options.mooncake
        else [w.coding_agents(seed, shared_system=options.shared_system) for seed in range(options.seeds)]
    )
    print(loads[0].name, f"{mean(len(load.prompts) for load in loads):.0f} requests, capacity {options.share}")
    for policy in options.policy:
        outcomes = [[replay(load, policy, share) for load in loads] for share in options.share]
        rates = "  ".join(f"{mean(one.hit_rate for one in some):.3f}" for some in outcomes)
        print(
            f"{policy:16} {rates}   {mean(one.microseconds for some in outcomes for one in some):.0f} us per request",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
