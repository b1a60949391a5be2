"""A pytest plugin for vLLM's own tests of its scheduler: each scheduler in these tests gets kvpipe on both sides.

Run `pytest -p attached tests/v1/core` in a folder that `tests.contract.fetch --tests` has made, with this folder on the
path.

The scheduler is vLLM's. Behind the scheduler, a fake rank writes and reads the KV of every scheduled request and runs
the hooks. A load of wrong bytes fails the test, as does every fault that kvpipe counts. A test that configures its own
connector, or a feature that kvpipe refuses, runs unchanged. `attached_tests.py` lists the tests that must fail.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import attached_models
import pytest
from attached_models import IMAGES
from attached_tests import BLASTS

from kvpipe.connectors.vllm.trial.content import Sequence
from kvpipe.connectors.vllm.trial.paged import PagedLayer
from kvpipe.connectors.vllm.trial.rank import Access, Rank, TrialStep
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, Shape
from kvpipe.connectors.vllm.trial.trial import measured_once
from kvpipe.errors import UnsupportedError
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.counters import FaultName

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

BLOCKS_PER_CHUNK = 4
SETTINGS = {"pool_bytes_max": 1 << 20, "prefault": "use", "copy_threads": 0, "log_level": "error"}
"""The settings that differ from kvpipe's defaults: a small pool, and copies for which a test need not wait."""
IMAGE_TOKENS_MAX = 576
BLAST_STEPS = 150
SETTLE_SECONDS_MAX = 120.0
_BAD: tuple[FaultName, ...] = ("contained_error", "illegal_transition", "loop_lost", "loop_did_not_settle")


class Known(Sequence):
    """The known tokens of a request. Drafts, or the next turn of a session, may change these tokens."""

    def become(self, tokens: list[int]) -> None:
        """Use `tokens` from now on, and keep the hashes of the common beginning."""
        same = min(len(tokens), len(self.tokens))
        if tokens[:same] != self.tokens[:same]:
            same = next(i for i in range(same) if tokens[i] != self.tokens[i])
        self.prompt, self.tokens, self.hashes = tokens, self.tokens[:same], self.hashes[:same]


NOTHING_KNOWN = Sequence([])


class ScheduledStep(NamedTuple):
    """A scheduled step, with its requests, and the number of preemptions of each request until then."""

    output: SchedulerOutput
    requests: dict[str, tuple[Request, int]]


class AttachedRank(Rank):
    """A rank that runs every step that a test schedules. The test decides which tokens are sampled."""

    now: dict[str, int]
    blind = False

    def _accesses(self, layer: PagedLayer, step: TrialStep, drafts: dict[str, list[int]]) -> list[Access]:
        return [] if self.blind else super()._accesses(layer, step, drafts)

    def _update_states(self, output: SchedulerOutput) -> None:
        super()._update_states(output)
        self._computed |= self.now

    def _count(self, request: str, step: TrialStep, drafts: list[int]) -> list[int]:
        del request, step, drafts
        return []


class Attachment:
    """kvpipe on both sides of one scheduler."""

    def __init__(self, scheduler: Scheduler, shape: Shape) -> None:
        """Put a rank behind `scheduler`, whose connector is kvpipe's scheduler side."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.outputs import KVConnectorOutput

        self.scheduler, self.side = scheduler, scheduler.connector
        cache = scheduler.kv_cache_config
        worker = KVConnectorFactory.create_connector(scheduler.vllm_config, KVConnectorRole.WORKER, cache)
        self.rank = AttachedRank(0, worker, shape, [group.layer_names for group in cache.kv_cache_groups])
        worker.worker.weigh = lambda: "weights"  # type: ignore[attr-defined]
        assert self.side is not None
        with patch("kvpipe.connectors.vllm.identity.numerics.measured", measured_once()):
            report = worker.build_connector_worker_meta()
        self.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        self.rank.before_results = lambda: worker.worker.pipeline.copies.loop.settle(SETTLE_SECONDS_MAX)  # type: ignore[attr-defined]
        self._aggregator = KVOutputAggregator(1)
        self._sequences: dict[str, Known] = {}
        self._queue: deque[ScheduledStep] = deque()
        self.wrong: list[str] = []
        self.steps = 0
        self.sane = True  # False after a test has sampled tokens that no model would sample
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule = self.schedule  # type: ignore[method-assign]
        scheduler.update_from_output = self.update_from_output  # type: ignore[method-assign]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Let vLLM schedule a step, and queue the step for the rank."""
        output = self._schedule(*args, **kwargs)
        known = self.scheduler.requests
        self._queue.append(
            ScheduledStep(output, {r: (known[r], known[r].num_preemptions) for r in output.num_scheduled_tokens})
        )
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> Any:
        """Run all steps up to this step on the rank. Add the rank's report to the result that the test gives."""
        if any(one.output is output for one in self._queue):
            ran: list[tuple[SchedulerOutput, KVConnectorOutput]] = []
            while not ran or ran[-1][0] is not output:
                ran.append((self._queue[0].output, self._run()))
            results = [dataclasses.replace(result, kv_connector_output=kv) for _, kv in ran]
            message = self._aggregator.aggregate([result, *results])
            assert message is not None
            result = message
            self.sane = self.sane and _sane(output, result)
        return self._update(output, result)

    def _run(self) -> KVConnectorOutput:
        queued = self._queue[0]
        sequences: dict[str, Sequence] = {}
        self.rank.now = {}
        self.rank.blind = not self.sane
        for request_id, (request, preemptions) in queued.requests.items():
            sequences[request_id] = NOTHING_KNOWN
            if not self.sane:
                continue
            tokens = list(request.all_token_ids) if request.prompt_token_ids is not None else [0] * request.num_tokens
            if self.scheduler.requests.get(request_id) is request and request.num_preemptions == preemptions:
                later = sum(
                    one.output.num_scheduled_tokens[request_id]
                    for one in self._queue
                    if one.requests.get(request_id) == (request, preemptions)
                )
                self.rank.now[request_id] = max(0, request.num_computed_tokens - later)
            sequences[request_id] = self._sequence(request, tokens, queued.output)
        self._queue.popleft()
        ran = self.rank.execute(TrialStep(queued.output, frozenset(), sequences), {})
        self.steps += 1
        invalid = ran.kv_output.invalid_block_ids
        self.wrong += [str(one) for one in ran.wrong if not invalid & self.rank.table(one.request)]
        return ran.kv_output

    def _sequence(self, request: Request, tokens: list[int], output: SchedulerOutput) -> Sequence:
        """Return the tokens that the step computes: known tokens, then drafts. An image has tokens of its own."""
        for feature in request.mm_features:
            where = feature.mm_position
            for i in range(where.offset, min(where.offset + where.length, len(tokens))):
                tokens[i] = hash((feature.identifier, i - where.offset)) & 0xFFFFFFFF
        known = self._sequences.get(request.request_id)
        if known is None:
            lora = request.lora_request.lora_name if request.lora_request is not None else ""
            known = self._sequences[request.request_id] = Known([], f"{request.cache_salt}/{lora}")
        known.become(tokens + output.scheduled_spec_decode_tokens.get(request.request_id, []))
        return known

    def close(self) -> list[str]:
        """End both sides. Return the faults that were found."""
        from kvpipe.connectors.vllm.connector import KVPipeConnector

        found = [f"a wrong read: {one}" for one in self.wrong[:3]]
        for side in (self.side, self.rank.connector):
            assert isinstance(side, KVPipeConnector)
            found += [f"{side.counters[name]} x {name}" for name in _BAD if side.counters[name]]
            if side.scheduler is not None:
                check_integrity(side.scheduler.catalog)
            side.shutdown()
        return found


def _sane(output: SchedulerOutput, result: ModelRunnerOutput) -> bool:
    """Whether a model could have sampled `result`: accepted drafts and one more token."""
    for request_id, i in result.req_id_to_index.items():
        tokens = result.sampled_token_ids[i] if result.sampled_token_ids else []
        if list(tokens[:-1]) != output.scheduled_spec_decode_tokens.get(request_id, [])[: max(0, len(tokens) - 1)]:
            return False
    return True


class Attached:
    """The kvpipe connectors that the tests of a run were given, and counts over all of these tests."""

    def __init__(self) -> None:
        self.live: list[Attachment] = []
        self.folder = tempfile.TemporaryDirectory(prefix="kvpipe-attached-")
        self.tests = self.steps = self.sane = 0
        self.tokens: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def attach(self, make: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        """Create a scheduler, and put kvpipe on both sides. This method replaces `Scheduler.__init__`."""
        from vllm.config import KVTransferConfig

        config, cache = kwargs["vllm_config"], kwargs["kv_cache_config"]
        theirs = config.kv_transfer_config
        if theirs is not None and theirs.kv_connector != KVPIPE.name:
            make(scheduler, *args, **kwargs)
            return
        shape, units = _shape(cache), math.lcm(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=KVPIPE.name,
            kv_role="kv_both",
            kv_connector_module_path=KVPIPE.module,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"chunk_tokens": BLOCKS_PER_CHUNK * units, **SETTINGS},
        )
        try:
            make(scheduler, *args, **kwargs)
        except UnsupportedError as e:
            self.refused[str(e)] += 1
            config.kv_transfer_config = None
            make(scheduler, *args, **kwargs)
            return
        self.live.append(Attachment(scheduler, shape._replace(v2=bool(scheduler.use_v2_model_runner))))

    def close(self) -> list[str]:
        """End the connectors that the test has used."""
        live, self.live = self.live, []
        self.tests += bool(live)
        found = []
        for one in live:
            self.steps += one.steps
            self.sane += one.steps * one.sane
            self.tokens.update({k: v for k, v in one.side.stats().items() if k.startswith("tokens_")})  # type: ignore[union-attr]
            found += one.close()
        return found


def _shape(cache: Any) -> Shape:
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    sizes = tuple(int(spec.block_size) for spec in specs)
    return Shape(
        windows=tuple(getattr(spec, "sliding_window", None) for spec in specs),
        sizes=sizes,
        blocks=cache.num_blocks,
        layers_per_group=1,
    )


class Budget:
    """Replaces vLLM's `MultiModalBudget`, which would query a hub for the model's processor."""

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget

        self.mm_max_toks_per_item = {"image": IMAGE_TOKENS_MAX}
        budget = compute_mm_encoder_budget(vllm_config.scheduler_config, self.mm_max_toks_per_item)
        self.encoder_compute_budget, self.encoder_cache_size = budget


def _register_images() -> None:
    """Register a model of text and images, which vLLM can inspect without packages for images."""
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    class Images(torch.nn.Module, SupportsMultiModal):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: ARG002
            super().__init__()

        def embed_input_ids(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            return input_ids

        def forward(self, input_ids: Any, positions: Any) -> Any:  # noqa: ARG002
            return input_ids

        def compute_logits(self, hidden_states: Any) -> Any:
            return hidden_states

    ModelRegistry.register_model(IMAGES, Images)


# ---- pytest's hooks --------------------------------------------------------------------------------------------------

_STATE = pytest.StashKey[Attached]()
_RAN: dict[str, bool] = {}
"""Whether each test failed, by its name with the arguments of the case."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file for the run's counts."""
    parser.addoption("--attached-json", help="file for the counts, what kvpipe refused, and which tests failed")


def pytest_configure(config: pytest.Config) -> None:
    """Put kvpipe under every scheduler from now on."""
    state = config.stash[_STATE] = Attached()
    os.chdir(state.folder.name)  # in this folder, the names of models are paths
    attached_models.write(Path(state.folder.name))

    from vllm.config import ModelConfig
    from vllm.v1.core.sched import scheduler as module

    for mark in ("cpu_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{mark}: vLLM's own")
    make = module.Scheduler.__init__

    @functools.wraps(make)
    def attached(scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        state.attach(make, scheduler, *args, **kwargs)

    module.Scheduler.__init__ = attached  # type: ignore[method-assign]
    ModelConfig.supports_multimodal_inputs = property(lambda self: self.is_multimodal_model)  # type: ignore[assignment,method-assign]
    module.MultiModalBudget = Budget  # type: ignore[assignment,misc]
    _register_images()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip tests that make no scheduler."""
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        makes_one = re.search(r"\bcreate_scheduler|\b(Async)?Scheduler\(", collection_path.read_text(encoding="utf-8"))
        return None if makes_one else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out cases whose pairs of values other cases have, and shorten the rest of vLLM's long test."""
    blasts = {item.callspec.id for item in items if "_blast" in item.name}  # type: ignore[attr-defined]
    assert not blasts or blasts >= BLASTS, "vLLM has renamed the cases of its long test"
    items[:] = [item for item in items if "_blast" not in item.name or item.callspec.id in BLASTS]  # type: ignore[attr-defined]
    for item in items:
        if "_blast" in item.name:  # vLLM's test has 20,000 steps in each case
            item.module.range = lambda *args: range(*(min(one, BLAST_STEPS) for one in args))  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record which tests ran, and which tests failed in any phase."""
    name = report.nodeid.rpartition("::")[2]
    if report.when == "call" or report.failed:
        _RAN.setdefault(name, False)
        _RAN[name] |= report.failed


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the test, and then report the faults on kvpipe's sides."""
    state = pyfuncitem.config.stash[_STATE]
    try:
        return (yield)
    finally:
        if found := state.close():
            pytest.fail("; ".join(found), pytrace=False)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return vLLM's log output, like the fixture in vLLM's own conftest.py."""
    with patch.object(logging.getLogger("vllm"), "propagate", new=True):
        yield caplog


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the counts and the names of the tests to the file that the option names."""
    state = session.config.stash[_STATE]
    message = {
        "tests": state.tests,
        "steps": state.steps,
        "checked": state.sane,
        "tokens": state.tokens,
        "refused": state.refused,
        "passed": sorted(name for name, failed in _RAN.items() if not failed),
        "failed": sorted(name for name, failed in _RAN.items() if failed),
    }
    if path := session.config.getoption("--attached-json"):
        Path(path).write_text(json.dumps(message, indent=1), encoding="utf-8")
