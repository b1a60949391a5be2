"""Decides whether enough blocks are free for another asynchronous load, so that loads cannot deadlock.

vLLM does not preempt a request that waits for a load, or a request that has not run since its load ended. If each such
request holds some blocks and needs more blocks than are free, the engine is deadlocked. vLLM's own reservation counts
blocks outside of a sliding window as held. The reservation ignores that a request whose load has failed needs all its
blocks again.

vLLM does not preempt a session that waits for its next input, or that is queued behind a request whose load has ended.
So such a session counts as if it had the largest number of tokens that a request may have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from kvpipe.protocol.engine import Blocks, Request
from kvpipe.protocol.geometry import Geometry

STATE_BLOCKS_MAX: Final = 4
"""The largest number of state blocks of one request.

These blocks hold the last state, the next state, a state that is freed later, and a state exported within a step. Each
drafted token needs one more block (`num_speculative_blocks` of vLLM's `MambaManager`). If states are kept within
blocks, one more block is needed, because vLLM copies such a state before it continues to write it.
"""


class LoadAdmission:
    """Computes how many more blocks a request may need, and whether another load fits."""

    def __init__(
        self,
        geometry: Geometry,
        in_flight_tokens_max: int,
        request_tokens_max: int,
        drafts: int = 0,
        reserved_tokens: int = 0,
    ) -> None:
        """Keep the sizes that decide how many blocks a request may need.

        `in_flight_tokens_max` is the largest number of tokens that the steps in flight compute. `request_tokens_max` is
        the largest number of tokens of one request. `drafts` is the number of drafted tokens per step.
        `reserved_tokens` is the number of tokens after a request's last token for which vLLM allocates blocks.
        """
        self._groups, self._in_flight_tokens_max = geometry.groups, in_flight_tokens_max + reserved_tokens
        self._request_tokens_max, self._reserved_tokens = request_tokens_max, reserved_tokens
        self._beside = drafts + bool(geometry.match_tokens)
        self._state_blocks_max = STATE_BLOCKS_MAX + self._beside

    def fits(self, request: Request, waiting: Iterable[Request], blocks: Blocks) -> bool:
        """Whether enough blocks are free to compute `request` and all `waiting` requests."""
        others = sum(self.needed(one, blocks) for one in waiting if one is not request)
        return others == 0 or others + self.needed(request, blocks) <= blocks.free()

    def needed(self, request: Request, blocks: Blocks) -> int:
        """Return how many more blocks `request` may need until all its tokens are computed."""
        own = self._request_tokens_max if request.resumable else request.num_tokens
        needed, reserved = 0, min(own + self._reserved_tokens, self._request_tokens_max)
        for i, group in enumerate(self._groups):
            table = blocks.table(request.request_id, i)
            if group.state:  # count blocks anywhere in the table, because the blocks of states need not be adjacent
                held = sum(1 for block in table if not block.is_null)
                more = -(-own // group.block_tokens) + self._beside - len(table)
                needed += max(0, min(more, self._state_blocks_max - held))
                continue
            more = -(-reserved // group.block_tokens) - len(table)
            if group.window_tokens is not None:  # the window and the tokens in flight, at any alignment
                most = -(-(group.window_tokens - 1 + self._in_flight_tokens_max) // group.block_tokens) + 1
                held = sum(1 for _ in itertools.takewhile(lambda block: not block.is_null, reversed(table)))
                more = min(more, most - held)
            needed += max(0, more)
        return needed
