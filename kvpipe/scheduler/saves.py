"""Plans saves: which units of each request are saved in a step, and into which chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.catalog import Catalog, Chunk, Piece
from kvpipe.cache.prefixes import Prefixes
from kvpipe.config import Settings
from kvpipe.geometry import Geometry
from kvpipe.messages import rows_of
from kvpipe.scheduler.records import OpenChunk, Tracked
from kvpipe.statemachine import saving as saving_m
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.messages import Job
    from kvpipe.scheduler.base import Block, Blocks, OfferedStates, Request, Step
    from kvpipe.scheduler.jobs import Jobs
    from kvpipe.scheduler.requests import Requests
    from kvpipe.trace.recorder import Recorder

NO_END: Final = -1
"""In place of a number of tokens: nothing new is final."""

State = tuple[int, int, int]
"""Group, block, tokens: see `kvpipe.scheduler.base.OfferedStates`."""


class Saving:
    """One per scheduler side. `blocks`: the engine's block tables, set before the first step."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        *,
        catalog: Catalog,
        prefixes: Prefixes,
        requests: Requests,
        jobs: Jobs,
        counters: Counters,
        trace: Recorder,
    ) -> None:
        """`settings`: `save_decode` and `save_partial`."""
        self._decode, self._partial = settings.save_decode, settings.save_partial
        self._geometry, self._catalog = geometry, catalog
        self._prefixes, self._counters, self._trace = prefixes, counters, trace
        self._requests, self._jobs = requests, jobs
        self._unit, self._per_chunk, self._paging = geometry.unit_tokens, geometry.units_per_chunk, geometry.paging
        self._states, self._whole = geometry.states, geometry.whole_units
        self._step = int(self._whole == 1) if self._partial else self._per_chunk
        """After how many further units a save is worth it; 0: `_more` decides."""
        blocks = () if geometry.branches_within else geometry.states
        self._branches = max((geometry.units_per_block[group] for group in blocks), default=1)
        """States of branches are kept at multiples of so many units."""
        self._uncut = bool(geometry.states or geometry.ahead_tokens)
        """Whether KV stays as it is when an engine cuts a session's tokens: then nothing of sessions is saved."""
        self._growing = [group for group in range(len(geometry.groups)) if group not in geometry.states]
        self.blocks: Blocks | None = None

    def ended(self, request: Request) -> list[Chunk]:
        """The request is over: keep the marks at its end, even if others write on in these chunks.

        So a prompt that continues it finds all of it. Returns the chunks that it ends in.
        """
        ends: list[Chunk] = []
        units = self._prefixes.final_units(request, request.num_tokens)
        for group in self._growing:
            for ended in range(units, max(0, units - self._geometry.end_units), -1):
                key = self._prefixes.key(self._prefixes.hashes(request), ended)
                chunk = self._catalog.find(group, key) or self._catalog.pending(group).get(key)
                if chunk is not None:
                    self._catalog.keep_mark(chunk, key)
                    ends.append(chunk)
                    break
        return ends

    def plan_step(self, step: Step, jobs: list[Job]) -> None:
        """Append a save to `jobs` for every request with newly final units."""
        tracked_of, states = self._requests.tracked, self._offered(step) if self._states else {}
        for request_id, scheduled in step.num_scheduled_tokens.items():
            try:
                tracked = tracked_of[request_id]
            except KeyError:
                self._counters.fault("scheduled_unknown_request", request=request_id)
                continue
            end = tracked.request.num_computed_tokens + scheduled
            if end >= tracked.saving.next_save_at_tokens:
                jobs += self._try_save(tracked, end, states.pop(request_id, ()))
        for request_id, offered in states.items():  # offered once, perhaps of a request that does not run
            if request_id in tracked_of:
                jobs += self._try_save(tracked_of[request_id], NO_END, offered)

    def save_up_to(self, tracked: Tracked, tokens: int) -> Sequence[Job]:
        """Plan a save of the final units of the request's first `tokens` tokens. Returns it, if there are any."""
        return self._try_save(tracked, tokens, ())

    def _offered(self, step: Step) -> dict[str, Sequence[State]]:
        """Return, by request id, the states that are final once `step` has been computed."""
        states: OfferedStates | None = getattr(step, "kv_connector_block_state", None)
        return dict(states.boundary_state_offloads) if states is not None else {}

    def _try_save(self, tracked: Tracked, end: int, states: Sequence[State]) -> Sequence[Job]:
        """Plan one request's save. Never raises, as the step's loads depend on the plan: a failure costs one save.

        Returns the job, if there is something to save.
        """
        if self._uncut and tracked.request.resumable:
            return ()
        pieces: list[Piece] = []
        rows: list[int] = []
        progress = tracked.saving
        self._trace.about(tracked.request.request_id, tracked.life.epoch)
        try:
            first = progress.saved_units
            if end >= progress.next_save_at_tokens:
                rows, first = self.plan(tracked, end, pieces)
            if states and progress.state.row != saving_m.GIVEN_UP:
                for group, block, tokens in states:
                    rows += self._plan_state(tracked, group, block, tokens, pieces)
            if not pieces:
                return ()
            return (self._jobs.save(tracked, rows, tuple(pieces), first).job,)
        except Exception as e:  # noqa: BLE001
            self._counters.fault("save_not_planned", request=tracked.request.request_id, error=repr(e))
            self._jobs.lose(pieces)
            tracked.saving.give_up()
            return ()

    def plan(self, tracked: Tracked, end: int, pieces: list[Piece]) -> tuple[list[int], int]:
        """Claim the final units of the first `end` tokens that are not saved yet; append their pieces to `pieces`.

        Returns the rows that save the pieces, and the first unit of all of them.
        """
        request, progress = tracked.request, tracked.saving
        hashes = self._prefixes.hashes(request)
        units = self._prefixes.hashed_units(hashes, min(end, request.num_tokens))
        done = False
        if not self._decode:
            prompt_units = self._prefixes.units_within(request.num_prompt_tokens)
            done = units >= prompt_units and not request.resumable
            units = min(units, prompt_units)
        if not self._partial:
            units -= units % self._per_chunk
        if self._whole > 1:
            units = self._worth_a_page(request, units, progress.saved_units)
        if units < progress.saved_units:  # a streaming session cut its tokens
            progress.saved_units = units
            progress.close_chunks()
        if done:
            progress.complete()
        else:
            more = self._step or self._more(request, units)
            progress.planned(self._prefixes.computed_tokens(request, units + more))
        if units == progress.saved_units:
            return [], units
        ends = self._prefixes.units_within(request.num_prompt_tokens), *self._boundaries(request)
        rows: list[int] = []
        first, progress.saved_units = progress.saved_units, units
        for group in self._growing:
            table = self._table(tracked, group)
            for base in range(first // self._per_chunk * self._per_chunk, units, self._per_chunk):
                low, high = max(base, first), min(base + self._per_chunk, units)
                key = self._prefixes.key(hashes, high)
                if self._catalog.known(group, key):
                    progress.opened[group] = None
                    self._counters["save_known"] += 1
                    continue
                rows += self._claim(tracked, hashes, key, group, table, base, low, high, pieces, keep=high in ends)
        return rows, first

    def _worth_a_page(self, request: Request, units: int, saved: int) -> int:
        """Return how many of `units` units to save: up to the last that ends a block or is a state's boundary.

        Not less than the `saved` units.
        """
        whole = units - units % self._whole
        return max(whole, min(units, saved), *(end for end in self._boundaries(request) if end <= units))

    def _more(self, request: Request, units: int) -> int:
        """Return after how many units beyond `units` the next one ends a block or is a state's boundary."""
        whole = self._whole - units % self._whole
        if whole == 1:
            return 1
        return min([whole, *(end - units for end in self._boundaries(request) if end > units)])

    def _plan_state(self, tracked: Tracked, group: int, block: int, tokens: int, pieces: list[Piece]) -> list[int]:
        """Claim the state of one boundary, if it is worth a slot, into `pieces`. Returns the row that saves it."""
        request, (units, beyond) = tracked.request, divmod(tokens, self._unit)
        if beyond or group not in self._states or not self._worth(request, units):
            return []
        if units > self._prefixes.state_units(request, tokens):
            return []
        key = self._prefixes.state_key(self._prefixes.hashes(request), units)
        if self._catalog.known(group, key):
            self._counters["save_known"] += 1
            return []
        assert self.blocks is not None  # noqa: S101  (bound before the first step)
        if not self.blocks.knows(block, self._prefixes.state_key(request.block_hashes, units)):
            self._counters["states_not_saved"] += 1
            return []
        chunk = self._catalog.reserve(group, self._prefixes.tenant(request))
        if chunk is None:
            self._counters["states_not_saved"] += 1
            return []
        pieces.append(self._catalog.write(chunk, 1, key, keep=True, base=units - 1))
        self._counters["states_saved"] += 1
        return [group, chunk.slot, 0, block]

    def _worth(self, request: Request, units: int) -> bool:
        """Whether a later prompt may continue after `units` units: a prompt ends or branches there, or an answer ends.

        A state takes as much memory as the attention KV of many tokens, and a long prompt has one for each step.
        """
        tokens = units * self._unit
        if tokens > request.num_prompt_tokens:
            return self._decode and not units % self._whole  # else no attention ends there
        last, branch = self._boundaries(request)
        return units >= last or (branch > 0 and units == branch)

    def _boundaries(self, request: Request) -> tuple[int, ...]:
        """Return after which units states of the prompt are kept: at its end, and where prompts branch (0: nowhere)."""
        if not self._states:
            return ()
        branch: int = getattr(request, "shared_prefix_boundary", 0)
        branch, tokens = branch // self._unit, request.num_prompt_tokens
        last = min(self._prefixes.units_within(tokens), tokens // self._unit - self._geometry.states_back)
        return max(0, min(last, (tokens - 1) // self._unit)), branch - branch % self._branches

    def _claim(
        self, tracked: Tracked, hashes: Sequence[bytes], key: bytes, group: int, table: Sequence[Block], base: int,
        low: int, high: int, pieces: list[Piece], *, keep: bool,
    ) -> list[int]:  # fmt: skip
        """Claim units [low, high) of the chunk from unit `base` on: in a chunk that ends at `low` if there is one.

        Otherwise in a new chunk, from `base` on. `key`: that at `high`. Appends the piece to `pieces`, and returns the
        rows that save it; none if there is no slot, or blocks have left a sliding window.
        """
        progress, paging = tracked.saving, self._paging[group]
        opened, progress.opened[group] = progress.opened[group], None
        chunk: Chunk | None = None
        if low > base and not low % self._whole:  # else the page that has its end is found already, and stays as it is
            before = self._prefixes.key(hashes, low)
            if opened is not None and opened.base == base and opened.key == before:
                chunk = opened.chunk if opened.chunk.tail == before else None
            if chunk is None:  # where another request, or an earlier admission, has left off
                found = self._catalog.find(group, before)
                if found is not None and found.tail == before:
                    self._catalog.keep_mark(found, before)
                    chunk = found
            if chunk is not None and not self._catalog.holds(chunk):
                chunk = None
        start, stop = low if chunk is not None else base, high - base
        blocks = [block.block_id for block in paging.stored(table, start, high) if not block.is_null]
        page = paging.pages(start - base)
        if len(blocks) < paging.pages(stop) - page:
            self._counters["save_out_of_window"] += 1
            return []
        follows = b""  # as it is already
        if chunk is None:
            chunk = self._catalog.reserve(group, self._prefixes.tenant(tracked.request))
            if chunk is None:
                return []
            follows = self._prefixes.key(hashes, base) if base else b""
        pieces.append(self._catalog.write(chunk, stop, key, keep=keep, base=base, before=follows))
        self._counters["units_saved"] += high - start
        progress.opened[group] = OpenChunk(base, chunk, stop, key)
        return rows_of(group, chunk.slot, range(page, page + len(blocks)), blocks)

    def _table(self, tracked: Tracked, group: int) -> Sequence[Block]:
        """Return the engine's block table of the request as it is now. It must not be kept."""
        assert self.blocks is not None  # noqa: S101  (bound before the first step)
        return self.blocks.table(tracked.request.request_id, group)
