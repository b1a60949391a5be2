"""The smallest real vLLM engine: its real scheduler, kvpipe on both sides, and a model whose KV says what it is.

The fake model runner calls the connector's hooks in the order of vLLM's V1 runner and keeps real paged tensors. The KV
of a token position is a hash of the token prefix up to there and of the layer, so every read can be checked, and the
next token is a function of that hash, so a request's output is known from its prompt alone.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import kvpipe.testing.engine  # noqa: F401  (sets the environment, before vllm is imported)
from kvpipe.testing.held import HeldEngine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from kvpipe.connectors.vllm.connector import KVPipeConnector

BLOCK = 32
VOCAB = 512
WRONG_TOKEN = VOCAB  # sampled when what was read was not what belongs there
SETTLE_STEPS_MAX = 4000
_MASK = (1 << 64) - 1
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB + 1, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 4096,
}  # fmt: skip

Words = npt.NDArray[np.uint64]


class Shape(NamedTuple):
    """What to build. `windows` names each cache group's sliding window in tokens, None for full attention.

    `held`: copies are late (see `HeldEngine`); `fail`: share of loads that fail then; `chaos`: resets and freezes too.
    """

    asynchronous: bool = False
    load: str = "auto"
    windows: tuple[int | None, ...] = (None,)
    layers_per_group: int = 2
    blocks: int = 15
    seqs_max: int = 6
    step_tokens_max: int = 96
    pool_slots: int = 20
    extra: dict[str, Any] = {}
    held: bool = False
    fail: float = 0.0
    chaos: bool = False


_HYBRID = Shape(windows=(None, 2 * BLOCK), blocks=24, pool_slots=40)
FAULTS_OF_FAILED_LOADS = ("job_failed", "load_failed", "save_failed")
SHAPES: dict[str, Shape] = {
    "sync": Shape(load="sync"),
    "async-load": Shape(load="async"),
    "step-mode": Shape(load="sync", extra={"mode": "step"}),
    "hybrid": _HYBRID,
    "async-scheduler-sync-load": Shape(asynchronous=True, load="sync"),
    "async-scheduler-async-load": Shape(asynchronous=True, load="async"),
    "async-scheduler-hybrid": _HYBRID._replace(asynchronous=True),
    "failing-sync-load": Shape(load="sync", held=True, fail=0.3, chaos=True),
    "async-scheduler-failing-load": Shape(asynchronous=True, load="async", held=True, fail=0.3),
    "async-scheduler-late-hybrid": _HYBRID._replace(asynchronous=True, held=True, chaos=True),
}
"""Small pools, so that requests are preempted and chunks evicted."""


class Sequence:
    """A request's tokens and the hash of every prefix, as far as they are needed."""

    def __init__(self, prompt: list[int], salt: int = 0) -> None:
        """`salt` makes the same tokens mean other KV."""
        self.tokens: list[int] = []
        self.hashes: Words = np.empty(0, np.uint64)
        self._prompt, self._salt = prompt, salt

    def upto(self, stop: int) -> Words:
        """Return the hashes of the first `stop` positions."""
        if stop > len(self.hashes):
            more = []
            last = int(self.hashes[-1]) if len(self.hashes) else self._salt
            for position in range(len(self.hashes), stop):
                token = self._prompt[position] if position < len(self._prompt) else last % VOCAB
                last = ((last ^ token) * 6364136223846793005 + 1442695040888963407) & _MASK
                last ^= last >> 29
                self.tokens.append(token)
                more.append(last)
            self.hashes = np.concatenate([self.hashes, np.array(more, np.uint64)])
        return self.hashes[:stop]

    def token(self, position: int) -> int:
        """Return the token at `position`: of the prompt, or what the model says after it."""
        self.upto(position + 1)
        return self.tokens[position]


class Wrong(NamedTuple):
    """A read of KV that was not what belongs there."""

    request: str
    layer: str
    positions: list[int]


class Runner:
    """A fake model runner: V1's order of hooks, one layer after the other, on real paged tensors."""

    def __init__(self, connector: KVPipeConnector, shape: Shape, sequences: dict[str, Sequence]) -> None:
        """Make the paged cache and register it."""
        self.connector, self.sequences = connector, sequences
        self.wrong: list[Wrong] = []
        self.excused: list[Wrong] = []
        self.reads = 0
        self._windows = shape.windows
        self._tables: dict[str, list[list[int]]] = {}
        self._computed: dict[str, int] = {}
        self._layers: list[tuple[str, int, torch.Tensor, Words, np.uint64]] = []
        names = [name for group in layer_names(shape) for name in group]
        for i, name in enumerate(names):
            cache = torch.zeros(shape.blocks, 1, BLOCK, 2)  # [B, H, N, C]: 8 bytes a token
            words: Words = cache.numpy().view(np.uint64).reshape(shape.blocks, BLOCK)
            group = i // shape.layers_per_group
            self._layers.append((name, group, cache, words, np.uint64((i + 1) * 0x9E3779B97F4A7C15 & _MASK)))
        connector.register_kv_caches({name: cache for name, _, cache, _, _ in self._layers})

    def execute(self, output: SchedulerOutput, sampling: frozenset[str]) -> ModelRunnerOutput:
        """Run one step. `sampling` names the requests whose prefill is complete with it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self._update_states(output)
        connector, metadata = self.connector, output.kv_connector_metadata
        assert metadata is not None  # noqa: S101
        connector.handle_preemptions(metadata)
        for block in output.new_block_ids_to_zero or ():
            for _, _, _, words, _ in self._layers:
                words[block] = 0
        connector.bind_connector_metadata(metadata)
        forward_context: Any = object()
        if output.has_sync_kv_loads:
            connector.start_load_kv(forward_context)
        wrong_before = len(self.wrong)
        bad = self._forward(output) if output.total_num_scheduled_tokens else set()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(forward_context)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        if kv_output.invalid_block_ids:  # vLLM throws away what these requests have computed
            self.excused += self.wrong[wrong_before:]
            del self.wrong[wrong_before:]
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[self._sample(r, wrong=r in bad) if r in sampling else [] for r in ids],
            kv_connector_output=None if kv_output.is_empty() else kv_output,
        )

    def _update_states(self, output: SchedulerOutput) -> None:
        for request in output.finished_req_ids:
            self._tables.pop(request, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request in cached.resumed_req_ids:
                self._tables[request] = [list(ids) for ids in blocks or ()]
            else:
                for table, more in zip(self._tables[request], blocks or (), strict=False):
                    table.extend(more)
            self._computed[request] = computed

    def _forward(self, output: SchedulerOutput) -> set[str]:
        """Run every layer; return the requests that read something wrong."""
        bad: set[str] = set()
        for name, group, cache, words, salt in self._layers:
            self.connector.wait_for_layer_load(name)
            for request, scheduled in output.num_scheduled_tokens.items():
                start, stop = self._computed[request], self._computed[request] + scheduled
                positions = np.arange(start, stop)
                table = np.asarray(self._tables[request][group])
                content = self.sequences[request].upto(stop)[start:] ^ salt
                if request in bad:  # what rests on garbage is garbage
                    content = ~content
                words[table[positions // BLOCK], positions % BLOCK] = content
            for request, scheduled in output.num_scheduled_tokens.items():
                start, stop = self._computed[request], self._computed[request] + scheduled
                window = self._windows[group]
                positions = np.arange(max(0, start - window + 1) if window else 0, stop)
                table = np.asarray(self._tables[request][group])
                read = words[table[positions // BLOCK], positions % BLOCK]
                differs = positions[read != (self.sequences[request].upto(stop)[positions[0] :] ^ salt)]
                self.reads += 1
                if len(differs):
                    bad.add(request)
                    self.wrong.append(Wrong(request, name, differs.tolist()))
            attention: Any = None
            self.connector.save_kv_layer(name, cache, attention)
        for request, scheduled in output.num_scheduled_tokens.items():
            self._computed[request] += scheduled
        return bad

    def _sample(self, request: str, *, wrong: bool) -> list[int]:
        return [WRONG_TOKEN if wrong else self.sequences[request].token(self._computed[request])]


class MiniEngine:
    """The real (Async)Scheduler, stepped by hand: `schedule`, then `finish_step`, up to `in_flight_max` steps later."""

    def __init__(self, shape: Shape, *, seed: int = 0, wire: bool = True) -> None:
        """`wire` pickles what goes between the two sides, as with workers in other processes."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from kvpipe.connectors.vllm.connector import KVPipeConnector

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.shape, self.wire = shape, wire
        self.in_flight_max = 2 if shape.asynchronous else 1
        config, cache = make_configs(shape)
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        self.scheduler: Scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.connector: KVPipeConnector = self.scheduler.connector  # type: ignore[assignment]
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, list[int]] = {}
        self.worker = KVPipeConnector(vllm_config=config, role=KVConnectorRole.WORKER, kv_cache_config=cache)
        self.faults: list[str] = []
        for side in (self.connector, self.worker):
            self._record_faults(side)
        self.held: HeldEngine | None = None
        if shape.held:
            self.held = HeldEngine(random.Random(seed), shape.fail)  # noqa: S311
            self.worker.make_engine = lambda: self.held  # type: ignore[method-assign]
        self.runner = Runner(self.worker, shape, self.sequences)
        self.executed = 0
        self._scheduled: deque[tuple[SchedulerOutput, frozenset[str]]] = deque()
        self._executed: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def _record_faults(self, side: KVPipeConnector) -> None:
        count = side.counters.fault

        def fault(name: str, **fields: Any) -> None:  # noqa: ANN401
            self.faults.append(f"{name} {fields}")
            count(name, **fields)

        side.counters.fault = fault  # type: ignore[method-assign]

    def add(self, request_id: str, prompt: list[int], max_tokens: int, salt: int = 0) -> None:
        """Add a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.sequences[request_id] = Sequence(prompt, salt)
        self.outputs[request_id] = []
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            request_id, prompt, params, None, block_hasher=self._hasher, cache_salt=str(salt) if salt else None
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Abort a request, in whatever state it is."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def in_flight(self) -> int:
        """Steps that were scheduled and not yet given back to the scheduler."""
        return len(self._scheduled) + len(self._executed)

    def schedule(self) -> None:
        """Schedule one more step."""
        output = self.scheduler.schedule()
        if self.wire:
            output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301
        sampling = frozenset(r for r in output.num_scheduled_tokens if not self.scheduler.requests[r].is_prefill_chunk)
        self._scheduled.append((output, sampling))

    def execute(self) -> None:
        """Let the runner run the oldest scheduled step."""
        output, sampling = self._scheduled.popleft()
        if self.held is not None:
            self.held.tick()
        result = self.runner.execute(output, sampling)
        kv_output = result.kv_connector_output
        if self.wire and kv_output is not None:
            meta = kv_output.kv_connector_worker_meta
            kv_output.kv_connector_worker_meta = pickle.loads(pickle.dumps(meta))  # noqa: S301
        self._executed.append((output, result))
        self.executed += 1

    def finish_step(self) -> None:
        """Give the oldest step's results to the scheduler, running it first if need be."""
        if not self._executed:
            self.execute()
        output, result = self._executed.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids

    def step(self, rng: random.Random) -> None:
        """Do one of the things that may happen next."""
        if self.in_flight < self.in_flight_max and self.scheduler.has_requests() and rng.random() < 0.6:  # noqa: PLR2004
            self.schedule()
        elif self._scheduled and rng.random() < 0.5:  # noqa: PLR2004
            self.execute()
        elif self.in_flight:
            self.finish_step()

    def disturb(self, rng: random.Random) -> None:
        """Do one of the rarer things that an operator may do, or nothing."""
        dice = rng.random()
        if dice < 0.01:  # noqa: PLR2004
            self.connector.set_freeze(rng.random() < 0.5)  # noqa: PLR2004
        elif dice < 0.02:  # noqa: PLR2004
            self.scheduler.reset_prefix_cache(reset_connector=True)
        elif dice < 0.03 and not self.in_flight and self.shape.load == "sync":  # noqa: PLR2004
            # everything is preempted; vLLM itself raises while blocks wait for a load or a step
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=rng.random() < 0.5)  # noqa: PLR2004

    def drain(self) -> None:
        """Step until no request is left and nothing is owed. Raises TimeoutError when that does not happen."""
        for _ in range(SETTLE_STEPS_MAX):
            if self.in_flight:
                self.finish_step()
            elif self.scheduler.has_requests():
                self.schedule()
                if not self._scheduled[-1][0].total_num_scheduled_tokens:
                    time.sleep(0.0002)  # only copies are left to wait for
            else:
                return
        message = f"still busy after {SETTLE_STEPS_MAX} steps: {self.connector.stats()}"
        raise TimeoutError(message)

    def leftovers(self) -> dict[str, int]:
        """Return what is held although no request is left: everything here must be 0."""
        stats = self.connector.stats()
        manager, pipeline = self.scheduler.kv_cache_manager, self.worker.worker.pipeline  # type: ignore[union-attr]
        return {name: stats[name] for name in ("leases", "pieces_writing", "jobs_in_flight", "requests")} | {
            "worker_jobs": pipeline.in_flight if pipeline is not None else -1,
            "blocks": manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks(),
            "tables": sum(len(m.req_to_blocks) for m in manager.coordinator.single_type_managers),
            "scheduler_requests": len(self.scheduler.requests),
        }

    def close(self) -> None:
        """End threads."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def layer_names(shape: Shape) -> list[list[str]]:
    """Return the names of each group's layers."""
    return [[f"g{g}.l{i}" for i in range(shape.layers_per_group)] for g in range(len(shape.windows))]


def make_configs(shape: Shape) -> tuple[Any, Any]:
    """Return vLLM's (VllmConfig, KVCacheConfig) for `shape`."""
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    common: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**common) if window is None else SlidingWindowSpec(**common, sliding_window=window)
        for window in shape.windows
    ]
    groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(layer_names(shape), specs, strict=True)]
    cache = KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    with tempfile.TemporaryDirectory(prefix="kvpipe-mini-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=1024)
        config = VllmConfig(
            model_config=model,
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=shape.seqs_max,
                max_num_batched_tokens=shape.step_tokens_max,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVPipeConnector",
                kv_role="kv_both",
                kv_connector_module_path="kvpipe.connectors.vllm.connector",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "pool_bytes_max": shape.pool_slots * 4096, "chunk_tokens": 4 * BLOCK, "load": shape.load,
                } | shape.extra,
            ),
        )  # fmt: skip
    # the CPU platform forces it off, for its own runner's sake; the scheduler itself does not care
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.num_gpu_blocks = shape.blocks
    return config, cache


class Result(NamedTuple):
    """What a scenario has shown. `problems` is empty when every claim held."""

    problems: list[str]
    counters: dict[str, int]
    steps: int


REACHED = ("lookup_hit", "tokens_loaded", "preempted", "pieces_published")
"""A scenario in which one of these never happened proves nothing."""


def run_scenario(shape: Shape, seed: int, *, rounds: int = 3, requests: int = 14, wire: bool = True) -> Result:
    """Run random requests with shared prefixes, aborts and preemptions; check every claim after each round."""
    rng = random.Random(seed)  # noqa: S311
    engine = MiniEngine(shape, seed=seed, wire=wire)
    documents = [[rng.randrange(VOCAB) for _ in range(rng.randint(40, 250))] for _ in range(4)]
    problems: list[str] = []
    aborted: set[str] = set()
    wanted: dict[str, int] = {}
    try:
        for turn in range(rounds):
            waiting = [f"r{turn}.{i}" for i in range(requests)]
            live: list[str] = []
            while waiting:
                if rng.random() < 0.2:  # noqa: PLR2004
                    name = waiting.pop()
                    document = rng.choice(documents)
                    prompt = document[: rng.randint(1, len(document))]
                    prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 17, 40)))]
                    wanted[name] = rng.randint(1, 70)
                    engine.add(name, prompt, wanted[name], salt=rng.choice((0, 0, 0, 7)))
                    live.append(name)
                if live and rng.random() < 0.03:  # noqa: PLR2004
                    aborted.add(name := rng.choice(live))
                    engine.abort(name)
                if shape.chaos:
                    engine.disturb(rng)
                engine.step(rng)
            engine.connector.set_freeze(False)
            engine.drain()
            problems += check(engine, wanted, aborted)
            engine.scheduler.reset_prefix_cache()
    finally:
        engine.close()
    counters = engine.connector.counters + engine.worker.counters
    problems += [f"the scenario never reached: {what}" for what in REACHED if not counters[what]]
    return Result(problems, dict(counters), engine.executed)


def check(engine: MiniEngine, wanted: dict[str, int], aborted: set[str]) -> list[str]:
    """Return what is wrong with a drained engine."""
    found = [f"wrong KV read: {w}" for w in engine.runner.wrong[:5]]
    expected_faults = FAULTS_OF_FAILED_LOADS if engine.shape.fail else ()
    found += [f"fault: {f}" for f in engine.faults if not f.startswith(expected_faults)][:5]
    found += [f"left after the drain: {n} {name}" for name, n in engine.leftovers().items() if n]
    for name, count in wanted.items():
        sequence, output = engine.sequences[name], engine.outputs[name]
        stop = len(sequence._prompt) + count  # noqa: SLF001
        expected = [sequence.token(p) for p in range(stop - count, stop)]
        if (output != expected) if name not in aborted else (output != expected[: len(output)]):
            found.append(f"request {name}: output {output}, expected {expected}")
    side = engine.connector.scheduler
    assert side is not None  # noqa: S101
    try:
        side.catalog.check_integrity()
    except AssertionError as e:
        found.append(f"catalog: {e}")
    return found


def main() -> int:
    """Run every shape once per seed given; print one JSON object: the version, and the problems of each."""
    import vllm

    problems: dict[str, list[str]] = {
        f"{name}/{seed}": run_scenario(shape, int(seed), wire=int(seed) % 2 == 0).problems
        for name, shape in SHAPES.items()
        for seed in sys.argv[1:]
    }
    sys.stdout.write(json.dumps({"version": vllm.__version__, "problems": problems}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
