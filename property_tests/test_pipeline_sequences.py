"""With any calls, and copies that end in order, no call raises, and each job is reported once with its true outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpipe.protocol.messages import Job, Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from property_tests.profiles import examples
from tests.rigs.pipeline_rig import Rig, Waiting, job, plan, rows

LAYERS = 3
KINDS = st.sampled_from([0, 0, 1, 1, 2, 2, 9])
SPOILED = st.sampled_from(["", "", "", "", "slot", "cut"])


@dataclass
class Step:
    """One step: the ids of the step's jobs, the layers whose hooks were called, and whether the step has ended."""

    saves: set[int] = field(default_factory=set)
    syncs: set[int] = field(default_factory=set)
    waited: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    ended: bool = False


class Sequences(RuleBasedStateMachine):
    """vLLM's thread makes random calls while copies complete in order at any time. Some copies fail."""

    layerwise = True

    def __init__(self) -> None:
        """Make one pipeline. No step has begun."""
        super().__init__()
        self.rig = Rig(layerwise=self.layerwise)
        self.rig.engine.failing = self._failing
        self.fail_next, self.refuse_next = 0, False
        self.jobs: dict[int, Job] = {}
        self.steps: list[Step] = [Step()]
        self.reported: dict[int, bool] = {}
        self.down = False

    def _failing(self, copies: CopyPlan, ticket: Ticket) -> frozenset[int]:
        assert 0 <= ticket.layer < LAYERS
        if self.refuse_next:
            self.refuse_next = False
            msg = "no thread could be started"
            raise RuntimeError(msg)
        if not self.fail_next:
            return frozenset()
        chosen = frozenset(j.id for j in copies.jobs if j.id % 2 or self.fail_next > 1)
        self.fail_next = 0
        return chosen

    # ---- the calls ------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(st.tuples(KINDS, SPOILED), max_size=4))
    def begin(self, wanted: list[tuple[int, str]]) -> None:
        """Begin a step. The previous step may not have ended."""
        made = []
        step = Step()
        for kind, spoiled in wanted:
            new = job(len(self.jobs), kind)
            if spoiled == "slot":
                new = new._replace(rows=rows([(0, 77, 0, 0)]))
            elif spoiled == "cut":
                new = new._replace(rows=new.rows[:-1])
            self.jobs[new.id] = new
            made.append(new)
            if kind == Kind.SAVE:
                step.saves.add(new.id)
            elif kind != Kind.LOAD_ASYNC:
                step.syncs.add(new.id)
        self.steps.append(step)
        self.rig.pipeline.begin(plan(*made))

    @rule()
    def start_loads(self) -> None:
        """Start the step's loads, perhaps a second time."""
        self.rig.pipeline.start_loads()

    @rule(layer=st.integers(0, LAYERS - 1))
    def wait_layer(self, layer: int) -> None:
        """Run a layer's load hook."""
        self.rig.pipeline.wait_layer(layer)
        self.steps[-1].waited.add(layer)

    @rule(layer=st.integers(0, LAYERS - 1))
    def save_layer(self, layer: int) -> None:
        """Run a layer's save hook."""
        self.rig.pipeline.save_layer(layer)
        self.steps[-1].saved.add(layer)

    @rule()
    def all_hooks(self) -> None:
        """Run every hook of a correct step."""
        self.start_loads()
        for layer in range(LAYERS):
            self.wait_layer(layer)
            self.save_layer(layer)

    @rule()
    def end_loads(self) -> None:
        """End the step's loads."""
        self.rig.pipeline.end_loads()

    @rule()
    def end_step(self) -> None:
        """End the step."""
        self.rig.pipeline.end_step()
        self.steps[-1].ended = True

    @rule()
    def collect(self) -> None:
        """Collect the outcomes and check them."""
        if not self.down:
            self.rig.settle()
        copies = self.rig.engine.copies
        for outcome in self.rig.pipeline.collect():
            number = outcome.job.id
            assert number not in self.reported, "reported twice"
            assert outcome.job == self.jobs[number]
            self.reported[number] = outcome.ok
            mine = [c for c in copies if number in {j.id for j in c.plan.jobs}]
            assert all(c.ticket.done for c in mine), "reported with a copy in flight"
            if outcome.ok:
                assert sorted(k for c in mine for k in c.ticket.layers) == list(range(LAYERS)), "good, but not whole"
                assert not any(number in c.failed for c in mine), "good, but a copy failed"
                self._judge_good(number)
            else:
                assert outcome.why

    def _judge_good(self, number: int) -> None:
        step = next((s for s in self.steps if number in s.saves | s.syncs), None)
        if step is None:
            return  # asynchronous load
        if number in step.saves:
            assert step.ended, "a save is good only after its step's end"
            assert not self.layerwise or step.saved == set(range(LAYERS))
        elif self.layerwise:
            assert step.waited == set(range(LAYERS)), "a load is good only if every layer waited"

    # ---- the engine -----------------------------------------------------------------------------------------------

    @rule(direction=st.sampled_from(Direction), count=st.integers(1, 4))
    def complete(self, direction: Direction, count: int) -> None:
        """Complete the oldest copies of one direction."""
        self.rig.engine.complete(direction, min(count, len(self.rig.engine.queues[direction])))

    @rule(waiting=st.sampled_from(Waiting))
    def change_waiting(self, waiting: Waiting) -> None:
        """From now on, waits succeed, time out, or are made by the device."""
        self.rig.engine.waiting = waiting

    @rule(who=st.integers(1, 2))
    def fail_the_next_copy(self, who: int) -> None:
        """Make the next submission fail: for the jobs with odd ids if `who` is 1, for all jobs if `who` is 2."""
        self.fail_next = who

    @rule()
    def refuse_the_next_copy(self) -> None:
        """Make the next submission raise an exception, although a transfer engine should not raise."""
        self.refuse_next = True

    @precondition(lambda self: not self.down and len(self.steps) > 4)
    @rule()
    def shutdown(self) -> None:
        """Shut the pipeline down. Later rules still call the pipeline."""
        self.rig.pipeline.shutdown()
        self.down = True

    # ---- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def no_bug_of_ours(self) -> None:
        """Check that no transition was illegal and no handler failed."""
        assert self.rig.counters["illegal_transition"] == 0
        assert self.rig.pipeline.copies.loop.errors == 0
        assert self.rig.counters["loop_did_not_settle"] == 0

    def teardown(self) -> None:
        """Check that every job was reported once after a shutdown, and that no save succeeded beside a failed load."""
        self.rig.pipeline.shutdown()
        self.down = True
        self.collect()
        assert self.rig.pipeline.in_flight == 0
        assert set(self.reported) == set(self.jobs)
        for step in self.steps:
            if any(self.reported[number] for number in step.saves):
                assert all(self.reported[number] for number in step.syncs), "saved over a failed load"
        self.collect()


class StepModeSequences(Sequences):
    """The same test in step mode."""

    layerwise = False


TestSequences = Sequences.TestCase
TestSequences.settings = examples(120, 30)
TestStepModeSequences = StepModeSequences.TestCase
TestStepModeSequences.settings = examples(60, 30)
