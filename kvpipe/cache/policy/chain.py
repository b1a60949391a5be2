"""A chain: chunks that follow each other, with no branch between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.policy.large import untracked

NOTHING: Final[set[Evictable]] = set()  # an empty set, never changed: `held` of each chain without held chunks
NONE: Final = -1  # `number` of each chain without chunks in memory; no chunk's `place` is -1


class Chain:
    """A chain. `stack` has its chunks in the order of the prefix. Some of these chunks may be held or dropped."""

    __slots__ = (
        "answer", "before", "ended_s", "free", "head", "held", "hint", "hinted", "hinted_s", "kind", "learnt_kept",
        "learnt_kind", "lru_kept", "number", "orphan", "pace", "paced", "run", "shared", "stack", "used_s",
    )  # fmt: skip

    def __init__(self, head: Hashable, before: Hashable, now_s: float, *, orphan: bool) -> None:
        """Start without chunks. The first chunk will be `head`, which follows `before`.

        `orphan` says that `before` is not in memory. Lookups find no chunk of an orphan.
        """
        self.head, self.before, self.orphan = head, before, orphan
        self.stack: list[Evictable] = []
        self.held = NOTHING
        self.free = 0  # the number of the chain's chunks that may be evicted
        self.number = NONE  # the `place` of all chunks of this chain that are in memory, held or not
        self.shared = False  # whether several prompts continue the chain differently
        self.pace: float | None = None
        self.kind = self.paced = 0  # `kind` decides the chain's worth; `paced` is the kind by pace when the wait began
        self.answer = 0  # the class of the last answer (`answer_class`)
        self.run = 0  # the number of the chain's run in `Recency`
        # set by the shadows of a `Duel`: numbers of kept chunks, and the chain's kind
        self.lru_kept = self.learnt_kept = self.learnt_kind = 0
        self.used_s = now_s
        self.hint: Hint | None = None  # the hint on the chain's present or next wait
        self.hinted, self.hinted_s = 0, now_s  # the kind of the hint (0: no hint), and the time of its arrival
        self.ended_s: float | None = None  # the time when the chain's wait began; None: a request uses the chain
        untracked(self)
        untracked(self.stack)

    def push(self, chunk: Evictable) -> None:
        """Append a new chunk. A chunk whose key is from the middle of the chain is inserted before the last chunk."""
        stack = self.stack
        if stack and stack[-1].identity not in (chunk.before, chunk.identity):
            stack.insert(-1, chunk)
        else:
            stack.append(chunk)

    def reorder(self, chunks: list[Evictable]) -> None:
        """Put `chunks`, which may be evicted, in this order. Held chunks keep their positions.

        The chain's other evictable chunks follow `chunks`.
        """
        if len(chunks) < len(self.stack):
            free = {one: None for one in self.stack if one not in self.held and one.place == self.number}
            following = iter(dict.fromkeys((*chunks, *free)))
            chunks = [next(following) if one in free else one for one in self.stack]
        self.stack = chunks
        untracked(chunks)


def by_chain(chunks: Sequence[Evictable], chains: Sequence[Chain | None]) -> dict[Chain, list[Evictable]]:
    """Return, by chain, those of `chunks` that belong to the chain, in their order.

    The first chunk of a prefix comes first. `chains[chunk.place]` is the chain of a chunk, or None if the policy does
    not know the chunk.
    """
    runs, at, many = dict[Chain, list[Evictable]](), 0, len(chunks)
    while at < many:
        chunk = chunks[at]
        chain = chains[chunk.place]
        at += 1
        if chain is None:
            continue
        stack = chain.stack
        size = len(stack)
        if chain in runs:
            runs[chain].append(chunk)
        elif stack[0] is chunk and size > 1 and size == chain.free + len(chain.held):
            run = runs[chain] = [*chunks[at - 1 : at - 1 + size]]
            if run == stack[: len(run)]:  # true if the next chunks are the chain's beginning or the whole chain
                at += len(run) - 1
            else:
                runs[chain] = [chunk]
        else:
            runs[chain] = [chunk]
    return runs
