"""Whether there is room for another asynchronous load, so that none waits for another's blocks for ever.

vLLM preempts nobody who waits for a load, or whose load has ended and who has not run since. If each of those holds
some blocks and needs more than are left, nothing runs ever again. vLLM's own reservation takes blocks outside of a
sliding window for held, and does not count that a request whose load has failed needs all its blocks once more.

Nor does vLLM preempt a session that waits for its next input, or for its turn behind one whose load has ended: such a
request counts as long as it can become.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from kvpipe.geometry import Geometry
from kvpipe.scheduler.base import Blocks, Request

STATE_BLOCKS_MAX: Final = 4
"""State blocks of one request: the last state and the next, one that is given back later, one exported within a step.

With drafts one more for each of them: `num_speculative_blocks` of vLLM's `MambaManager`. Where states are kept within
their blocks, one more into which such a one is copied before it is written on.
"""


class LoadAdmission:
    """Computes how many blocks a request may still take, and whether another load fits."""

    def __init__(
        self,
        geometry: Geometry,
        in_flight_tokens_max: int,
        request_tokens_max: int,
        drafts: int = 0,
        reserved_tokens: int = 0,
    ) -> None:
        """`in_flight_tokens_max`: the most tokens that steps in flight compute. `request_tokens_max`: of one request.

        `drafts`: drafted tokens per step. `reserved_tokens`: after a request's last token, for which vLLM takes blocks.
        """
        self._groups, self._in_flight_tokens_max = geometry.groups, in_flight_tokens_max + reserved_tokens
        self._request_tokens_max, self._reserved_tokens = request_tokens_max, reserved_tokens
        self._beside = drafts + bool(geometry.match_tokens)
        self._state_blocks_max = STATE_BLOCKS_MAX + self._beside

    def fits(self, request: Request, waiting: Iterable[Request], blocks: Blocks) -> bool:
        """Whether there are enough free blocks for `request` and for all `waiting` requests, until they have run."""
        others = sum(self.needed(one, blocks) for one in waiting if one is not request)
        return others == 0 or others + self.needed(request, blocks) <= blocks.free()

    def needed(self, request: Request, blocks: Blocks) -> int:
        """Return how many more blocks `request` may take until all its tokens are computed."""
        own = self._request_tokens_max if request.resumable else request.num_tokens
        needed, reserved = 0, min(own + self._reserved_tokens, self._request_tokens_max)
        for i, group in enumerate(self._groups):
            table = blocks.table(request.request_id, i)
            if group.state:  # what it holds and what it goes on with, wherever in the table
                held = sum(1 for block in table if not block.is_null)
                more = -(-own // group.block_tokens) + self._beside - len(table)
                needed += max(0, min(more, self._state_blocks_max - held))
                continue
            more = -(-reserved // group.block_tokens) - len(table)
            if group.window_tokens is not None:  # what it reads and what is in flight, at any alignment
                most = -(-(group.window_tokens - 1 + self._in_flight_tokens_max) // group.block_tokens) + 1
                held = sum(1 for _ in itertools.takewhile(lambda block: not block.is_null, reversed(table)))
                more = min(more, most - held)
            needed += max(0, more)
        return needed
