"""Which weights an engine has: read from what is in memory, doubted whenever they may have changed, asked for again."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm import model as model_module
from kvpipe.connectors.vllm import support
from kvpipe.connectors.vllm.adapter import ManagedBlocks, Remedies
from kvpipe.connectors.vllm.model import LoadedModel
from kvpipe.connectors.vllm.remedies.admission import LoadAdmission
from kvpipe.connectors.vllm.remedies.encoded import Encoded
from kvpipe.connectors.vllm.remedies.stale import Stale
from kvpipe.connectors.vllm.trial.scheduler_world import make_geometry
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.connectors.vllm.weights import HARMLESS, Watch, suspect
from kvpipe.errors import UnsupportedError
from kvpipe.scheduler.weights import Weights
from kvpipe.trace.log import Counters


class _Attention(torch.nn.Module):
    """Stands for vLLM's."""


class _Model(torch.nn.Module):
    """Two layers and an embedding that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 4)
        self.attention = torch.nn.ModuleList([_Attention(), _Attention()])
        self.head = torch.nn.Linear(8, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))
        self.loaded = 0

    def load_weights(self, weights: object) -> object:
        """Load nothing."""
        self.loaded += 1
        return weights

    @property
    def layers(self) -> dict[str, Any]:
        """What vLLM's configuration knows of the model."""
        return {f"layers.{i}": layer for i, layer in enumerate(self.attention)}


def test_the_model_is_found() -> None:
    """The module that holds an engine's attention layers is its model; others' are not, nor one that holds a part."""
    mine, other, reported = _Model(), _Model(), list[int]()
    loaded = LoadedModel(mine.layers, lambda: reported.append(1))
    assert loaded.roots == [mine]
    assert LoadedModel(other.layers, gc.collect).roots == [other]
    assert LoadedModel(mine.layers | {"elsewhere": SimpleNamespace()}, gc.collect).roots == [mine]
    assert LoadedModel({}, gc.collect).digest() == ""
    assert LoadedModel({"gone": torch.nn.Linear(1, 1)}, gc.collect).digest() != ""
    assert mine.load_weights("w") == "w"
    mine.load_state_dict(mine.state_dict())
    assert mine.loaded == 1
    assert len(reported) == 2


def test_code_of_others_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plugin, Transformers, or the model's own folder, wherever that is; a model of vLLM's has none."""

    def code(folder: str, text: str, module: str = "folder.modeling", release: str = "1") -> str:
        file = tmp_path / folder / "modeling.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__file__=str(file)))
        monkeypatch.setitem(sys.modules, "folder", SimpleNamespace(__version__=release))
        mine = _Model()
        mine.attention[0].__class__ = type("Own", (torch.nn.Linear,), {"__module__": module})
        for kind in (_Model, _Attention):
            monkeypatch.setattr(kind, "__module__", "vllm.model")
        return LoadedModel(mine.layers, gc.collect).code()

    told = [code("a", "one"), code("a", "two"), code("a", "one", release="2")]
    assert len({*told}) == len(told)
    assert code("b", "one", "folder.elsewhere") == told[0]
    assert code("a", "one", "vllm.model") == ""


def test_every_tensor_counts() -> None:
    """Parameters and buffers, whoever changed them in whatever way, make other weights; back again, the same ones."""
    model = _Model()
    loaded = LoadedModel(model.layers, gc.collect)
    before = loaded.digest()
    for tensor in [*model.parameters(), *model.buffers()]:
        kept = tensor.detach().clone()
        tensor.data.mul_(1.5)
        tensor.data.add_(0.25)
        assert loaded.digest() not in {before, ""}
        tensor.data.copy_(kept)
        assert loaded.digest() == before
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())  # tied no more
    assert loaded.digest() != before


class _Packs:
    """Packs a layer's weights away, as vLLM's kernels for CPUs do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave nothing to read."""
        layer.weight = torch.nn.Parameter(torch.empty(0))

    def unpack(self, layer: Any, value: float) -> None:
        """Load weights once more."""
        layer.weight = torch.nn.Parameter(torch.full((3, 3), value))


def test_weights_that_are_packed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read before, and whenever they are loaded again; packed away unread, nothing can be said."""
    from vllm.model_executor.layers.quantization import base_config

    monkeypatch.setattr(base_config, "QuantizeMethodBase", _Packs)
    found = []
    for seen in (True, False):
        for value in (1.0, 2.0, 1.0):
            model = _Model()
            for tensor in model.parameters():
                tensor.data.fill_(value)
            packs = _Packs()
            model.attention[0].register_parameter("weight", torch.nn.Parameter(torch.full((3, 3), value)))
            model.attention[0].register_buffer("bias", torch.ones(3))
            setattr(model.attention[0], "quant_method", packs)  # noqa: B010  (a module may have any attribute)
            loaded = LoadedModel(model.layers, gc.collect)
            if seen:
                model_module._watch_layer(model.attention[0])
            for _ in range(2):  # the second time there is less left to read
                packs.process_weights_after_loading(model.attention[0])
            for tensor in model.parameters():
                tensor.data.fill_(0.0)
            found.append(loaded.digest())
            packs.unpack(model.attention[0], 1.0)
            packs.process_weights_after_loading(model.attention[0])
            found.append(loaded.digest())
    assert len({*found[0:6:2]}) == 2
    assert {found[0], found[4]} == {*found[1:6:2]}
    assert found[6:] == [""] * 6


def _doubts(weights: Weights) -> bool:
    return weights.doubtful


def _asked(weights: Weights) -> int:
    question = weights.ask()
    assert weights.ask() == 0
    return question


def test_doubt_and_answers() -> None:
    """A suspicion is doubt until every rank has answered the last question; each answer says whether they changed."""
    weights = Weights(2, Counters())
    assert not weights.know(["b", "a"])
    assert weights.know(["a", "b"])
    assert not weights.know(["a", "b"])
    assert not _doubts(weights)
    assert weights.ask() == 0
    weights.suspect()
    first = _asked(weights)
    weights.suspect("reload_weights")
    second = _asked(weights)
    assert weights.answered({0: (first, "x"), 1: (first, "b")})
    assert _doubts(weights)
    assert weights.answered({0: (second, "a"), 1: (second, "b")})  # back, but steps were computed in between
    assert not _doubts(weights)
    weights.suspect()
    assert not weights.answered({0: (_asked(weights), "a"), 1: (second + 1, "b")})


@pytest.mark.parametrize("told", [{0: "a"}, {0: "a", 1: ""}, {0: "b", 1: "a"}])
def test_answers_that_are_not_the_same(told: dict[int, str]) -> None:
    """A rank that is silent, that cannot say, or two that have swapped their weights: they are others."""
    weights = Weights(2, Counters())
    weights.know(["a", "b"])
    weights.suspect()
    question = _asked(weights)
    assert weights.answered({rank: (question, digest) for rank, digest in told.items()})
    assert not _doubts(weights)


def test_calls_of_the_executor() -> None:
    """Whatever vLLM's workers are asked that is not known to be harmless is a suspicion, of that engine alone."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class Executor(UniProcExecutor):
        """One without workers."""

        def __init__(self, config: Any) -> None:
            self.vllm_config = config
            calls = {"update": lambda: 7, "execute_model": lambda: 8, "add_lora": bool, "remove_lora": bool}
            calls["reset_encoder_cache"] = bool
            self.driver_worker = SimpleNamespace(**calls)  # type: ignore[assignment]

    mine, other = (SimpleNamespace(cache_config=SimpleNamespace()) for _ in range(2))
    weights, adapters = Weights(1, Counters()), list[int]()
    side: Any = SimpleNamespace(weights=weights, adapter_called=adapters.append)
    watch = Watch(mine, side)  # type: ignore[arg-type]
    assert Executor(mine).collective_rpc("execute_model") == [8]
    assert Executor(other).collective_rpc("update") == [7]
    suspect(other, "loaded")  # type: ignore[arg-type]
    lora = SimpleNamespace(lora_int_id=3)
    assert Executor(mine).collective_rpc("add_lora", args=(lora,)) == [True]
    assert Executor(mine).collective_rpc("remove_lora", None, (4,)) == [True]
    assert Executor(other).collective_rpc("remove_lora", args=(5,)) == [True]
    assert adapters == [3, 4]
    assert not _doubts(weights)
    resets: list[int] = []
    watch.encoder_reset = lambda: resets.append(1)
    watch.doubted = lambda: resets.append(2)
    assert Executor(mine).collective_rpc("reset_encoder_cache") == Executor(other).collective_rpc("reset_encoder_cache")
    assert resets == [1]
    assert not _doubts(weights)
    assert Executor(mine).collective_rpc("update") == [7]
    assert _doubts(weights)
    assert Executor(mine).collective_rpc(lambda _worker: 9) == [9]
    suspect(mine, "loaded")  # type: ignore[arg-type]
    counted = {name.partition(".")[2]: n for name, n in weights._counters.items() if "." in name}
    assert resets == [1, 2, 2, 2]
    assert watch.side is side, "whoever lets go of it ends it"
    assert counted == {"update": 1, "callable": 1, "loaded": 1}


def test_what_is_harmless_exists() -> None:
    """Each name that is taken for harmless is a method of vLLM's workers that does not change weights."""
    from vllm.v1.worker import worker_base
    from vllm.v1.worker.gpu_worker import Worker

    known = {*dir(Worker), *dir(worker_base.WorkerWrapperBase)}
    assert known >= HARMLESS
    changing = {
        "load",
        "reload",
        "update_weights",
        "update_config",
        "start",
        "finish",
        "sleep",
        "wake",
        "apply",
        "reset_w",
    }
    assert not [name for name in HARMLESS if any(name.startswith(word) for word in changing)]


class _Manager:
    """As much of vLLM's cache manager as is asked."""

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(num_gpu_blocks=10)
        self.tables: dict[str, list[Any]] = {}
        self.cached: dict[str, int] = {}
        one = SimpleNamespace(req_to_blocks=self.tables, num_cached_block=self.cached, _pending_cow_copies=[])
        self.coordinator = SimpleNamespace(single_type_managers=[one])
        self.evicted: list[set[int]] = []

    def evict_blocks(self, blocks: set[int]) -> None:
        """Note it."""
        self.evicted.append(blocks)

    def give(self, request: str, *blocks: int) -> Any:
        """Give blocks to a request."""
        self.tables[request] = [SimpleNamespace(block_id=block, is_null=not block) for block in blocks]
        return [self.tables[request]]


def _living(*names: str, prompt: int = 40) -> list[Any]:
    return [SimpleNamespace(request_id=name, num_prompt_tokens=prompt) for name in names]


def test_requests_that_go_on_with_old_kv() -> None:
    """What rests on blocks of a stale request is stale; what was preempted, or takes nothing over, is not."""
    stale, manager = Stale([32]), _Manager()
    blocks = ManagedBlocks(manager)  # type: ignore[arg-type]
    stale.plan_step([], _living("old"), blocks)
    assert manager.evicted == []
    manager.give("old", 0, 1, 2)
    stale.begin(["old", "waiting"], blocks)
    assert manager.evicted.pop() == set(range(10))
    assert not stale.rests_on("new", manager.give("new", 0, 3, 4), blocks)
    assert stale.rests_on("heir", manager.give("heir", 1, 5), blocks)
    stale.leave("old", blocks)
    assert manager.evicted.pop() == {1, 2}
    stale.leave("new", blocks)
    assert manager.evicted == []
    assert stale.rests_on("grandchild", manager.give("grandchild", 5, 6, 9), blocks)
    manager.cached |= {"heir": 2, "grandchild": 1}
    stale.plan_step([], _living("new", "heir", "grandchild", prompt=20), blocks)
    assert manager.evicted.pop() == {1, 5, 6}
    manager.cached["grandchild"] = 3
    stale.plan_step([], _living("heir", "grandchild", prompt=20), blocks)
    assert manager.evicted.pop() == {1, 5, 6, 9}
    stale.plan_step(["heir"], _living("heir"), blocks)
    assert manager.evicted.pop() == set(range(10))
    assert not stale.rests_on("heir", manager.give("heir", 7, 8), blocks)
    stale.leave("grandchild", None)
    assert not stale.rests_on("late", manager.give("late", 6), blocks)
    stale.plan_step([], _living("late"), blocks)
    assert manager.evicted == []


def test_the_block_that_an_old_prompt_ends_in() -> None:
    """VLLM offers it anew in every step, if hashes are shorter than blocks; who takes it over has a copy of it."""
    stale, manager = Stale([32]), _Manager()
    blocks = ManagedBlocks(manager)  # type: ignore[arg-type]
    manager.give("old", 1, 2, 3, 4)
    stale.begin(["old"], blocks)
    manager.cached["old"] = 3
    for _ in range(2):
        stale.plan_step([], _living("old", prompt=40), blocks)
    assert manager.evicted[-1] == {2, 4}
    table = manager.give("heir", 6, 7)
    manager.coordinator.single_type_managers[0]._pending_cow_copies = [_copy(9, 8), _copy(2, 7)]
    assert stale.rests_on("heir", table, blocks)


def _copy(source: int, copy: int) -> tuple[Any, Any]:
    return SimpleNamespace(block_id=source), SimpleNamespace(block_id=copy)


def test_stale_kv_that_cannot_be_forgotten_keeps_no_load_from_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step would read too early is said all the same, and the next step forgets what this one has not."""
    geometry, manager, counters = make_geometry((None,), 16, 8), _Manager(), Counters()
    remedies = Remedies(geometry, LoadAdmission(geometry, 64, 64))
    remedies.bind(ManagedBlocks(manager), counters)  # type: ignore[arg-type]
    manager.give("old", 1, 2)
    remedies.weights_changed(["old"])
    manager.cached["old"] = 2
    manager.evicted.clear()
    remedies._invalid.spoiled.add([7])
    monkeypatch.setattr(remedies._invalid, "failing_loads", lambda *_: {"reader": [7]})
    step: Any = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={})
    with monkeypatch.context() as patch:
        patch.setattr(manager, "evict_blocks", None)
        assert remedies.begin_step(step, _living("old"), loading=True) == {"reader": [7]}
    assert counters.faults == {"stale_blocks_not_forgotten": 1}
    assert remedies.begin_step(step, _living("old"), loading=True) == {"reader": [7]}
    assert manager.evicted == [{1, 2}]
    assert counters.faults == {"stale_blocks_not_forgotten": 1}


def test_embeddings_of_weights_that_are_gone() -> None:
    """Until vLLM forgets them nothing that has any is kept, nor what takes its blocks over; text is."""
    geometry, manager = make_geometry((None,), 16, 8), _Manager()
    remedies = Remedies(geometry, LoadAdmission(geometry, 64, 64))
    remedies.bind(ManagedBlocks(manager), Counters())  # type: ignore[arg-type]

    def admitted(request: str, *blocks: int) -> bool:
        return remedies.admitted(request, manager.give(request, *blocks))

    remedies.weights_changed([])  # there was no image yet
    remedies.encoded.began("first")
    assert not admitted("first", 1)
    remedies.finished("first", loading=False)
    remedies.weights_changed([])
    remedies.encoded.began("image")
    assert admitted("image", 2)
    assert admitted("image", 3)  # it was preempted
    assert admitted("heir", 3)
    assert not admitted("text", 4)
    remedies.encoded.reset()
    remedies.encoded.began("again")
    assert not admitted("again", 5)
    for request in ("image", "again"):
        remedies.finished(request, loading=False)
    remedies.encoded.reset()
    remedies.weights_changed([])  # nothing is there
    remedies.encoded.began("late")
    assert not admitted("late", 6)
    remedies.encoded.reset()
    remedies.weights_changed(["late"])
    assert admitted("late", 7)  # which has brought back its own


def test_embeddings_since_weights_were_doubted() -> None:
    """VLLM resets its caches before an update or after it, and the ranks answer only when requests run again."""
    for before, after in ((True, False), (False, True), (True, True), (False, False)):
        encoded = Encoded()
        encoded.began("first")
        encoded.ended("first")
        if before:
            encoded.reset()
        encoded.doubted()
        if after:
            encoded.reset()
        encoded.began("new")
        encoded.weights_changed()
        assert encoded.rests_on("new") is not (before or after)
        encoded.weights_changed()
        encoded.reset()
        encoded.ended("new")
        encoded.began("newer")
        assert not encoded.rests_on("newer")


def test_images_that_are_numbered() -> None:
    """A multimodal model whose images vLLM numbers anew in every process is refused with tiers."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
        cache_config=SimpleNamespace(enable_prefix_caching=False, prefix_caching_hash_algo="sha256"),
    )
    with pytest.raises(UnsupportedError, match="multimodal"):
        support.check_hashes(config)
    config.cache_config.enable_prefix_caching = True
    support.check_hashes(config)


@pytest.mark.parametrize("consumes", [True, False])
def test_embeddings_that_another_engine_makes(*, consumes: bool) -> None:
    """Its weights may change while this engine's stay: refused with tiers."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        ec_transfer_config=SimpleNamespace(is_ec_consumer=consumes),
    )
    with pytest.raises(UnsupportedError, match="another engine's encoder") if consumes else nullcontext():
        support.check_hashes(config)


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("shape", ["sync", "states-hash-blocks", "states-exported", "async-scheduler-states-exported"])
def test_vllm_keeps_nothing_of_requests_that_go_on_with_old_kv(shape: str, steps: int) -> None:
    """Neither full blocks nor what a prompt ends in, while they run and when they are over."""
    trial = Trial(SHAPES[shape])
    pool = trial.scheduler.kv_cache_manager.block_pool
    trial.documents[0] = list(range(200))
    try:
        trial.do(("add", 0, 172, 0, 40))
        trial.do(("step", steps))
        assert trial.scheduler.requests
        assert any(block.block_hash for block in pool.blocks)
        trial.side._resets.weights_changed()
        while trial.scheduler.requests:
            assert [block for block in pool.blocks if block.block_hash] == [] or SHAPES[shape].asynchronous
            trial.do(("step", 1))
        assert [block for block in pool.blocks if block.block_hash] == []
    finally:
        trial.close()
