"""A chain: chunks that follow each other, with no branch between them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from kvpipe.cache.hints import Hint
from kvpipe.cache.large import untracked
from kvpipe.cache.policy.base import Evictable

NOTHING: Final[set[Evictable]] = set()  # is held of a chain; nothing is ever put in
NONE: Final = -1  # is the number of a chain of which nothing is there: no chunk has it as its place


class Chain:
    """A run of chunks. `stack`: in the order of the prefix; some may be held, or gone."""

    __slots__ = (
        "answer", "before", "ended_s", "free", "head", "held", "hint", "hinted", "hinted_s", "kind", "learnt_kept",
        "learnt_kind", "lru_kept", "number", "orphan", "pace", "paced", "run", "shared", "stack", "used_s",
    )  # fmt: skip

    def __init__(self, head: Hashable, before: Hashable, now_s: float, *, orphan: bool) -> None:
        """`before`: what its first chunk, `head`, follows. An `orphan` follows what is not there: nobody finds it."""
        self.head, self.before, self.orphan = head, before, orphan
        self.stack: list[Evictable] = []
        self.held = NOTHING
        self.free = 0  # how many may go
        self.number = NONE  # the place of its chunks that are there, held or not
        self.shared = False  # prompts have gone on differently behind it
        self.pace: float | None = None
        self.kind = self.paced = 0  # by which it is valued; and by its pace when it began to wait
        self.answer = 0  # the class of the last one (`answer_class`)
        self.run = 0  # where it is among others, by their last use
        self.lru_kept = self.learnt_kept = self.learnt_kind = 0  # in a duel's shadows
        self.used_s = now_s
        self.hint: Hint | None = None  # of the wait it is in, or of the next one
        self.hinted, self.hinted_s = 0, now_s  # the kind by its hint, and since when; 0: no hint
        self.ended_s: float | None = None  # since when it waits; None: a request uses it
        untracked(self)
        untracked(self.stack)

    def push(self, chunk: Evictable) -> None:
        """Put a new chunk on its end. One that holds what is in the middle does not become the end."""
        stack = self.stack
        if stack and stack[-1].identity not in (chunk.before, chunk.identity):
            stack.insert(-1, chunk)
        else:
            stack.append(chunk)

    def reorder(self, chunks: list[Evictable]) -> None:
        """Put `chunks`, which may go, in this order. What is held keeps its place; behind `chunks` comes the rest."""
        if len(chunks) < len(self.stack):
            free = {one: None for one in self.stack if one not in self.held and one.place == self.number}
            following = iter(dict.fromkeys((*chunks, *free)))
            chunks = [next(following) if one in free else one for one in self.stack]
        self.stack = chunks
        untracked(chunks)


def by_chain(chunks: Sequence[Evictable], chains: Sequence[Chain | None]) -> dict[Chain, list[Evictable]]:
    """Return those of `chunks`, the first of a prefix first, that are known, by their chains, each as they come.

    `chains`: by the place of their chunks; None: these are not known.
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
            if run == stack[: len(run)]:  # its beginning, or all of it
                at += len(run) - 1
            else:
                runs[chain] = [chunk]
        else:
            runs[chain] = [chunk]
    return runs
