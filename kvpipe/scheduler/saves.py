"""Plans saves: which units of each request are saved in a step, and into which chunks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.chunks import Chunk, Piece
from kvpipe.protocol.messages import rows_of
from kvpipe.scheduler.records import OpenChunk, Tracked
from kvpipe.statemachine import saving as saving_m

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Block, Blocks, OfferedStates, Request, Step
    from kvpipe.protocol.messages import Job
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.jobs import Jobs
    from kvpipe.scheduler.requests import Requests

STEPS_MAX_LOG2: Final = 4
"""Generated tokens wait for at most 2 ** `STEPS_MAX_LOG2` = 16 steps of their request before a save."""
TOKENS_PER_SAVE: Final = 256
"""One step saves this number of generated tokens, if 16 steps generate as many tokens. Drafts are not counted."""
NO_END: Final = -1
"""Stands for the number of tokens of a request that has no newly final tokens."""

OfferedState = tuple[int, int, int]
"""(group, block, tokens): see `kvpipe.protocol.engine.OfferedStates`."""


class Saving:
    """Plans the saves of one engine. `blocks` gives the engine's block tables, and is set before the first step."""

    def __init__(self, context: Context, requests: Requests, jobs: Jobs, pipeline_stages: int) -> None:
        """Start without block tables. With p pipeline stages, a request decodes in every p-th step."""
        geometry = context.geometry
        self._decode, self._partial = context.settings.save_decode, context.settings.save_partial
        self._geometry, self._catalog = geometry, context.catalog
        self._context, self._prefixes, self._counters = context, context.prefixes, context.counters
        self._requests, self._jobs = requests, jobs
        self._steps, self._set_steps = context.steps, context.settings.save_decode_steps
        self._stages, self._windows = pipeline_stages, [one for one in geometry.groups if one.window_tokens is not None]
        self._unit, self._per_chunk, self._paging = geometry.unit_tokens, geometry.units_per_chunk, geometry.paging
        self._states, self._whole = geometry.states, geometry.whole_units
        self._step = int(self._whole == 1) if self._partial else self._per_chunk
        """The number of new units for which a save is worthwhile; 0 if `_more` decides."""
        blocks = () if geometry.branches_within else geometry.states
        self._branches = max((geometry.units_per_block[group] for group in blocks), default=1)
        """States at branches of prompts are kept at multiples of this number of units."""
        self._uncut = bool(geometry.states or geometry.ahead_tokens)
        """Whether saved chunks cannot be cut when an engine cuts a session's tokens.

        If true, no tokens of sessions are saved.
        """
        self._growing = [group for group in range(len(geometry.groups)) if group not in geometry.states]
        self.blocks: Blocks | None = None

    def ended(self, request: Request) -> list[Chunk]:
        """Keep the marks at the end of a finished request, even if other requests add units to the same chunks.

        So a later prompt that continues the request finds all of the request's tokens. Returns the chunks in which the
        request ends.
        """
        ends: list[Chunk] = []
        units = self._prefixes.final_units(request, request.num_tokens)
        # If a limit ends the saves, or if the last generated tokens wait for a step that saves, fewer units are saved.
        tails = dict.fromkeys((units, min(units, self._requests.tracked[request.request_id].saving.saved_units)))
        places = [at for end in tails for at in range(end, max(0, end - self._geometry.end_units), -1)]
        for group in self._growing:
            for ended in places:
                key = self._prefixes.key(self._prefixes.hashes(request), ended)
                chunk = self._catalog.find(group, key) or self._catalog.pending(group).get(key)
                if chunk is not None:
                    self._catalog.keep_mark(chunk, key)
                    ends.append(chunk)
                    break
        return ends

    def plan_step(self, step: Step, jobs: list[Job]) -> None:
        """Append a save to `jobs` for every request with newly final units.

        The units of a decoding request wait for one step in `every` of its steps, or until they are about to leave a
        window. If the request ends or is preempted before that step, these units are not saved. A step that computes
        more than the last token and drafts saves at once, because such a step computes a prompt, or computes generated
        tokens again after a preemption.
        """
        tracked_of, states = self._requests.tracked, self._offered(step) if self._states else {}
        every = self._set_steps or steps_per_save(len(step.num_scheduled_tokens))
        due = not (self._steps.planned // self._stages) % every
        for request_id, scheduled in step.num_scheduled_tokens.items():
            try:
                tracked = tracked_of[request_id]
            except KeyError:
                self._counters.fault("scheduled_unknown_request", request=request_id)
                continue
            request = tracked.request
            end = request.num_computed_tokens + scheduled
            if end < tracked.saving.next_save_at_tokens:
                continue
            if due or request.num_computed_tokens < request.num_tokens - 1 or self._urgent(tracked, end, states):
                jobs += self._try_save(tracked, end, states.pop(request_id, ()))
        # an engine offers a state only once, even for a request that is not in this step
        for request_id, offered in states.items():
            if request_id in tracked_of:
                jobs += self._try_save(tracked_of[request_id], NO_END, offered)

    def _urgent(self, tracked: Tracked, end: int, states: Container[str]) -> bool:
        """Whether the request's save cannot wait until a later step, for one of three reasons.

        The engine offers a state once. The next step may free blocks that have left a window after `end` tokens. A part
        of the prompt may be unsaved, because its keys were not known yet or its save has failed.
        """
        first = tracked.saving.saved_units * self._unit
        if tracked.request.request_id in states or first + self._unit <= tracked.request.num_prompt_tokens:
            return True
        for group in self._windows:
            window = group.window_tokens
            assert window is not None  # noqa: S101  (only such groups are listed)
            if (end // window * window > first) if group.local else (end - first >= window):
                return True
        return False

    def save_up_to(self, tracked: Tracked, tokens: int) -> Sequence[Job]:
        """Plan a save of the final units of the request's first `tokens` tokens.

        Returns a list with the save, or an empty list if no unit needs a save.
        """
        return self._try_save(tracked, tokens, ())

    def _offered(self, step: Step) -> dict[str, Sequence[OfferedState]]:
        """Return, by request id, the states that are final after `step` has been computed."""
        states: OfferedStates | None = getattr(step, "kv_connector_block_state", None)
        return dict(states.boundary_state_offloads) if states is not None else {}

    def _try_save(self, tracked: Tracked, end: int, states: Sequence[OfferedState]) -> Sequence[Job]:
        """Plan one request's save. Returns a list with the job, or an empty list if no unit or state needs a save.

        This method never raises, because the step's loads depend on the plan. An error costs only this save.
        """
        if self._uncut and tracked.request.resumable:
            return ()
        pieces: list[Piece] = []
        rows: list[int] = []
        progress = tracked.saving
        self._context.trace.about(tracked.request.request_id, tracked.life.epoch)
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
        """Claim slots for the final units of the first `end` tokens that are not saved yet.

        The pieces of these units are appended to `pieces`. Returns the rows that save the pieces, and the first unit of
        the pieces.
        """
        request, progress = tracked.request, tracked.saving
        hashes = self._prefixes.hashes(request)
        units = self._prefixes.hashed_units(hashes, min(end, request.num_tokens))
        done = False
        units_max = self._units_max(tracked)
        if units_max is not None:
            done = units >= units_max and not request.resumable
            units = min(units, units_max)
        if not self._partial:
            units -= units % self._per_chunk
        if self._whole > 1:
            units = self._worth_a_page(request, units, progress.saved_units)
        if units < progress.saved_units:  # a streaming session has cut tokens that were saved
            progress.saved_units = units
            progress.close_chunks()
        if done:
            progress.complete()
        else:
            more = self._step or self._more(request, units)
            progress.planned(self._prefixes.computed_tokens(request, units + more))
        if units == progress.saved_units:
            return [], units
        ends = self._prefixes.units_within(request.num_prompt_tokens), units_max, *self._boundaries(request)
        rows: list[int] = []
        first, progress.saved_units = progress.saved_units, units
        for group in self._growing:
            table = self._table(tracked, group)
            for base in range(first // self._per_chunk * self._per_chunk, units, self._per_chunk):
                low, high = max(base, first), min(base + self._per_chunk, units)
                key = self._prefixes.key(hashes, high)
                if self._catalog.known(group, key):
                    progress.close(group)
                    self._counters["save_known"] += 1
                    continue
                rows += self._claim(tracked, hashes, key, group, table, base, low, high, pieces, keep=high in ends)
        return rows, first

    def _units_max(self, tracked: Tracked) -> int | None:
        """Return how many units of the request may be saved, by the prompt or a limit, or None if all units may be."""
        limit = tracked.limits.save_units_max(self._unit)
        if self._decode:
            return limit
        prompt = self._prefixes.units_within(tracked.request.num_prompt_tokens)
        return prompt if limit is None else min(prompt, limit)

    def _worth_a_page(self, request: Request, units: int, saved: int) -> int:
        """Return how many of `units` units to save: up to the last unit that ends a block or is a state's boundary.

        The result is at least `saved`, the number of units that are saved already.
        """
        whole = units - units % self._whole
        return max(whole, min(units, saved), *(end for end in self._boundaries(request) if end <= units))

    def _more(self, request: Request, units: int) -> int:
        """Return the number of units from `units` on to the next end of a block or boundary of a state."""
        whole = self._whole - units % self._whole
        if whole == 1:
            return 1
        return min([whole, *(end - units for end in self._boundaries(request) if end > units)])

    def _plan_state(self, tracked: Tracked, group: int, block: int, tokens: int, pieces: list[Piece]) -> list[int]:
        """Claim a slot for the state of one boundary, if the state is worth a slot.

        Returns the row that saves the state. The state's piece is appended to `pieces`.
        """
        request, (units, beyond) = tracked.request, divmod(tokens, self._unit)
        if beyond or group not in self._states or not self._worth(tracked, units):
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

    def _worth(self, tracked: Tracked, units: int) -> bool:
        """Whether a later prompt may continue after `units` units, and no limit forbids to save the state there.

        A later prompt may continue where a prompt ends or branches, or where an answer ends. Other states are not
        saved, because a state takes as much memory as the attention KV of many tokens, and each step of a long prompt
        has a state.
        """
        request, limit, tokens = tracked.request, tracked.limits.save_units_max(self._unit), units * self._unit
        if limit is not None and units > limit:
            return False
        if tokens > request.num_prompt_tokens:
            return self._decode and not units % self._whole  # attention KV ends only at whole blocks
        last, branch = self._boundaries(request)
        return units >= last or (branch > 0 and units == branch)

    def _boundaries(self, request: Request) -> tuple[int, ...]:
        """Return after which units the prompt's states are kept: at the prompt's end and at a branch (0: no branch)."""
        if not self._states:
            return ()
        branch: int = getattr(request, "shared_prefix_boundary", 0)
        branch, tokens = branch // self._unit, request.num_prompt_tokens
        last = min(self._prefixes.units_within(tokens), tokens // self._unit - self._geometry.states_back)
        return max(0, min(last, (tokens - 1) // self._unit)), branch - branch % self._branches

    def _claim(  # noqa: PLR0913  (the caller computes most arguments once for all chunks of a save)
        self, tracked: Tracked, hashes: Sequence[bytes], key: bytes, group: int, table: Sequence[Block], base: int,
        low: int, high: int, pieces: list[Piece], *, keep: bool,
    ) -> list[int]:  # fmt: skip
        """Claim units [low, high) of the chunk that begins at unit `base`, and append their piece to `pieces`.

        If a held chunk ends at `low`, the units are added to this chunk. Otherwise a new chunk gets all units from
        `base` on. `key` is the key at unit `high`. Returns the rows that save the piece. The result is empty if no slot
        is free, or if blocks have left a sliding window.
        """
        progress, paging = tracked.saving, self._paging[group]
        opened = progress.opened[group]
        chunk: Chunk | None = None
        # A page that holds the chunk's end at `low` can be found already, so this page must not change.
        if low > base and not low % self._whole:
            before = self._prefixes.key(hashes, low)
            if opened is not None and opened.base == base and opened.key == before:
                chunk = opened.chunk if opened.chunk.tail == before else None
            if chunk is None:  # the chunk in which another request or an earlier admission ended
                found = self._catalog.find(group, before)
                if found is not None and found.tail == before:
                    self._catalog.keep_mark(found, before)
                    chunk = found
            if chunk is not None and not self._catalog.grows(chunk):
                chunk = None
        if opened is not None and chunk is not opened.chunk:
            progress.close(group)
        start, stop = low if chunk is not None else base, high - base
        blocks = [block.block_id for block in paging.stored(table, start, high) if not block.is_null]
        page = paging.pages(start - base)
        if len(blocks) < paging.pages(stop) - page:
            self._counters["save_out_of_window"] += 1
            progress.close(group)
            return []
        follows = b""  # the link to the chunk before is set only once, for a new chunk
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
        """Return the engine's present block table of the request. The caller must not keep the table."""
        assert self.blocks is not None  # noqa: S101  (bound before the first step)
        return self.blocks.table(tracked.request.request_id, group)


def steps_per_save(requests: int) -> int:
    """Return n if one step in n saves generated tokens, for the number of requests in the step.

    The result is 1 for one request, because a single request has new units to save only in few steps. With more
    requests, fewer steps collect enough units for one save. All results divide 16. So each 16th step saves, even if
    `requests` changes from step to step.
    """
    log2 = (TOKENS_PER_SAVE // requests).bit_length() - 1 if requests > 1 else 0
    return 1 << max(0, min(log2, STEPS_MAX_LOG2))
