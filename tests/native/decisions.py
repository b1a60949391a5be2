"""A script that prints a digest of all that the policy `sessions` lets go, and hits, in replays of recorded traces."""

from __future__ import annotations

import hashlib

from benchmarks.replay import hints, workload
from benchmarks.replay.replay import Pool
from kvpipe.cache.catalog import Chunk
from kvpipe.cache.policy import make_policy
from kvpipe.cache.policy import sessions as policy


def decisions(trace: workload.Workload, share: float, hinted: str = hints.NONE, tick_s: float = 0.0) -> str:
    """Replay a trace with a pool of `share` of its chunks. `hinted`, `tick_s`: as of `replay`."""
    slots, digest, gone = trace.slots(share), hashlib.sha256(), 0
    pool = Pool(trace.chunk_tokens, slots, make_policy("sessions", slots), tick_s)

    def dropped(chunk: Chunk) -> None:
        nonlocal gone
        gone += 1
        digest.update(chunk.identity)

    pool.catalog.on_drop = dropped
    for prompt, hint in zip(trace.prompts, hints.hints(trace, hinted, 0.7), strict=True):
        digest.update(pool.serve(prompt, hint).to_bytes(4))
    return f"{digest.hexdigest()} {gone}"


def main() -> None:
    """Print one line each, the first one says which file the policy is of."""
    print(policy.__file__)
    chats, agents = workload.mooncake(), workload.coding_agents(0, sessions=60, hours=2)
    for share in (0.01, 0.05):
        print("Mooncake's", share, decisions(chats, share, tick_s=0.001))
    for hinted in ("resume", "turned"):
        print("agents", hinted, decisions(agents, 0.02, hinted, tick_s=0.001))


if __name__ == "__main__":
    main()
