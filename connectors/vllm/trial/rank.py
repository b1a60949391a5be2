"""The fake model runner of one rank: real paged tensors, and the connector's hooks in the order of vLLM's runners.

Runner V1 (`v1/worker/kv_connector_model_runner_mixin.py`) calls `handle_preemptions` before it zeroes new blocks.
Runner V2 (`v1/worker/gpu/kv_connector.py`) calls `handle_preemptions` after it has zeroed new blocks. V2 also passes
keyword arguments, and calls `finish_forward` after the forward. Sync loads start before the forward, other loads after
the forward. With a draft model, a step is finalized after its reports.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpipe.connectors.vllm.trial.content import Sequence, Words, layer_key
from kvpipe.connectors.vllm.trial.drafts import accepted
from kvpipe.connectors.vllm.trial.paged import WORD_BYTES, PagedLayer, Positions, make_caches
from kvpipe.connectors.vllm.trial.shapes import Shape
from kvpipe.connectors.vllm.trial.states import RunningStates, exported
from kvpipe.connectors.vllm.trial.tap import empty, kvpipe_in
from kvpipe.protocol.messages import Kind, Report, Tally
from kvpipe.transfer.pool import HostPool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

NOWHERE: Positions = np.empty(0, np.int64)
STEPS_PER_SLOT = 6
QUIRKS = {
    "no_waits": "attention reads without a call of `wait_for_layer_load`",
    "no_saves": "`save_kv_layer` is not called",
    "no_layers": "no layer hook is called, as in a replay of a full CUDA graph",
    "no_start": "`start_load_kv` is not called",
    "no_end": "`wait_for_save` is not called",
    "no_clear": "the metadata is not cleared",
    "no_tail": "`wait_for_save` is not called and the metadata is not cleared, as on some pipeline ranks of V1",
    "mid_end": "`wait_for_save` is called in the middle of the forward",
    "twice": "every hook is called twice",
    "backwards": "the layers run in reverse order",
    "strangers": "hooks are called for layers that are not registered",
    "early_clear": "the metadata is cleared before the forward",
    "mid_clear": "the metadata is cleared in the middle of the forward",
    "early_bind": "the metadata of an empty step replaces this step's before the forward",
    "mid_bind": "the metadata of an empty step replaces this step's in the middle of the forward",
    "late_start": "`start_load_kv` is called after the results were requested",
}
"""Ways in which a runner may violate the order of a connector's calls."""
STOPS = ("", "first_stop", "early_stop", "mid_stop", "late_stop")
"""The moments of a step at which a shutdown may happen.

The moments are: between steps, before the metadata is bound, before the forward, in the forward, after the results
were requested.
"""


class Wrong(NamedTuple):
    """A read that returned KV of wrong tokens."""

    rank: int
    request: str
    layer: str
    positions: list[int]
    blocks: frozenset[int]


class TrialStep(NamedTuple):
    """A scheduled step: vLLM's output, and the state at the time when the step was scheduled."""

    output: SchedulerOutput
    sampling: frozenset[str]  # requests whose prefill is complete with this step
    sequences: dict[str, Sequence]
    undigested: int = 0  # earlier steps whose results vLLM had not received yet


class Access(NamedTuple):
    """The positions that a step writes and reads for a request in a group's layers, and the positions' true content."""

    request: str
    start: int
    content: Words
    expected: Words
    drafts: int
    written: Positions = NOWHERE  # places in the cache
    read: Positions = NOWHERE
    positions: slice | Positions = NOWHERE  # the positions that are read


class RankOutput(NamedTuple):
    """One rank's results of a step."""

    kv_output: KVConnectorOutput
    sampled: dict[str, list[int]]  # the tokens that each request samples: accepted drafts, and the next token
    wrong: list[Wrong]


class Runner(ABC):
    """The state that every runner keeps of its requests: block tables, and numbers of computed tokens."""

    def __init__(self, shape: Shape) -> None:
        """Start without requests."""
        self.shape = shape
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._own_counts = shape.asynchronous and shape.drafts > 0
        self._states = RunningStates([])

    @abstractmethod
    def execute(self, step: TrialStep, drafts: dict[str, list[int]]) -> RankOutput:
        """Run one step. `drafts` are the draft tokens that end each request's scheduled tokens."""

    def computed(self, request: str) -> int:
        """Return how many tokens of `request` are computed. Rejected drafts do not count."""
        return self._computed[request]

    def table(self, request: str) -> set[int]:
        """Return the blocks of `request`, of all groups."""
        return {block for table in self._tables.get(request, ()) for block in table}

    def holders(self, blocks: set[int]) -> set[str]:
        """Return each request that had one of `blocks` when the request was last scheduled."""
        return {request for request in self._tables if blocks & self.table(request)}

    def _update_states(self, output: SchedulerOutput) -> None:
        for request in output.finished_req_ids:
            self._tables.pop(request, None)
            self._states.forget(request)
        for request in output.preempted_req_ids or ():
            self._states.forget(request)
        for new in output.scheduled_new_reqs:
            self._states.forget(new.req_id)
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            resumed = request in cached.resumed_req_ids
            if resumed:
                self._states.forget(request)
                self._tables[request] = [list(ids) for ids in blocks or ()]
            else:
                for table, more in zip(self._tables[request], blocks or (), strict=False):
                    table.extend(more)
            # otherwise the scheduler's count includes all drafts, as if all were accepted
            if resumed or not self._own_counts:
                self._computed[request] = computed

    def _count(self, request: str, step: TrialStep, drafts: list[int]) -> list[int]:
        sequence, stop = step.sequences[request], self._computed[request] + step.output.num_scheduled_tokens[request]
        first = stop - len(drafts)
        self._computed[request] = right = first + accepted(sequence, stop, drafts)
        return [sequence.token(p) for p in range(first, right + 1)]


class Reporter(Runner):
    """A runner without caches, for trials of kvpipe's scheduler side alone.

    Such a runner reports that every job has succeeded.
    """

    def execute(self, step: TrialStep, drafts: dict[str, list[int]]) -> RankOutput:
        """Compute nothing, and report what kvpipe's workers would report."""
        from vllm.v1.outputs import KVConnectorOutput

        from kvpipe.connectors.vllm.metadata import PlanMetadata, ReportMetadata

        output = step.output
        self._update_states(output)
        message = {r: self._count(r, step, drafts.get(r, [])) for r in output.num_scheduled_tokens}
        assert isinstance(output.kv_connector_metadata, PlanMetadata)  # noqa: S101
        jobs, question = output.kv_connector_metadata.plan.jobs, output.kv_connector_metadata.plan.question
        report = Report({job.id: Tally(1, 0) for job in jobs}, weights={0: (question, "weights 0")} if question else {})
        reported = KVConnectorOutput(
            finished_recving={job.request for job in jobs if job.kind == Kind.LOAD_ASYNC} or None,
            kv_connector_worker_meta=ReportMetadata(report) if jobs or question else None,
        )
        return RankOutput(reported, message, [])


class Rank(Runner):
    """One rank with its paged caches and its side of the connector."""

    def __init__(
        self, index: int, connector: KVConnectorBase_V1, shape: Shape, names: list[list[str]] | None = None
    ) -> None:
        """Make the paged caches and register them.

        `names` has the layers of each group; None: the layers of the shape.
        """
        super().__init__(shape)
        self.index, self.connector = index, connector
        self.kvpipe: Any = kvpipe_in(connector)
        self.quirks: list[str] = []
        self.before_results: Callable[[], object] = lambda: None
        self.load_adapters: Callable[[set[int]], object] = lambda _: None
        self._steps = 0
        self.layers: list[PagedLayer] = []
        names = names or shape.layer_names(index)
        self._drafts = shape.stage_of(index) == shape.stages - 1
        self._deferred = shape.deferred and self._drafts
        layers = [(group, name) for group, named in enumerate(names) for name in named]
        caches = make_caches(shape, names)
        for i, (group, name) in enumerate(layers):
            shards, cache = shape.shards(group), caches[i]
            words: Words = cache.numpy().view(np.uint64)[:, 0, :, 0]
            # with masks the drafter has the last of all layers, otherwise the last layer of the first group
            last = len(layers) if shape.masks else len(names[0])
            drafts = shape.drafter and self._drafts and i == last - 1
            key, shard, ahead = layer_key(index, i), index % shards, int(drafts and not shape.masks)
            self.layers.append(PagedLayer(name, group, cache, words, key, ahead, shard, shards))
        late = shape.stages if shape.drafts and not self._drafts else 0
        self._states = RunningStates([layer for layer in self.layers if layer.group in shape.states], late)
        attached = {layer.name: SimpleNamespace(kv_cache=layer.cache) for layer in self.layers}
        self._attention: Any = {layer.name: SimpleNamespace() for layer in self.layers}
        numbers = itertools.chain.from_iterable(range(len(named)) for named in names)
        self._hooked = {layer.name for layer, i in zip(self.layers, numbers, strict=True) if i >= shape.unhooked}
        self._forward: Any = SimpleNamespace(no_compile_layers=attached, attn_metadata=self._attention)
        self._no_forward: Any = SimpleNamespace(no_compile_layers=attached, attn_metadata=None)
        from vllm.config import CUDAGraphMode

        self._replay: Any = SimpleNamespace(**vars(self._forward), cudagraph_runtime_mode=CUDAGraphMode.FULL)
        config = connector._vllm_config  # noqa: SLF001
        self._drops = config.speculative_config is not None and config.speculative_config.use_eagle_block_drop()
        self._introduce(config)
        connector.register_kv_caches({layer.name: layer.cache for layer in self.layers})
        self._ready_at = STEPS_PER_SLOT + index  # the step in which the next slot of a fresh pool becomes ready
        if shape.fresh:
            self._pool.ready = 1 + index

    def execute(self, step: TrialStep, drafts: dict[str, list[int]]) -> RankOutput:
        """Run one step. `drafts` are the draft tokens that end each request's scheduled tokens."""
        from vllm.v1.outputs import KVConnectorOutput

        output, connector = step.output, self.connector
        quirks = self._take_quirks()
        times = 2 if "twice" in quirks else 1
        self._states.settle_late(self._tables, self._computed)
        self._update_states(output)
        metadata = output.kv_connector_metadata
        assert metadata is not None  # noqa: S101
        if self.shape.v2:
            self._zero(output)
        connector.handle_preemptions(metadata)
        if not self.shape.v2:
            self._zero(output)
        self.load_adapters({step.sequences[request].lora for request in output.num_scheduled_tokens})
        self._copy_blocks(output)
        self._states.begin(output.num_scheduled_tokens, self._tables, self._computed)
        self._interrupt("first", quirks, metadata)
        connector.bind_connector_metadata(metadata)
        self._interrupt("early", quirks, metadata)
        runs = output.total_num_scheduled_tokens > 0
        context, kwargs = self._context(quirks) if runs else self._no_forward, {}
        if self.shape.v2 and runs:
            kwargs = {"scheduler_output": output, "request_ids": list(output.num_scheduled_tokens)}
        starts = 0 if "no_start" in quirks else times
        for _ in range(starts if output.has_sync_kv_loads else 0):
            connector.start_load_kv(context, **kwargs)
        wrong = self._run_layers(step, drafts, quirks) if runs else []
        before = dict(self._computed)
        message = {r: self._count(r, step, drafts.get(r, [])) for r in output.num_scheduled_tokens}
        if self.shape.v2:
            connector.finish_forward()
        for _ in range(0 if output.has_sync_kv_loads else starts):
            connector.start_load_kv(context, **kwargs)
        self._states.end(message, step.sampling, self._tables, self._computed)
        wrong += self._draft(step, before, {one.request for one in wrong})
        if not self._deferred:
            self._end(quirks)
        self.before_results()
        results = [connector.get_transfer_results(output.finished_req_ids) for _ in range(times)]
        self._interrupt("late", quirks, metadata)
        kv_output = KVConnectorOutput(
            finished_sending=_union(one.finished_sending for one in results),
            finished_recving=_union(one.finished_recving for one in results),
            failed_recving=_union(one.failed_recving for one in results) or set(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if self._deferred:
            self._end(quirks)
        if not quirks & {"no_clear", "no_tail"}:
            connector.clear_connector_metadata()
        return RankOutput(kv_output, message, wrong)

    def _introduce(self, config: VllmConfig) -> None:
        """Register the layers with vLLM, as its models do."""
        from vllm.model_executor.layers.attention import Attention

        hooked, other = (type("Layer", (), {"forward": forward})() for forward in (Attention.forward, None))
        made = {layer.name: hooked if layer.name in self._hooked else other for layer in self.layers}
        config.compilation_config.static_forward_context.update(made)

    def _context(self, quirks: set[str]) -> Any:  # noqa: ANN401  (a `ForwardContext`, of which little is read)
        """Return the context with which loads are started.

        For a CUDA graph of a whole step, runner V2 passes a context without attention metadata.
        """
        if not (self.shape.graphs and "no_layers" in quirks):
            return self._forward
        return self._no_forward if self.shape.v2 else self._replay

    def _interrupt(self, place: str, quirks: set[str], metadata: KVConnectorMetadata | None) -> None:
        """Make the wrong calls of `quirks` at this `place` of a step."""
        if self.kvpipe is not None and f"{place}_bind" in quirks:
            self.kvpipe.bind_connector_metadata(empty(metadata))
        if self.kvpipe is not None and f"{place}_clear" in quirks:
            self.kvpipe.clear_connector_metadata()
        if f"{place}_end" in quirks:
            self.connector.wait_for_save()
        if f"{place}_start" in quirks:
            self.connector.start_load_kv(self._forward)
        if f"{place}_stop" in quirks:
            self.connector.shutdown()

    def places(self, group: int, layer: int, tokens: int) -> Positions:
        """Return where the first `tokens` tokens of layer number `layer` of `group` lie in a slot, in words."""
        layers = [one for one in self.layers if one.group == group]
        page = layers[0].words.shape[1]
        if not (self.shape.cross and self.shape.mode == "step"):
            return np.arange(tokens) + self.kvpipe.geometry.layer_offsets[group][layer] // WORD_BYTES
        pages, within = np.divmod(np.arange(tokens), page)
        return (pages * len(layers) + layer) * page + within

    def dummy_run(self) -> None:
        """Run the hooks of a warm-up, for which no step is bound."""
        for layer in self.layers:
            self.connector.wait_for_layer_load(layer.name)
            self.connector.save_kv_layer(layer.name, layer.cache, self._attention)
        self.connector.wait_for_save()

    @property
    def _pool(self) -> HostPool:
        pool = self.kvpipe.worker._pool  # noqa: SLF001
        assert isinstance(pool, HostPool)  # noqa: S101
        return pool

    def _take_quirks(self) -> set[str]:
        quirks, self.quirks = set(self.quirks), []
        self._steps += 1
        if self.shape.fresh and self._steps >= self._ready_at:
            self._ready_at += STEPS_PER_SLOT
            self._pool.ready = min(self._pool.ready + 1, self._pool.slots)
        if (self.shape.mode == "step" or self.shape.graphs) and self._steps % 2:
            quirks.add("no_layers")  # some steps replay a full CUDA graph
        return quirks

    def _end(self, quirks: set[str]) -> None:
        for _ in range(0 if quirks & {"no_end", "no_tail"} else 2 if "twice" in quirks else 1):
            self.connector.wait_for_save()

    def _zero(self, output: SchedulerOutput) -> None:
        for block in output.new_block_ids_to_zero or ():
            for layer in self.layers:
                layer.words[block] = 0

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        """Copy the blocks that a request shares in part, before the request writes into its own copies."""
        for copy in output.kv_cache_block_copies or ():
            for layer in self.layers:
                layer.words[copy.dst_block_id] = layer.words[copy.src_block_id]

    def _run_layers(self, step: TrialStep, drafts: dict[str, list[int]], quirks: set[str]) -> list[Wrong]:
        """Run every layer: write the new positions, read the whole context, and check the content that was read."""
        connector, times = self.connector, 2 if "twice" in quirks else 1
        bad: set[str] = set()
        wrong: list[Wrong] = []
        accesses: dict[tuple[int, int], list[Access]] = {}
        layers = self.layers[::-1] if "backwards" in quirks else self.layers
        for layer in layers:
            if "strangers" in quirks:
                connector.wait_for_layer_load(f"{layer.name}.stranger")
                connector.save_kv_layer(f"{layer.name}.stranger", layer.cache, self._attention)
            hooked = layer.name in self._hooked
            if hooked and not quirks & {"no_waits", "no_layers"}:
                for _ in range(times):
                    connector.wait_for_layer_load(layer.name)
            # `_draft` runs this layer later, when the accepted drafts are known
            fed = self.shape.masks and self._drafts and layer is self.layers[-1]
            if not fed:
                kind = layer.group, layer.ahead
                if kind not in accesses:
                    accesses[kind] = self._accesses(layer, step, drafts)
                found = list(self._attend(layer, accesses[kind], bad))
                bad.update(one.request for one in found)
                wrong += found
            if hooked and not quirks & {"no_saves", "no_layers"}:
                for _ in range(times):
                    connector.save_kv_layer(layer.name, layer.cache, self._attention)
            if layer is layers[0]:
                self._interrupt("mid", quirks, step.output.kv_connector_metadata)
        return wrong

    def _accesses(self, layer: PagedLayer, step: TrialStep, drafts: dict[str, list[int]]) -> list[Access]:
        """Return a step's accesses to `layer`, which are the same in each layer of the group with the same `ahead`."""
        return [self._access(layer, step, request, drafts) for request in step.output.num_scheduled_tokens]

    def _access(self, layer: PagedLayer, step: TrialStep, request: str, drafts: dict[str, list[int]]) -> Access:
        sequence, mine, group = step.sequences[request], drafts.get(request, []), layer.group
        start = self._computed[request]
        stop = start + step.output.num_scheduled_tokens[request]
        right = stop - len(mine) + accepted(sequence, stop, mine)
        hashes = sequence.upto(stop + layer.ahead)[layer.ahead :]
        content = hashes.copy()
        content[right:] ^= np.uint64(0xBAD)  # drafts are wrong from the first rejected draft on, and so is their KV
        if group in self.shape.states:
            return Access(request, start, content[start:], hashes, len(mine))
        window = self.shape.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        if window is not None and group in self.shape.locals:
            first = start // window * window
        places = layer.places(self._tables[request][group])
        written, read = layer.mine(start, stop), layer.mine(first, right)
        return Access(request, start, content[written], hashes[read], len(mine), places[written], places[read], read)

    def _attend(self, layer: PagedLayer, accesses: list[Access], bad: set[str]) -> Iterator[Wrong]:
        """Write the content that each request computes, then check the content that each request reads.

        After a wrong read, a request writes wrong content.
        """
        words, states = layer.flat, layer.group in self.shape.states
        for one in accesses:
            content = one.content ^ (~layer.key if one.request in bad else layer.key)
            if not states:
                words[one.written] = content
            elif (found := self._go_on(layer, one, content)) is not None:
                yield found
        for one in () if states else accesses:
            differs = words[one.read] != one.expected ^ layer.key
            if np.count_nonzero(differs):
                positions = np.r_[one.positions][differs]
                blocks = one.read[differs] // layer.stride
                yield Wrong(self.index, one.request, layer.name, positions.tolist(), frozenset(blocks.tolist()))

    def _draft(self, step: TrialStep, before: dict[str, int], bad: set[str]) -> list[Wrong]:
        """Run a drafter that is fed context: write the KV of accepted tokens, read the context, then write masks."""
        layer, wrong = self.layers[-1], list[Wrong]()
        block = self.shape.block_tokens[layer.group]
        for request in step.output.num_scheduled_tokens if self.shape.masks and self._drafts else ():
            sequence, table = step.sequences[request], np.asarray(self._tables[request][layer.group])
            start, right = before[request], self._computed[request]
            content = layer.content(sequence, 0, right)
            self._write(layer, table, start, ~content[start:] if request in bad else content[start:])
            window = self.shape.windows[layer.group]
            read = layer.held(0 if window is None else max(0, start - window + 1), right)
            differs = read[layer.flat[layer.places(table)[read]] != content[read]]
            if len(differs) and request not in bad:
                blocks = frozenset(table[differs // block].tolist())
                wrong.append(Wrong(self.index, request, layer.name, differs.tolist(), blocks))
            room = min(self.shape.masks, len(table) * block - right)
            self._write(layer, table, right, np.full(max(0, room), 0xD5AF, np.uint64) ^ layer.key)
        return wrong

    def _write(self, layer: PagedLayer, table: Positions, start: int, content: Words) -> None:
        """Write `content` from position `start` on, but not into null blocks."""
        positions, block = layer.held(start, start + len(content)), self.shape.block_tokens[layer.group]
        positions = positions[table[positions // block] != 0]
        layer.flat[layer.places(table)[positions]] = content[positions - start]

    def _go_on(self, layer: PagedLayer, one: Access, content: Words) -> Wrong | None:
        """Check the state before the step's tokens, and write the states after each token.

        `content` has the right states.
        """
        table, start = self._tables[one.request][layer.group], one.start
        words, block = self._states.read(layer, one.request, table)
        right = not start or bool((words == (one.expected[start - 1] ^ layer.key)).all())
        self._states.write(layer, one.request, table, content, one.drafts)
        tokens, place = exported(self.shape, start, start + len(content), drops=self._drops)
        if tokens and table[place]:
            layer.words[table[place]] = content[tokens - 1]
        return None if right else Wrong(self.index, one.request, layer.name, [start - 1], frozenset((block,)))


def _union(reports: Iterable[set[str] | None]) -> set[str] | None:
    """Return the union of several reports, or None if the union is empty."""
    return set[str]().union(*(one or () for one in reports)) or None
