"""Keeps the prefixes that will be used again soonest, for sessions that pause and continue, each at its own pace.

Chunks are in *chains*: runs of chunks that follow each other, with no branch between them. A chain is evicted from its
end, and after the chains that follow it. `returns.py` decides which chain is evicted. The decision depends on the past
pauses of chains with the same pace and with answers of about the same length.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from itertools import islice
from typing import Final

from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.chain import NONE, NOTHING, Chain, by_chain
from kvpipe.cache.policy.duel import Duel
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.policy.large import Ordered, make_order, order, untracked
from kvpipe.cache.policy.queues import Queues
from kvpipe.cache.policy.recency import Recency
from kvpipe.cache.policy.returns import LEFT, SILENT, Returns, answer_class, chain_kind, hinted_kind, pace_after

CHAIN_MAX: Final = 256  # number of chunks; limited, because the time to split a chain is proportional to its length
DEPTH_MAX: Final = 1024  # an eviction follows at most this many chains towards the end of a prompt
# identities forgotten per call: several, because finding the oldest takes longer than removing it
FORGOTTEN_MAX: Final = 64
NOWHERE: Final = object()  # an identity that no chunk has as its `before`
NOBODY: Final = Chain(NOWHERE, NOWHERE, 0.0, orphan=False)  # a chain without chunks


class Sessions:
    """Evicts from the chain with the fewest expected hits per second of waiting."""

    def __init__(self, slots: int) -> None:
        """Start without chunks. `slots` limits the numbers of remembered held chunks and evicted chains."""
        self._slots = max(1, slots)
        self._known_max = 2 * self._slots
        self._returns = Returns()
        self._duel = Duel(self._slots, self._returns)
        self.sized = self._duel.sized  # see `SizedPolicy`
        self._revalued = self._duel.revalued
        self._chains: list[Chain | None] = [None]  # each chain at the index that is the `place` of its chunks
        self._numbers: list[int] = []  # indices of `_chains` that are free for new chains
        self._free = self._held = 0  # the number of chunks that may be evicted, and the number of known held chunks
        self._known: MutableMapping[Hashable, Chain] = make_order(slots)  # the chain of each chunk's `identity`
        self._gone: Ordered[Hashable, Chain] = order(slots)  # evicted chains, by the identity of their head
        self._branches: Ordered[Hashable, dict[Chain, None]] = order(slots)  # the chains after each `identity`
        self._queues = Queues(slots, self._returns)
        self._orphans = self._queues.others
        self._recency = Recency(slots)  # chains in the queues, and orphans
        self._tip = NOBODY  # the chain in which a chunk was saved last
        self._follows: Hashable = NOWHERE  # the identity of the chunk that was saved last
        self._now_s, self._over, self._answer = 0.0, False, 0
        self._touched: list[Evictable] = []  # chunks of the finished request, its end first
        self._draining, self._bare = NOBODY, False  # the chain to evict from; whether no chain follows this chain
        self._lost = 0  # the number of chunks of running requests that were evicted or are orphans
        untracked(self._chains)

    # ---- the policy's calls --------------------------------------------------------------------------------------

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`."""
        if over or self._over:
            if self._touched:
                self._settle()
            self._draining, self._over = NOBODY, over
            if over:
                self._follows, self._answer = NOWHERE, 0
        if now_s > self._now_s:  # noqa: PLR1730  (faster; victims are chosen anew when requests end, not with time)
            self._now_s = now_s

    def answered(self, tokens: int) -> None:
        """See `AnsweredPolicy.answered`."""
        self._answer = answer_class(tokens)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        before = chunk.before
        if before == self._follows and not chunk.place:  # the usual case: the chunk follows the last saved chunk
            chain, identity, known = self._tip, chunk.identity, self._known
            stack = chain.stack
            if (
                chain.free and len(stack) < CHAIN_MAX and stack[-1].identity == before
                and before not in self._branches and identity not in self._branches and identity not in known
            ):  # fmt: skip
                stack.append(chunk)
                known[identity], chunk.place = chain, chain.number
                chain.free += 1
                self._free += 1
                self._follows = identity
                if len(known) > self._known_max:
                    self._forget_oldest()
                return
        if self._touched:
            self._settle()
        self._insert(chunk, hit=hit)

    def _insert(self, chunk: Evictable, *, hit: bool) -> None:
        """Insert any chunk. `insert` handles the usual case itself."""
        chain = self._chains[chunk.place]
        if chain is None:
            self._insert_new(chunk)
        elif chunk in chain.held:
            self._give_back(chain, [chunk], hit=hit)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        if self._touched:
            self._settle()
        runs = by_chain(chunks[::-1], self._chains)
        if sum(map(len, runs.values())) < len(chunks):  # a new chunk may split chains
            for chunk in chunks:
                self.insert(chunk, hit=hit)
            return
        for chain in reversed([*runs]):
            self._give_back(chain, runs[chain], hit=hit)

    def _give_back(self, chain: Chain, run: list[Evictable], *, hit: bool) -> None:
        held = chain.held
        before = len(held)
        held.difference_update(run)
        back = before - len(held)
        if not back:
            return
        if not held:
            chain.held = NOTHING
        if hit and chain.ended_s is not None:
            if chain.free:
                self._leave_behind(chain, run[-1])
            self._use(chain)
        if not chain.free:
            self._line_up(chain)
        chain.free += back
        self._free += back
        self._held -= back
        end = chain.stack[-1]
        for chunk in run if not hit else (end,) if end in run else ():  # after a hit only the last chunk may grow
            self._know(chunk.identity, chain)

    def _insert_new(self, chunk: Evictable) -> None:
        identity, late = chunk.identity, self._over
        chain = self._chain_for(identity, chunk.before)
        chain.push(chunk)
        self._know(identity, chain)
        if chain.number == NONE:
            self._number(chain)
        chunk.place = chain.number
        if not chain.free:
            self._line_up(chain)
        chain.free += 1
        self._free += 1
        self._lost += chain.orphan and not late
        self._tip, self._follows = chain, NOWHERE if late or chain.orphan else identity
        if late:
            self._duel.saved(chain, len(chain.stack), self._now_s)
            if len(chain.stack) > 1:
                return
        if chain.ended_s is not None:
            self._use(chain)
        if late:
            self._wait(chain, chain.answer)

    def _number(self, chain: Chain) -> None:
        """Give the chain a number, because it has chunks in memory from now on."""
        if self._numbers:
            chain.number = self._numbers.pop()
            self._chains[chain.number] = chain
        else:
            chain.number = len(self._chains)
            self._chains.append(chain)

    def _end_number(self, chain: Chain) -> None:
        """Free the chain's number if the chain has no chunks in memory any more."""
        if not (chain.free or chain.held):
            self._chains[chain.number] = None
            self._numbers.append(chain.number)
            chain.number = NONE

    def _know(self, identity: Hashable, chain: Chain) -> None:
        if identity in self._branches and not chain.orphan:
            self._adopt(identity)
        self._known[identity] = chain
        if len(self._known) > self._known_max:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the identities that have been known for the longest time, with their chains."""
        for identity in [*islice(self._known, min(FORGOTTEN_MAX, 1 + self._slots // 128))]:
            del self._known[identity]

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        if self._touched:
            self._settle()
        chain = self._chains[chunk.place]
        if chain is not None and chunk not in chain.held:
            self._hold(chain, [chunk])

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        if self._touched:
            self._settle()
        for chain, run in by_chain(chunks, self._chains).items():
            self._hold(chain, [one for one in run if one not in chain.held] if chain.held else run)

    def _hold(self, chain: Chain, run: list[Evictable]) -> None:
        """Hold the chunks `run` of a chain, which may not be evicted from now on."""
        if chain.held:
            chain.held.update(run)
        else:
            chain.held = set(run)
        chain.free -= len(run)
        self._free -= len(run)
        self._held += len(run)
        if run and not chain.free:
            self._leave(chain)
        if self._held > self._slots:  # some chunks that count as held were dropped without a call of `dropped`
            for holder in [one for one in self._chains if one is not None and one.held]:
                for chunk in [one for one in holder.stack if one in holder.held]:
                    self.dropped(chunk)

    def dropped(self, chunk: Evictable) -> None:
        """See `RememberingPolicy.dropped`. The chunk stays in its stack while later chunks of it are in memory."""
        chain = self._chains[chunk.place]
        if chain is None or chunk not in chain.held:
            return
        chain.held.remove(chunk)
        chunk.place = 0
        self._held -= 1
        while chain.stack and chain.stack[-1].place != chain.number:
            self._pop(chain)
        if len(chain.stack) > 2 * (chain.free + len(chain.held)) + 8:  # half of the stack's chunks were dropped
            chain.stack = [one for one in chain.stack if one.place == chain.number]
            untracked(chain.stack)
        self._end_number(chain)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        if self._over:
            self._touched.append(chunk)
            self._draining = NOBODY
            return
        chain = self._chains[chunk.place]
        if chain is not None and chain.ended_s is not None and chunk not in chain.held:
            self._use(chain)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        if self._over:
            self._touched += chunks
            self._draining = NOBODY
            return
        for chunk in chunks:
            self.refresh(chunk)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        chain = self._draining
        stack = chain.stack
        if not (self._bare and len(stack) == chain.free > 1):
            return self._victim()
        chunk = stack.pop()  # every chunk of the chain may be evicted, and at least one chunk stays
        chunk.place, identity = 0, chunk.identity
        chain.free -= 1
        self._free -= 1
        if stack[-1].identity != identity:
            other = self._known.pop(identity, chain)
            if other is not chain:
                self._known[identity] = other
        if chain.ended_s is None and not chain.orphan:
            self._lost += 1
        return chunk

    def _victim(self) -> Evictable | None:
        """Return a victim of any chain. `victim` handles the usual case itself."""
        if self._touched:
            self._settle()
        while self._free:
            chain = self._draining
            if not chain.free:
                chain = self._worst()
                if chain.stack[-1].identity in self._branches:
                    chain = self._end_of(chain)
            elif not self._bare:
                chain = self._end_of(chain)
            self._draining, self._bare = chain, True  # now no chain follows `chain`
            chunk = self._pop(chain)
            if chunk is not None:
                if chain.ended_s is None and not chain.orphan:
                    self._lost += 1
                return chunk
        return None

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        return self._free

    # ---- the choice of a chain -----------------------------------------------------------------------------------

    def _worst(self) -> Chain:
        """Return the chain to evict from."""
        if self._orphans:
            return next(iter(self._orphans))
        if not self._duel.learnt:
            return self._recency.first()
        worst = self._queues.least(self._now_s)
        assert worst is not None  # noqa: S101  (every evictable chunk is in a chain of a queue)
        return worst

    def _end_of(self, chain: Chain) -> Chain:
        """Follow the evictable chains after `chain`, and return the last, or `chain` if no such chain follows."""
        for _ in range(DEPTH_MAX):
            branches = self._branches.get(chain.stack[-1].identity)
            following = next((one for one in branches if one.free), None) if branches else None
            if following is None:
                break
            chain = following
        return chain

    def _pop(self, chain: Chain) -> Evictable | None:
        """Remove the last chunk from the chain. Return the chunk if it may be evicted, and otherwise None."""
        stack, held = chain.stack, chain.held
        chunk = stack.pop()
        free = chunk.place == chain.number
        if free:
            chunk.place = 0
            if held and chunk in held:
                held.remove(chunk)
                self._held -= 1
                free = False
            else:
                chain.free -= 1
                self._free -= 1
                if not chain.free:
                    self._leave(chain)
            self._end_number(chain)
        identity = chunk.identity
        if self._known.get(identity) is chain and not (stack and stack[-1].identity == identity):
            del self._known[identity]
        if not stack:
            self._forget(chain)
        return chunk if free else None

    def _forget(self, chain: Chain) -> None:
        """Forget the empty chain, except its pace. A later chain with the same first chunk gets this pace."""
        branches = self._branches.get(chain.before)
        if branches is not None:
            branches.pop(chain, None)
            if not branches:
                del self._branches[chain.before]
        if not chain.orphan:
            self._gone[chain.head] = chain
            if len(self._gone) > self._slots:
                self._gone.popitem(last=False)

    def _enqueue(self, chain: Chain) -> None:
        if chain.orphan:
            self._orphans[chain] = None
        else:
            self._queues.put(chain, chain.kind)

    def _dequeue(self, chain: Chain) -> None:
        if chain.orphan:
            del self._orphans[chain]
        else:
            self._queues.drop(chain, chain.kind)

    def _line_up(self, chain: Chain) -> None:
        """Put the chain into the queues, because some of its chunks may be evicted from now on."""
        self._enqueue(chain)
        self._recency.use(chain)

    def _leave(self, chain: Chain) -> None:
        """Remove the chain from the queues, because none of its chunks may be evicted, or to move the chain."""
        self._dequeue(chain)
        self._recency.forget(chain)
        if chain is self._draining:
            self._draining = NOBODY

    # ---- the order of chains -------------------------------------------------------------------------------------

    def _chain_for(self, identity: Hashable, before: Hashable) -> Chain:
        """Return the chain at whose end a new chunk belongs."""
        chain = self._known.get(identity)
        if chain is not None and chain.stack:  # false for an evicted chain that once had a chunk with this identity
            return chain  # a chunk of another cache group has this identity, or a chunk with the same content
        parent = self._known.get(before) if before else None
        if parent is not None and not parent.stack:
            parent = None
        if parent is not None:
            if parent.stack[-1].identity != before:
                self._split(parent, before)
            end = parent.stack[-1].identity
            if end == before and len(parent.stack) < CHAIN_MAX and before not in self._branches:
                return parent
        chain = self._gone.pop(identity, None)
        if chain is None:
            chain = Chain(identity, before, self._now_s, orphan=False)
            if parent is not None and len(parent.stack) >= CHAIN_MAX:
                chain.pace, chain.kind = parent.pace, chain_kind(parent.pace)
        chain.orphan = bool(before) and (parent is None or parent.orphan)
        self._follow(chain)
        if parent is not None and len(self._branches.get(before, ())) > 1:
            parent.shared = True
        if chain.orphan or self._draining.orphan:
            self._draining = NOBODY
        return chain

    def _follow(self, chain: Chain) -> None:
        if chain.before:
            self._bare = False
            self._branches.setdefault(chain.before, {})[chain] = None
            if len(self._branches) > self._slots:
                self._branches.popitem(last=False)

    def _adopt(self, identity: Hashable) -> None:
        """Count the chains after `identity` as orphans no longer, because the chunk with this identity was inserted."""
        ends = [identity]
        while ends:
            for chain in [one for one in self._branches.get(ends.pop(), ()) if one.orphan]:
                if chain.free:
                    del self._orphans[chain]
                    self._queues.put(chain, chain.kind)
                chain.orphan, self._draining = False, NOBODY
                self._lost = max(0, self._lost - chain.free - len(chain.held))
                ends.append(chain.stack[-1].identity)

    def _leave_behind(self, chain: Chain, last: Evictable) -> None:
        """Split the chain after `last`, because the request does not use the chunks after `last`."""
        stack = chain.stack
        if stack[-1] is not last and chain.held.isdisjoint(stack[stack.index(last) + 1 :]):
            self._split(chain, last.identity)

    def _split(self, chain: Chain, at: Hashable) -> None:
        """Split off the chunks after `at` as a new chain of kind `SILENT + LEFT`. The new chain's wait begins now."""
        stack = chain.stack
        stop = next((i for i in range(len(stack), 0, -1) if stack[i - 1].identity == at), len(stack))
        rest = stack[stop:]
        if not any(one.place == chain.number for one in rest):  # all chunks of `rest` were dropped
            while len(stack) > stop:
                self._pop(chain)
            return
        chain.stack = stack[:stop]
        untracked(rest)
        untracked(chain.stack)
        end = Chain(rest[0].identity, at, self._now_s, orphan=chain.orphan)
        end.stack, end.pace, end.paced, end.ended_s = rest, chain.pace, LEFT, self._now_s
        end.kind = SILENT + LEFT
        if not self._duel.learnt:
            end.used_s = chain.used_s
        self._move(rest, chain, end)
        if chain.held:
            end.held = chain.held.intersection(rest)
            chain.held = chain.held - end.held
            end.free -= len(end.held)
        if end.free:
            self._enqueue(end)
            self._recency.split(chain, end)
            chain.free -= end.free
            if not chain.free:
                self._leave(chain)
        if not any(one.place == chain.number for one in chain.stack):  # no chunk of the chain is in memory
            self._end_number(chain)
        self._duel.split(chain, len(chain.stack), end, len(rest))
        self._returns.waits(LEFT, SILENT + LEFT)
        self._follow(end)

    def _move(self, chunks: list[Evictable], chain: Chain, end: Chain) -> None:
        """Move `chunks` from `chain` to the new chain `end`."""
        self._number(end)
        old, new, known = chain.number, end.number, self._known
        for chunk in chunks:
            if chunk.place == old:
                chunk.place = new
                end.free += 1
            identity = chunk.identity
            if known.get(identity) is chain:
                known[identity] = end

    # ---- waits and hints -----------------------------------------------------------------------------------------

    def _use(self, chain: Chain) -> None:
        """End the wait of a chain that a request uses."""
        self._learn(chain)
        self._become(chain, chain_kind(chain.pace))

    def _learn(self, chain: Chain) -> None:
        """Count the chain's wait, which has ended, and update the chain's pace."""
        assert chain.ended_s is not None  # noqa: S101  (checked by the callers)
        idle_s = self._now_s - chain.ended_s
        if not chain.hinted:
            self._returns.back(chain.paced, SILENT + chain.answer + chain.paced, idle_s)
        else:
            self._returns.returned(chain.paced, idle_s)
            self._returns.proven(chain.hinted, chain.paced, self._now_s - chain.hinted_s)
            self._returns.returned(chain.hinted, self._now_s - chain.hinted_s)
        chain.pace = pace_after(chain.pace, idle_s)
        chain.ended_s, chain.hint, chain.hinted = None, None, 0

    def _become(self, chain: Chain, kind: int) -> None:
        """Set the chain's kind to `kind`, and the time of its last use to now."""
        if chain.learnt_kept:
            self._revalued.add(chain.learnt_kind)
        if chain.free:
            if chain.orphan:
                self._orphans.move_to_end(chain)
            else:
                self._queues.move(chain, chain.kind, kind)
            self._recency.renew(chain)
            if chain is self._draining:
                self._draining = NOBODY
        chain.kind, chain.used_s = kind, self._now_s

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        if self._touched:
            self._settle()
        chain = self._chains[chunk.place]
        if chain is None or chain.hint is hint:
            return
        end, demotes = chain.stack[-1].identity, hint.action is Action.DEMOTE
        branches = self._branches.get(end, ())
        own = chunk.identity == end and all(one.hint is hint for one in branches) and not (demotes and chain.shared)
        if chain.ended_s is None:  # another request uses the chain, or a chunk of this request has just landed
            if own and not demotes:
                self._expect(chain, hint)
        elif own or not (demotes or self._promises_less(chain, hint)):
            chain.hint = hint
            self._believe(chain, hint)

    def _expect(self, chain: Chain, hint: Hint) -> None:
        """Apply a hint to a chain that a request is using. The hint is on the wait that begins after the request."""
        chain.hint, kind = hint, hinted_kind(hint.action, hint.at_s - self._now_s)
        if self._returns.trusts:
            self._become(chain, kind)
            self._draining = NOBODY  # chunks that are being saved may be worth less now

    def _promises_less(self, chain: Chain, hint: Hint) -> bool:
        """Whether the hint would reduce the worth of a waiting chain."""
        hinted, now_s = hinted_kind(hint.action, hint.at_s - self._now_s), self._now_s
        return self._returns.worth(hinted, 0.0) < self._returns.worth(chain.kind, now_s - chain.used_s)

    def _believe(self, chain: Chain, hint: Hint) -> None:
        """Apply `hint` to a waiting chain, and change the chain's kind to the kind of the hint."""
        returns = self._returns
        returns.ended(chain.hinted or SILENT + chain.answer + chain.paced, -1)
        chain.hinted, chain.hinted_s = hinted_kind(hint.action, hint.at_s - self._now_s), self._now_s
        returns.ended(chain.hinted)
        self._become(chain, chain.hinted if returns.trusts else chain.paced)
        self._duel.hinted(chain)

    def _settle(self) -> None:
        """Begin the waits of all chains that the finished request has used."""
        touched, self._touched = self._touched, []
        at, many, chains, prompt = 0, len(touched), self._chains, list[tuple[Chain, int]]()
        while at < many and (chain := chains[touched[at].place]) is not None:
            stack = chain.stack
            begun = stack if stack[-1] is touched[at] else stack[: stack.index(touched[at]) + 1]
            size = len(begun)
            if chain.held or touched[at : at + size] != begun[::-1]:
                break
            if begun is not stack:
                self._leave_behind(chain, begun[-1])
            self._wait(chain, self._answer)
            if not chain.orphan:  # chunks of orphans are counted in `_lost`
                prompt.append((chain, size))
            at += size
        if at < many:
            prompt += self._put_in_order(touched[at:])
        if prompt and self._lost:
            prompt[0] = prompt[0][0], prompt[0][1] + self._lost
        self._lost = 0
        self._duel.used(prompt, self._now_s)

    def _put_in_order(self, touched: list[Evictable]) -> list[tuple[Chain, int]]:
        """Put the chunks of each chain in the order in which the request had these chunks.

        The request's last chunk is first in `touched`. Returns pairs (chain, number of its chunks in `touched`) of all
        chains except orphans.
        """
        chains: dict[Chain, dict[Evictable, None]] = {}
        for chunk in touched:
            chain = self._chains[chunk.place]
            if chain is not None and chunk not in chain.held:
                chains.setdefault(chain, {})[chunk] = None
        for chain, chunks in chains.items():
            chain.reorder([*reversed(chunks)])
            self._wait(chain, self._answer)
        return [(chain, len(chunks)) for chain, chunks in chains.items() if not chain.orphan]

    def _wait(self, chain: Chain, answer: int) -> None:
        """Begin a wait of the chain, because no request uses it."""
        if chain.ended_s is not None:
            self._learn(chain)
        pace = chain.paced = chain_kind(chain.pace)
        chain.ended_s, chain.answer = self._now_s, answer
        self._returns.waits(pace, SILENT + answer + pace)
        self._become(chain, SILENT + answer + pace)
        if chain.hint is not None:
            self._believe(chain, chain.hint)
