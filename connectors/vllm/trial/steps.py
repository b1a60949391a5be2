"""The steps of a trial: vLLM's scheduler schedules a step, fake ranks run it, and the scheduler gets their reports."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpipe.connectors.vllm.trial.arrivals import Arrivals
from kvpipe.connectors.vllm.trial.content import WRONG_TOKEN, Live
from kvpipe.connectors.vllm.trial.drafts import Drafter
from kvpipe.connectors.vllm.trial.rank import Rank, RankOutput, Runner, TrialStep, Wrong
from kvpipe.connectors.vllm.trial.shapes import Shape
from kvpipe.connectors.vllm.trial.tap import plan_in
from kvpipe.protocol.messages import Kind

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

UNPAUSED, THROTTLED = 0, 3


def ignore(*_: object) -> None:
    """Ignore the call."""


class Steps(Arrivals):
    """The moves of a trial that schedule steps, run them, and return their results to the scheduler."""

    runners: list[Runner]
    aggregator: KVOutputAggregator

    def __init__(self, shape: Shape, seed: int) -> None:
        """`seed` determines the documents and the drafts.

        If `seed` is even, messages between the two sides are pickled.
        """
        super().__init__(shape, seed)
        self._pickles = seed % 2 == 0
        self.ranks = list[Rank]()
        self.on_schedule: Callable[[SchedulerOutput], object] = ignore
        self.on_leave: Callable[[Live], object] = ignore
        self.on_update: Callable[[], object] = ignore
        self.steps = self.reads = self._pauses = 0
        self.wrong = list[Wrong]()
        self.let_down = set[str]()  # requests whose failed asynchronous loads were reported to vLLM
        self._throttled = False
        self._scheduled, self._executed = deque[TrialStep](), deque[tuple[TrialStep, "ModelRunnerOutput", set[str]]]()
        # steps that only the first stage of a pipeline has run
        self._begun = deque[tuple[TrialStep, dict[str, list[int]], list[RankOutput]]]()
        self._drafter = Drafter(seed + 1, shape.drafts)
        self._invalid = deque[set[int]](maxlen=8)  # blocks of failed loads that each of the last steps has reported

    @abstractmethod
    def _settle_tiers(self) -> None:
        """Wait until every call to a tier has ended or is held back."""

    @property
    def in_flight(self) -> int:
        """The number of steps that were scheduled and whose results the scheduler has not processed."""
        return len(self._scheduled) + len(self._begun) + len(self._executed)

    def _in_flight_steps(self) -> list[TrialStep]:
        return [*self._scheduled, *(step for step, *_ in self._begun), *(step for step, *_ in self._executed)]

    def _schedule(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self._pause(UNPAUSED, 0)
        if self.in_flight >= self.shape.steps_in_flight or not self.scheduler.has_requests():
            return
        self._settle_tiers()
        output = self.scheduler.schedule(throttle_prefills=self._throttled)
        self.on_schedule(output)
        if self._pickles:
            output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301
        scheduled = output.num_scheduled_tokens
        sampling = frozenset(r for r in scheduled if not self.scheduler.requests[r].is_prefill_chunk)
        sequences = {r: self.live[r].sequence for r in scheduled}
        self._scheduled.append(TrialStep(output, sampling, sequences, self.in_flight))

    def _execute(self) -> None:
        """Run the oldest scheduled step.

        In a pipeline, only the first stage runs the step. If no scheduled step is left, the other stages run the oldest
        step that the first stage has run.
        """
        if self._scheduled:
            step = self._scheduled.popleft()
            drafts = self._drafts(step)
            ran = [one.execute(step, drafts) for i, one in enumerate(self.runners) if not self.shape.stage_of(i)]
            self._begun.append((step, drafts, ran))
            if self.shape.stages > 1:
                return
        self._finish()

    def _finish(self) -> None:
        """Run the remaining pipeline stages of the oldest step whose first stage has run."""
        if self._begun:
            step, drafts, ran = self._begun.popleft()
            ran += [one.execute(step, drafts) for one in self.runners[len(ran) :]]
            result = self._result(step, ran)
            self._executed.append((step, result, self._holders(step, result)))
            self.steps += 1

    def _update(self) -> None:
        if not self._executed and not self._begun:
            self._execute()
        if not self._executed:
            self._finish()
        if not self._executed:
            return
        from vllm.v1.engine import FinishReason

        step, result, holders = self._executed.popleft()
        reported = result.kv_connector_output
        if holders and reported is not None:
            holders |= self._sharing(reported.invalid_block_ids)
        self.let_down |= reported.failed_recving if reported is not None else set()
        for outputs in self.scheduler.update_from_output(step.output, result).values():
            for one in outputs.outputs:
                self.live[one.request_id].output += one.new_token_ids
                if one.finish_reason == FinishReason.ERROR:
                    self._cut_short(one.request_id, holders | reported.failed_recving if reported else holders)
        self.wrong = [wrong for wrong in self.wrong if wrong.request not in self.cut_short]
        self._gone()
        if self.shape.drafts and not self.shape.asynchronous:
            self._propose(step)
        self.on_update()

    def _cut_short(self, request: str, let_down: set[str]) -> None:
        """Excuse a request that vLLM has ended because a load failed.

        The request's answer is short, and its last reads are wrong. `let_down` are the requests that have blocks of a
        load that the step has reported as failed.
        """
        if self.shape.fails and request in let_down:
            self.live[request].aborted = True
            self.cut_short.add(request)
        else:
            self.violations.append(f"right_answers: {request} was ended, but has no block of a load that failed")

    def _holders(self, step: TrialStep, result: ModelRunnerOutput) -> set[str]:
        """Return the requests that have a block of a load that failed within `step`."""
        reported = result.kv_connector_output
        if reported is None or not reported.invalid_block_ids:
            return set()
        invalid: set[int] = reported.invalid_block_ids
        failed = invalid & self._loaded(step) if self.kvpipe is not None else invalid
        return set().union(*(rank.holders(failed) for rank in self.ranks))

    def _sharing(self, blocks: set[int]) -> set[str]:
        """Return the requests that share `blocks`.

        Steps in flight have admitted these requests with `blocks` as computed blocks.
        """
        found = set[str]()
        for step in self._in_flight_steps():
            cached, size = step.output.scheduled_cached_reqs, self.shape.block_tokens[0]
            admitted = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in step.output.scheduled_new_reqs]
            rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
            admitted += [(one, ids, computed) for one, ids, computed in rows if one in cached.resumed_req_ids and ids]
            for request, tables, computed in admitted:
                if blocks & {*tables[0][: -(-computed // size)]} - self._loaded(step, request):
                    found.add(request)
        return found

    def _loaded(self, step: TrialStep, request: str = "") -> set[int]:
        """Return the blocks that kvpipe loads within `step`, for all requests or only for `request`."""
        jobs = plan_in(step.output.kv_connector_metadata).jobs if self.kvpipe is not None else ()
        mine = [job for job in jobs if job.kind == Kind.LOAD_SYNC and request in {"", job.request}]
        return {block for job in mine for block in job.blocks()}

    def _step(self, count: int = 1) -> None:
        for _ in range(1 + count % 8):
            while self.in_flight < self.shape.steps_in_flight and self.scheduler.has_requests():
                self._schedule()
            self._update()

    def _gone(self) -> None:
        for one in list(self.live.values()):
            if one.id in self.scheduler.requests:
                self._advance(one)
            else:
                self._leave(self.live.pop(one.id))

    def _leave(self, one: Live) -> None:
        self.over.append(one)
        self.on_leave(one)
        expected = one.expected
        if one.output != (expected[: len(one.output)] if one.aborted else expected):
            self.violations.append(f"right_answers: {one.id} answered {one.output} instead of {expected}")

    def _result(self, step: TrialStep, ran: list[RankOutput]) -> ModelRunnerOutput:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(step.output.num_scheduled_tokens)
        results: list[ModelRunnerOutput | None] = []
        bad = {w.request for one in ran for w in one.wrong}
        for one in ran:
            kv_output: KVConnectorOutput = one.kv_output
            if self._pickles:
                kv_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(kv_output.kv_connector_worker_meta))  # noqa: S301
            results.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={r: i for i, r in enumerate(ids)},
                    sampled_token_ids=[
                        [] if r not in step.sampling else [WRONG_TOKEN] if r in bad else one.sampled[r] for r in ids
                    ],
                    kv_connector_output=None if kv_output.is_empty() else kv_output,
                )
            )
        result = results[0] if len(results) == 1 else self.aggregator.aggregate(results)
        assert result is not None  # noqa: S101
        reported = result.kv_connector_output
        invalid: set[int] = reported.invalid_block_ids if reported is not None else set()
        others = invalid - self._loaded(step) if self.kvpipe is not None and invalid else ()
        if others:
            self.violations.append(f"only_failed_blocks_are_reported: {others}, which this step has not loaded")
        late = list(self._invalid)[-step.undigested :] if self.shape.fails and step.undigested else ()
        self._invalid.append(invalid)
        for wrong in (w for one in ran for w in one.wrong):  # vLLM discards results that depend on invalid blocks
            table = self.ranks[wrong.rank].table(wrong.request)
            if wrong.request not in self.cut_short and not invalid.union(*late) & table:
                self.wrong.append(wrong)
        self.reads += len(ids) * sum(len(rank.layers) for rank in self.ranks)
        return result

    def _drafts(self, step: TrialStep) -> dict[str, list[int]]:
        output, out = step.output, {}
        fresh = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request, tokens in output.scheduled_spec_decode_tokens.items():
            # the scheduler has placeholders, and only the runner knows its drafts
            if self.shape.asynchronous and request not in fresh:
                stop = self.runners[0].computed(request)
                scheduled = output.num_scheduled_tokens[request]
                out[request] = self._drafter.guess(step.sequences[request], stop + scheduled - len(tokens), len(tokens))
            else:
                out[request] = list(tokens)  # placeholders of a fresh request are rejected
        return out

    def _propose(self, step: TrialStep) -> None:
        from vllm.v1.outputs import DraftTokenIds

        ids = [r for r in step.sampling if r in self.live]
        guesses = []
        for request_id in ids:
            one = self.live[request_id]
            guesses.append(self._drafter.propose(one.sequence, len(one.sequence.prompt) + len(one.output)))
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, guesses))

    def _pause(self, what: int, steps: int) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._pauses, self._throttled = steps, what == THROTTLED
        self.scheduler.set_pause_state(PauseState.UNPAUSED if self._throttled else PauseState(what))
