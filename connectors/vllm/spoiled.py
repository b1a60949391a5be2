"""Paged blocks that a failed sync load has left with garbage, until somebody has computed them anew.

Of several requests that share such a block vLLM lets the first compute it again and takes it for computed in the
others (`Scheduler._update_requests_with_invalid_blocks`). If the first one is aborted or preempted before, nobody
does, and the others read garbage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Part(NamedTuple):
    """What a step does with one request: positions [start, stop) are computed, those before are read."""

    request: str
    blocks: list[int]
    start: int
    stop: int


class Spoiled:
    """The blocks, by vLLM's numbers, and how many of their first tokens are computed anew. Nearly always empty."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: tokens per block."""
        self._size = block_tokens
        self._clean: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._clean)

    def add(self, blocks: Iterable[int]) -> None:
        """A load into `blocks` has failed."""
        self._clean.update(dict.fromkeys(blocks, 0))

    def discard(self, blocks: Iterable[int]) -> None:
        """Another load fills `blocks`; if it fails they come back."""
        for block in blocks:
            self._clean.pop(block, None)

    def keep(self, held: set[int]) -> None:
        """Forget blocks that nobody holds: their next owner fills them first."""
        self._clean = {block: done for block, done in self._clean.items() if block in held}

    def readers(self, parts: list[Part]) -> dict[str, list[int]]:
        """Note what a step computes; return, by request, the blocks that it would read too early, whole or in part."""
        size, clean = self._size, self._clean
        for part in parts:
            first = part.start // size
            for i, block in enumerate(part.blocks[first : -(-part.stop // size)], first):
                done = clean.get(block)
                if done is not None and part.start <= i * size + done:
                    clean[block] = max(done, min(part.stop - i * size, size))
        read = {
            part.request: [
                block
                for i, block in enumerate(part.blocks[: -(-part.start // size)])
                if clean.get(block, size) < min(part.start - i * size, size)
            ]
            for part in parts
        }
        self.discard([block for block, done in clean.items() if done == size])
        return {request: blocks for request, blocks in read.items() if blocks}
