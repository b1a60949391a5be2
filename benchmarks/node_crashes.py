"""Kills and stops engines and holders of a node's memory at random: `python -m benchmarks.node_crashes [COUNT]`.

Every engine checks every byte that the engine reads under a lease. At the end each slot is free, published with the
right bytes, or in a living engine's stock.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

from kvpipe.statemachine import node_grant, node_link
from tests.rigs.node_processes import DYING_STEPS, EngineProcess, NodeProcesses, processes

ENGINES: Final = 3
DEATHS: Final = (node_link.WELCOME, node_link.ANSWER, node_grant.TAKE, node_grant.LANDED, node_grant.DONE)
PAUSE_S_MAX: Final = 0.3


class CrashRun:
    """A run of random deaths."""

    def __init__(self, node: NodeProcesses, seed: int) -> None:
        self.node, self.chance, self.done = node, random.Random(seed), Counter[str]()
        self.stopped: list[tuple[float, EngineProcess]] = []
        self.save_s_max = 0.0
        self._seed = seed

    def refill(self) -> None:
        """Replace dead engines. Every second new engine will kill itself at a transition."""
        for engine in [one for one in self.node.engines if not one.process.is_alive()]:
            assert self.node.ended(engine) == -signal.SIGKILL, "an engine has read bytes of another chunk"
            self.done["engine died at a transition"] += 1
        while len(self.node.engines) < ENGINES:
            self._seed += 1
            die = f"{self.chance.choice(DEATHS)}:{self.chance.randint(1, 40)}" if self._seed % 2 else ""
            self.node.start(self._seed, die=die)

    def hurt(self) -> None:
        """Kill or stop one process."""
        what = self.chance.choice(["kill", "kill", "stop", "holder", "holder", "stop holder"])
        if "holder" in what:
            holder = self.node.holder()
            if holder:
                os.kill(holder, signal.SIGSTOP if what == "stop holder" else signal.SIGKILL)
                self.done[what] += 1
            return
        healthy = [one for one in self.node.engines if one not in [stopped for _, stopped in self.stopped]]
        if not healthy:
            return
        victim = self.chance.choice(healthy)
        if not victim.process.is_alive():
            return
        self.done[what] += 1
        if what == "kill":
            self.node.kill(victim)
        else:
            os.kill(victim.pid, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + self.chance.uniform(0, 3), victim))

    def proceed(self) -> None:
        """Run the observer for a while, and continue the stopped engines whose pause is over."""
        observer = self.node.observer
        assert observer is not None
        end = time.monotonic() + self.chance.uniform(0, PAUSE_S_MAX)
        self.node.observing("pause", lambda: time.monotonic() > end)
        for at, engine in list(self.stopped):
            if at < time.monotonic() or not engine.process.is_alive():
                self.stopped.remove((at, engine))
                if engine.process.is_alive():
                    os.kill(engine.pid, signal.SIGCONT)

    def run(self, count: int) -> None:
        """Kill and stop processes until `count` processes were killed or stopped."""
        while self.done.total() < count:
            self.refill()
            self.proceed()
            self.hurt()
            if self.done.total() % 10 == 0:
                self.node.saves_on(1)


def dying_holders(seed: int) -> int:
    """Kill one holder at each of `DYING_STEPS`. Returns the number of killed holders.

    A `set…` step kills at the first call. Any other step kills at a random call from the 2nd to the 60th.
    """
    chance = random.Random(seed)
    for step in DYING_STEPS:
        with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as node:
            node.hold(step, 1 if step.startswith("set") else chance.randint(2, 60))
            node.observe()
            node.observing("death", lambda node=node: not node.holders[0].is_alive())
            node.saves_on()
            node.rest()
    return len(DYING_STEPS)


def main(count: int = 500, seed: int = 1) -> int:
    """Run the random deaths, and print their numbers and what the observer has seen."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as node:
        observer = node.observe()
        run = CrashRun(node, seed)
        run.run(count)
        for _, engine in run.stopped:
            os.kill(engine.pid, signal.SIGCONT)
        node.rest()
        figures = {
            **run.done, "saved": observer.saved, "hits": observer.hits, "wrong bytes": observer.wrong, "lost slots": 0,
            "longest poll of the observer, ms": round(observer.poll_s_max * 1e3, 1),
        }  # fmt: skip
    figures["holder died within a transition"] = dying_holders(seed)
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
