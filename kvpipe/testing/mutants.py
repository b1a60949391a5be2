"""The catalogue of bugs to put back in: those that killed a layerwise cache in production, and others that would."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe.testing.shapes import BLOCK

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SCHEDULER = "kvpipe.connectors.vllm.scheduler:SchedulerSide"
_CURSOR = "kvpipe.statemachine.core:Cursor"
_SAVING = "kvpipe.connectors.vllm.saving:Saving"
_STORING = "kvpipe.connectors.vllm.storing:Storing"
_PREFIXES = "kvpipe.connectors.vllm.prefixes:Prefixes"
_WORKER = "kvpipe.connectors.vllm.worker:WorkerSide"
_CONNECTOR = "kvpipe.connectors.vllm.connector:KVPipeConnector"
_PIPELINE = "kvpipe.pipeline:Pipeline"
_CATALOG = "kvpipe.catalog:Catalog"
_STAGING = "kvpipe.connectors.vllm.staging:Staging"


class Patch(NamedTuple):
    """`old` becomes `new` in one method of the class `where`, or in all that have it when `method` is ``*``.

    Both are written as if the method's `def` began its line.
    """

    where: str
    method: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One bug: what it does, and where it is put.

    `shape`: where it is looked for first. `by`: the only invariant that is asked, where a lesser one would always be
    the first to see it and what it ruins would go untested.
    """

    does: str
    patches: tuple[Patch, ...]
    shape: str = "sync"
    by: str = ""


def _one(where: str, method: str, old: str, new: str) -> tuple[Patch, ...]:
    return (Patch(where, method, old, new),)


def _keys(kind: str) -> tuple[Patch, ...]:
    """Take other keys than vLLM's, everywhere."""
    other = f"__import__({__name__!r}, fromlist=['']).{kind}"
    return tuple(
        Patch(where, "*", f"{request}.block_hashes", f"{other}({request})")
        for where, request in (
            (_SCHEDULER, "request"),
            (_SAVING, "tracked.request"),
            (_SAVING, "request"),
            (_PREFIXES, "request"),
        )
    )


MUTANTS: dict[str, Mutant] = {
    # ---- the pump that died ---------------------------------------------------------------------------------------
    "storers_not_cleared": Mutant(
        "The step's saves are still there when the next step begins.",
        _one(_PIPELINE, "end_step", "batch, self._save = self._save, None", "batch = self._save"),
    ),
    "step_never_withdrawn": Mutant(
        "A step that was never ended goes on in the next one.",
        _one(_PIPELINE, "begin", "self._withdraw()", "return"),
    ),
    "finalize_counted_by_calls": Mutant(
        "A save is final when a hook was called as often as there are layers.",
        (
            Patch(
                _PIPELINE,
                "save_layer",
                "        return\n    self._submit",
                "        batch.submitted |= batch.submitted + 1 & self._all\n        return\n    self._submit",
            ),
            Patch(
                _PIPELINE,
                "_told",
                "        whole = batch.submitted == self._all\n",
                "        whole = batch.submitted == self._all\n        if whole:\n"
                "            batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n",
            ),
        ),
    ),
    "layer_counter_not_reset": Mutant(
        "Layers are numbered on from the last batch.",
        _one(
            _PIPELINE,
            "_submit",
            "batch.submitted.bit_count(), self._loop.put)\n",
            "self.__dict__.setdefault('number', 0), self._loop.put)\n    self.number += 1\n",
        ),
    ),
    "layer_by_count": Mutant(
        "The k-th call of a hook is taken for layer k, whatever its name.",
        (
            Patch(
                _WORKER,
                "save_layer",
                "self._index.get(name)",
                "self.pipeline._save.submitted.bit_count() % len(self._index) if self.pipeline._save else None",
            ),
            Patch(_WORKER, "save_layer", "self._unknown(name)", "pass"),
        ),
        by="every_read_is_right",
        shape="device-order",
    ),
    "freeze_one_step_short": Mutant(
        "Every second frozen step saves.",
        _one(_SCHEDULER, "_plan_saves", "or self.freeze", "or (self.freeze and self._step % 2)"),
    ),
    "freeze_ignored": Mutant(
        "A frozen engine saves.",
        _one(_SCHEDULER, "_plan_saves", " or self.freeze", ""),
    ),
    "bypass_saves": Mutant(
        "A bypassed engine saves.",
        _one(_SCHEDULER, "_plan_saves", " or self.bypass", ""),
    ),
    # ---- leases ---------------------------------------------------------------------------------------------------
    "leased_by_lookup": Mutant(
        "A lookup takes leases; a request that is not admitted never gives them back.",
        _one(
            _SCHEDULER,
            "lookup",
            "tracked.fire(m.LOOKUP_HIT)",
            "tracked.fire(m.LOOKUP_HIT)\n    self.catalog.lease(Owner(request.request_id, -1), [])",
        ),
    ),
    "released_only_for_requests_in_metadata": Mutant(
        "The leases of a load whose request has ended are kept.",
        _one(
            _SCHEDULER,
            "_land",
            "self.catalog.release(flight.owner)",
            "flight.job.request in self._tracked and self.catalog.release(flight.owner)",
        ),
    ),
    "released_when_sent": Mutant(
        "Leases end when the load is sent, not when it has ended.",
        _one(
            _SCHEDULER,
            "_plan_loads",
            "jobs = [flight.job for flight in due]",
            "jobs = [flight.job for flight in due]\n    [self.catalog.release(flight.owner) for flight in due]",
        ),
    ),
    "leased_chunk_evicted": Mutant(
        "A leased chunk may be evicted, and its slot is free at once.",
        (
            Patch(_CATALOG, "lease", "self._policy.remove(chunk)", "pass"),
            Patch(_CATALOG, "_drop", "if chunk.held:", "if chunk.writers:"),
        ),
        by="every_read_is_right",
        shape="async-load",
    ),
    "written_chunk_evicted": Mutant(
        "A chunk that is being written may be dropped, and its slot is free at once.",
        _one(_CATALOG, "_drop", "if chunk.held:", "if chunk.leases:"),
    ),
    "aborted_request_forgets_its_load": Mutant(
        "An aborted request's load is forgotten while its copies run.",
        (
            Patch(
                _SCHEDULER,
                "_finish",
                "for f in self._loads_due if f.tracked is tracked",
                "for f in self._flights.values() if f.tracked is tracked and f.owner",
            ),
            Patch(
                _SCHEDULER,
                "_finish",
                "self._loads_due.remove(flight)",
                "flight in self._loads_due and self._loads_due.remove(flight)",
            ),
        ),
    ),
    # ---- preemption -----------------------------------------------------------------------------------------------
    "block_ids_extended_on_resume": Mutant(
        "A resumed request's new blocks are put behind those that it has lost.",
        _one(
            _SAVING,
            "_table",
            "return table",
            "held = self.__dict__.setdefault('tables', {}).setdefault((tracked, group), [])\n"
            "    held += table[len(held):]\n    return held",
        ),
    ),
    "saved_count_kept_across_preemption": Mutant(
        "A resumed request counts as saved what it had saved before, evicted or not.",
        _one(
            _SCHEDULER,
            "_begin_admission",
            "tracked.saved = held_units",
            "tracked.saved = max(tracked.saved, held_units)",
        ),
        shape="async-scheduler-device-order",
    ),
    "saving_ends_with_a_preemption": Mutant(
        "A resumed request saves nothing any more, as with a test for `input_len == prompt_len`.",
        _one(
            _SCHEDULER,
            "_begin_admission",
            "tracked.next_at = tracked.retries = 0",
            "tracked.retries = 0\n    tracked.next_at = NEVER if tracked.preemptions else 0",
        ),
    ),
    "preemption_unnoticed": Mutant(
        "Nobody notices a preemption.",
        _one(_SCHEDULER, "_notice_preemption", "if now != tracked.preemptions:", "if False:"),
    ),
    "late_notice_believed": Mutant(
        "A preemption's notice that a new admission has overtaken counts as one more.",
        _one(
            _SCHEDULER,
            "_notice_preemption",
            "tracked.fire(m.PREEMPT_LATE)",
            "tracked.fire(m.PREEMPT)\n        tracked.next_at = NEVER",
        ),
    ),
    "lookup_not_idempotent": Mutant(
        "A request's hit is promised once; asked again it has none.",
        _one(
            _SCHEDULER,
            "lookup",
            "tracked.match = None\n",
            "if tracked.match and tracked.match.step == self._step:\n        return 0, False\n"
            "    tracked.match = None\n",
        ),
    ),
    "hit_seen_and_not_loaded": Mutant(
        "A resumed request is promised its hit, and nothing is loaded.",
        _one(_SCHEDULER, "admitted", "if external_tokens <= 0:", "if external_tokens <= 0 or tracked.preemptions:"),
    ),
    "id_of_an_aborted_request_reused": Mutant(
        "A request gets the cursor of the earlier one with its id.",
        (
            Patch(_SCHEDULER, "on_new_request", "if old.request is request:", "if True:"),
            Patch(_SCHEDULER, "_finish", "del self._tracked[tracked.request.request_id]", "pass"),
        ),
    ),
    "epochs_start_anew": Mutant(
        "Epochs count per request, so those of a reused id come again.",
        _one(_SCHEDULER, "_new_epoch", "return self._epochs", "return 1"),
    ),
    # ---- what is final --------------------------------------------------------------------------------------------
    "sliced_at_computed_tokens": Mutant(
        "Tokens count as final up to `num_computed_tokens`, which runs ahead.",
        _one(
            _PREFIXES,
            "final_units",
            "min(min(tokens, request.num_tokens) // self._unit, len(request.block_hashes) // self._hashes_per_unit)",
            "tokens // self._unit",
        ),
        shape="drafts",
    ),
    "not_saved_when_computed_runs_ahead": Mutant(
        "What is computed ahead of the final tokens is skipped, and never come back to.",
        _one(
            _SAVING,
            "plan",
            "units = self._prefixes.final_units(request, end)",
            "units = self._prefixes.final_units(request, end)\n    if end > request.num_tokens:\n"
            "        tracked.next_at = end + self._unit\n        return None",
        ),
        shape="drafts",
    ),
    "decode_not_saved": Mutant(
        "What a request generates is silently not saved.",
        _one(
            _SAVING,
            "plan",
            "units = self._prefixes.final_units(request, end)",
            "units = self._prefixes.final_units(request, min(end, request.num_prompt_tokens))",
        ),
    ),
    "draft_tokens_saved": Mutant(
        "Draft tokens are saved before they are accepted.",
        (
            *_keys("keys_with_drafts"),
            Patch(_PREFIXES, "final_units", "min(tokens, request.num_tokens)", "tokens"),
            Patch(
                _SCHEDULER,
                "_plan_saves",
                "        tracked = tracked_of.get(request_id)\n",
                "        tracked = tracked_of.get(request_id)\n"
                "        tracked.request.drafts = output.scheduled_spec_decode_tokens.get(request_id, [])\n",
            ),
        ),
        shape="drafts",
    ),
    "saved_before_computed": Mutant(
        "The whole prompt is saved with its first piece.",
        _one(
            _SAVING,
            "plan",
            "units = self._prefixes.final_units(request, end)",
            "units = self._prefixes.final_units(request, request.num_tokens)",
        ),
        by="every_read_is_right",
    ),
    # ---- keys -----------------------------------------------------------------------------------------------------
    "key_without_salt": Mutant(
        "Requests with another `cache_salt` share keys.", _keys("keys_without_salt"), by="every_read_is_right"
    ),
    "key_without_lora": Mutant(
        "Requests with another LoRA adapter share keys.", _keys("keys_without_lora"), by="every_read_is_right"
    ),
    "key_without_group": Mutant(
        "Cache groups share one index.",
        (
            Patch(_CATALOG, "index", "self._index[group]", "self._index[0]"),
            Patch(_CATALOG, "find", "self._index[group]", "self._index[0]"),
            Patch(_CATALOG, "known", "key in self._index[group]", "key in self._index[0]"),
        ),
        shape="hybrid",
    ),
    "tail_unchecked": Mutant(
        "A request writes on in a chunk that it has begun, though another has meanwhile.",
        _one(_SAVING, "_claim", "opened.chunk if opened.chunk.tail == before else None", "opened.chunk"),
    ),
    # ---- publishing -----------------------------------------------------------------------------------------------
    "published_before_the_last_layer": Mutant(
        "A save is reported when its step ends, before its last layer has landed.",
        (
            Patch(
                _PIPELINE,
                "_told",
                "        batch.closed = True\n        whole",
                "        batch.closed = True\n"
                "        batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n        whole",
            ),
            Patch(
                _PIPELINE,
                "_report",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        by="every_read_is_right",
        shape="async-scheduler-device-order",
    ),
    "published_when_one_rank_has_landed": Mutant(
        "The first rank's report is enough.",
        _one(_SCHEDULER, "reported", "flight.ok + flight.bad >= self._ranks", "flight.ok + flight.bad"),
        shape="async-scheduler-hybrid",
        by="every_read_is_right",
    ),
    "one_good_rank_is_enough": Mutant(
        "A chunk is published that one rank has and another has failed.",
        _one(_SCHEDULER, "_land_save", "if not flight.bad and", "if flight.ok and"),
        shape="two-ranks",
        by="every_read_is_right",
    ),
    "published_with_a_hole": Mutant(
        "A piece is published though the piece before it was lost.",
        _one(_CATALOG, "landed", "chunk.ready == piece.start and", ""),
    ),
    "published_after_eviction": Mutant(
        "A piece that lands after its chunk was dropped can be found.",
        _one(_CATALOG, "landed", " and chunk.state.row != m.EVICTING", ""),
        shape="async-scheduler-drafts",
    ),
    "failed_copy_believed": Mutant(
        "A save whose copy has failed counts as landed.",
        _one(
            _PIPELINE,
            "_landed",
            "if job.id in ticket.failed:",
            "if job.id in ticket.failed and batch.kind is not Kind.SAVE:",
        ),
    ),
    "redelivery_counts": Mutant(
        "A completion that is delivered twice counts for two layers.",
        _one("kvpipe.statemachine.save:LayerCursor", "landed", "if ahead == 1", "if ahead in (0, 1)"),
    ),
    "gap_tolerated": Mutant(
        "A completion beyond the next layer counts as the next.",
        _one("kvpipe.statemachine.save:LayerCursor", "landed", "if ahead == 1", "if ahead >= 1"),
    ),
    "missing_layer_overlooked": Mutant(
        "A step end with missing layers counts as complete.",
        _one(_PIPELINE, "_told", "whole = batch.submitted == self._all", "whole = True"),
    ),
    "saves_beside_a_failed_load_believed": Mutant(
        "What is computed from a failed load is saved: neither the rank nor the scheduler's side drops it.",
        (
            Patch(_PIPELINE, "_junk", "if self._save is not None:", "if False:"),
            Patch(_SCHEDULER, "_distrust", "flight.distrusted = True", "pass"),
            Patch(_SCHEDULER, "invalidated", "flight.distrusted = True", "pass"),
        ),
    ),
    "reset_does_not_stop_saves": Mutant(
        "Requests that live through a reset go on to be saved.",
        _one(_SCHEDULER, "reset", "self._saving.give_up(tracked)", "pass"),
    ),
    "reset_spares_what_is_being_written": Mutant(
        "A reset drops what can be found, and not what is being written.",
        _one(_CATALOG, "reset", " | {id(c): c for c in self._reserved}", ""),
        shape="async-scheduler-drafts",
    ),
    "second_rank_overwrites_the_first": Mutant(
        "Ranks' reports of one step are not added up.",
        _one(
            "kvpipe.connectors.vllm.metadata:ReportMetadata",
            "aggregate",
            "Tally(mine.ok + tally.ok, mine.bad + tally.bad)",
            "tally",
        ),
        shape="two-ranks",
    ),
    "old_marks_stay": Mutant(
        "A chunk that has grown can still be found by what it was, when that is no mark of it any more.",
        _one(_CATALOG, "_mark", "if old not in kept and", "if False and"),
    ),
    # ---- races and failures ---------------------------------------------------------------------------------------
    "load_not_waited_for": Mutant(
        "Attention reads a layer before its copy has landed.",
        _one(_PIPELINE, "wait_layer", "elif not self._timed(self._engine.guard_read, ticket):", "elif False:"),
    ),
    "load_waited_for_by_count": Mutant(
        "The k-th wait waits for layer k, whatever its name.",
        _one(
            _WORKER,
            "wait_layer",
            "self._index.get(name)",
            "self.pipeline._sync.waited.bit_count() % len(self._index) if self.pipeline._sync else None",
        ),
    ),
    "step_mode_without_wait": Mutant(
        "Without hooks between layers nobody waits for loads.",
        _one(_PIPELINE, "start_loads", "self.wait_layer(layer)", "pass"),
        shape="step-mode",
    ),
    "source_reused_before_the_copy": Mutant(
        "The step ends before its copies have read their blocks.",
        _one(_PIPELINE, "end_step", "if batch.last is not None and not self._timed", "if False and self._timed"),
    ),
    "unwaited_layer_believed": Mutant(
        "A load counts as good though attention has read a layer without waiting.",
        _one(_PIPELINE, "end_loads", "elif batch.waited == self._all:", "elif not batch.gave_up:"),
        by="every_read_is_right",
    ),
    "failed_sync_load_not_reported": Mutant(
        "vLLM is not told which blocks hold garbage.",
        _one(_WORKER, "_account", "self._bad_blocks |= job.blocks()", "pass"),
    ),
    "failed_async_load_not_reported": Mutant(
        "vLLM is told that an asynchronous load has ended, not that it has failed.",
        _one(_WORKER, "_account", "self._failed.add(job.request)", "pass"),
        shape="async-load",
    ),
    "lost_load_not_reported": Mutant(
        "A load that was waited for in vain is not reported.",
        _one(_PIPELINE, "_suspect", "self._suspects |= job.blocks()", "pass"),
    ),
    "async_load_reported_twice": Mutant(
        "vLLM is told twice that a load has ended.",
        _one(
            _WORKER,
            "collect",
            "self._received = self._received, set()",
            "self._received = self._received, self._received",
        ),
        shape="async-load",
    ),
    "load_reported_before_it_ends": Mutant(
        "An asynchronous load is reported when it is submitted.",
        (
            Patch(
                _PIPELINE,
                "_told",
                "        batch.closed = True\n        return\n",
                "        batch.closed = True\n        if batch.kind is Kind.LOAD_ASYNC:\n"
                "            batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n        return\n",
            ),
            Patch(
                _PIPELINE,
                "_report",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        shape="async-load",
    ),
    "lost_load_reported_again": Mutant(
        "Blocks of a load that was reported in its step are reported again when its copies end.",
        _one(_WORKER, "_account", " and why != TOLD", ""),
    ),
    "garbage_left_in_the_prefix_cache": Mutant(
        "After a failed load its blocks stay hits of vLLM's own prefix cache.",
        _one(_SCHEDULER, "_distrust", "self._forget_local_hits(failed)", "pass"),
        shape="device-order",
    ),
    "spoiled_block_left_to_another": Mutant(
        "A block that a failed load has spoiled is left to the first of those that share it, aborted or not.",
        _one(_SCHEDULER, "_plan_loads", "if self._spoiled:", "if False:"),
    ),
    "failed_load_tried_for_ever": Mutant(
        "A request whose load has failed is promised the same hit again.",
        _one(_SCHEDULER, "_why_not", "tracked.state.row == m.RECOMPUTING", "False"),
    ),
    "async_loads_hold_what_others_need": Mutant(
        "Asynchronous loads are taken whether or not there is room for all who hold blocks.",
        _one(_SCHEDULER, "lookup", " and not self._room.fits(request, self._manager)", " and False"),
        shape="hybrid",
    ),
    "promise_not_kept": Mutant(
        "A hit that was promised between steps is loaded in its step, or the other way round.",
        _one(_SCHEDULER, "admitted", "waits = self._async if match is None else match.waits", "waits = self._async"),
        shape="either-load",
    ),
    "reports_not_waited_for": Mutant(
        "The engine stops stepping while ranks still owe reports.",
        _one(_CONNECTOR, "has_pending_push_work", "self.scheduler.pending", "False"),
        shape="device-order",
    ),
    "moves_not_traced": Mutant(
        "A machine's move is not told to whoever watches.",
        _one(_CURSOR, "fire", "if self.watch is not None:", "if self.watch is not None and event != 'landed_next':"),
    ),
    # ---- finding and loading --------------------------------------------------------------------------------------
    "window_not_needed": Mutant(
        "A hit counts though the sliding window before its end is not held.",
        _one(_PREFIXES, "longest", "while best and self._windows:", "while False:"),
        shape="hybrid",
    ),
    "nothing_left_to_compute": Mutant(
        "A load inside a step may cover the whole prompt.",
        _one(_SCHEDULER, "lookup", "min(tokens, request.num_tokens - 1)", "tokens"),
        shape="device-order",
    ),
    "loaded_from_the_chunk_before": Mutant(
        "Blocks in the middle of a chunk are loaded from its beginning.",
        _one(_SCHEDULER, "_load_rows", "(page - base * pages, table[page].block_id)", "(0, table[page].block_id)"),
    ),
    "loaded_over_local_hits": Mutant(
        "What vLLM holds itself is loaded over once more, though others read it.",
        _one(_SCHEDULER, "admitted", "first = match.local_tokens // self._unit", "first = 0"),
        shape="async-load",
    ),
    "window_blocks_saved": Mutant(
        "Blocks outside of a sliding window, which vLLM has given away, are saved.",
        _one(_SAVING, "_any_null", "any(table[i].is_null for i in range(first, stop))", "False"),
        shape="hybrid",
    ),
    "retried_without_end": Mutant(
        "A save that fails is tried again without end.",
        _one(_SCHEDULER, "_land_save", "tracked.retries < SAVE_RETRIES_MAX and", ""),
    ),
    "whole_prompt_every_step": Mutant(
        "Every step saves the whole prefix anew.",
        _one(
            _SAVING,
            "plan",
            "first, tracked.saved = tracked.saved, units",
            "first, tracked.saved = 0, units\n    self._catalog._pending[0].clear()",
        ),
    ),
    # ---- tiers ----------------------------------------------------------------------------------------------------
    "fetch_believed": Mutant(
        "A fetched chunk is published though a rank could not bring it.",
        _one(_STAGING, "_landed", "if carriage.bad:", "if False:"),
        "tier",
        "findable_chunks_are_whole_and_true",
    ),
    "bytes_not_checked": Mutant(
        "What a tier returns is taken for what was stored.",
        _one("kvpipe.tiers.envelope:Sealer", "unseal", 'raise DamagedError("checksum")', "pass"),
        "tier",
        "findable_chunks_are_whole_and_true",
    ),
    "first_rank_decides": Mutant(
        "A fetched chunk is published when one rank of several has it.",
        _one(_STAGING, "reported", "carriage.ok + carriage.bad >= self._ranks", "carriage.ok"),
        "two-tiers",
    ),
    "stage_leases_kept": Mutant(
        "A request that waited for a tier keeps its chunks for ever.",
        _one(_STAGING, "_end", "self._leased -= self._catalog.release(stage.owner, hit=False)", "pass"),
        "tier",
        "nothing_is_held",
    ),
    "store_leases_kept": Mutant(
        "A chunk that was stored in a tier is held for ever.",
        _one(
            _STORING,
            "over",
            "self._catalog.release(self.under_way.pop(order.id), hit=False)",
            "self.under_way.pop(order.id)",
        ),
        "tier",
        "nothing_is_held",
    ),
    "store_not_leased": Mutant(
        "A chunk on its way to a tier may be evicted, and its slot filled anew, meanwhile.",
        _one(_STORING, "plan", "self._catalog.lease(owner, [chunk])", "pass"),
        "tier",
        "leases_have_owners",
    ),
    "parts_not_told_apart": Mutant(
        "All ranks write their parts of a chunk under one name.",
        (
            Patch("kvpipe.tiers.carrier:Carrier", "_carry", "order.group, self._rank,", "order.group, 0,"),
            Patch("kvpipe.tiers.finder:Finder", "_exists", "lookup.digest), group, rank", "lookup.digest), group, 0"),
        ),
        "two-tiers",
    ),
    "groups_not_told_apart": Mutant(
        "All cache groups write their chunks under one name.",
        (
            Patch("kvpipe.tiers.carrier:Carrier", "_carry", "order.chunk, order.group, self", "order.chunk, 0, self"),
            Patch("kvpipe.tiers.finder:Finder", "_exists", "lookup.digest), group, rank", "lookup.digest), 0, rank"),
        ),
        "tier-hybrid",
        "findable_chunks_are_whole_and_true",
    ),
}


def keys_without_salt(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have without its `cache_salt`."""
    return _hashes_of(request, cache_salt=None) if request.cache_salt else request.block_hashes  # type: ignore[return-value]


def keys_without_lora(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have without its LoRA adapter."""
    return _hashes_of(request, lora_request=None) if request.lora_request else request.block_hashes  # type: ignore[return-value]


def keys_with_drafts(request: Request) -> list[bytes]:
    """Return the block hashes that `request` would have if its draft tokens were accepted."""
    drafts = [token for token in getattr(request, "drafts", ()) if token >= 0]
    if not drafts:
        return request.block_hashes  # type: ignore[return-value]
    return _hashes_of(request, _all_token_ids=[*request._all_token_ids, *drafts])  # noqa: SLF001


def _hashes_of(request: Request, **changes: object) -> list[bytes]:
    clone: Any = copy.copy(request)
    vars(clone).update(changes, block_hashes=[])
    if "_all_token_ids" in changes:
        clone.all_token_ids = changes["_all_token_ids"]
    hashes: list[bytes] = _hasher()(clone)
    return hashes


@functools.cache
def _hasher() -> Callable[[Any], Any]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(BLOCK, sha256)
