"""An engine's weights are digested in memory, are in doubt after a possible change, and are digested again."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.offloader import base, prefetch

from kvpipe.connectors.vllm.identity import model as model_module
from kvpipe.connectors.vllm.identity.model import LoadedModel
from kvpipe.connectors.vllm.identity.weights import HARMLESS, WeightCalls, suspect
from kvpipe.scheduler.weights import Weights
from kvpipe.trace.log import Counters


class _Attention(torch.nn.Module):
    """A stand-in for vLLM's class of attention layers."""


class _Model(torch.nn.Module):
    """A model of two layers and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 4)
        self.attention = torch.nn.ModuleList([_Attention(), _Attention()])
        self.head = torch.nn.Linear(8, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))
        self.loaded = 0

    def load_weights(self, weights: object) -> object:
        """Do nothing."""
        self.loaded += 1
        return weights

    @property
    def layers(self) -> dict[str, Any]:
        """Return the model's layers in the form of vLLM's configuration."""
        return {f"layers.{i}": layer for i, layer in enumerate(self.attention)}


def test_the_model_is_found() -> None:
    """The module that holds an engine's attention layers is its model.

    Parts of this model, and other engines' models, are not its model.
    """
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


def test_code_of_plugins_and_transformers_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`code` covers a plugin, Transformers and the model's own folder. For vLLM's own models, `code` is empty."""

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

    noted = [code("a", "one"), code("a", "two"), code("a", "one", release="2")]
    assert len({*noted}) == len(noted)
    assert code("b", "one", "folder.elsewhere") == noted[0]
    assert code("a", "one", "vllm.model") == ""


def test_every_tensor_counts() -> None:
    """A change of a parameter or buffer, by any code, changes the digest. Changing it back restores the digest."""
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
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())  # unties the embedding
    assert loaded.digest() != before


def test_weights_that_wait_on_the_host_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefetched offloading (`offload_group_size`) layers share a buffer.

    The weights on the host are digested instead.
    """
    monkeypatch.setattr(prefetch, "should_pin_memory", lambda: False)
    model = _Model()
    norms = [torch.nn.RMSNorm(4) for _ in range(3)]
    model.norms = torch.nn.ModuleList(norms)
    kept = [prefetch._CpuParamOffloader(norm, "weight") for norm in norms]
    loaded = LoadedModel(model.layers, gc.collect)
    plain = loaded.digest()
    layers = [SimpleNamespace(_param_offloaders={"weight": one}) for one in kept]
    monkeypatch.setattr(base, "_instance", SimpleNamespace(module_offloaders=layers))
    buffer = torch.zeros(4)
    for one in kept:
        one.assign_static_buffer(buffer)
    noted = []
    for turn in kept:
        assert turn._cpu_storage is not None
        buffer.copy_(turn._cpu_storage)
        assert loaded.digest() == plain
        turn._cpu_storage.mul_(2.0)
        noted.append(loaded.digest())
        turn._cpu_storage.div_(2.0)
    assert len({plain, *noted}) == 1 + len(kept), "each layer counts, whose turn it is or not"


class _Packs:
    """A quantization method that replaces a layer's weight by an empty tensor after loading.

    Packing by vLLM's CPU kernels does the same.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the weight by an empty tensor."""
        layer.weight = torch.nn.Parameter(torch.empty(0))

    def unpack(self, layer: Any, value: float) -> None:
        """Load the weights again."""
        layer.weight = torch.nn.Parameter(torch.full((3, 3), value))


def test_weights_that_are_packed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are digested before they are packed, at each load.

    If weights were packed without being digested, the digest is unknown.
    """
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
            for _ in range(2):  # at the second load, one layer's weights are already packed
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
    question = weights.next_question()
    assert weights.next_question() == 0
    return question


def test_weights_are_in_doubt_until_every_rank_has_answered() -> None:
    """Weights stay in doubt until every rank has answered the last question.

    From the answers, the scheduler side sees whether the weights changed.
    """
    weights = Weights(2, Counters())
    assert not weights.know(["b", "a"])
    assert weights.know(["a", "b"])
    assert not weights.know(["a", "b"])
    assert not _doubts(weights)
    assert weights.next_question() == 0
    weights.suspect()
    first = _asked(weights)
    weights.suspect("reload_weights")
    second = _asked(weights)
    assert weights.answered({0: (first, "x"), 1: (first, "b")})
    assert _doubts(weights)
    # the weights are the same again, but steps were computed with other weights in between
    assert weights.answered({0: (second, "a"), 1: (second, "b")})
    assert not _doubts(weights)
    weights.suspect()
    assert not weights.answered({0: (_asked(weights), "a"), 1: (second + 1, "b")})


@pytest.mark.parametrize("noted", [{0: "a"}, {0: "a", 1: ""}, {0: "b", 1: "a"}])
def test_answers_that_are_not_the_same(noted: dict[int, str]) -> None:
    """A rank without an answer or a digest counts as a change of weights. So do two ranks with exchanged weights."""
    weights = Weights(2, Counters())
    weights.know(["a", "b"])
    weights.suspect()
    question = _asked(weights)
    assert weights.answered({rank: (question, digest) for rank, digest in noted.items()})
    assert not _doubts(weights)


def test_calls_of_the_executor() -> None:
    """A call to vLLM's workers that is not known to be harmless puts only that engine's weights in doubt."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class Executor(UniProcExecutor):
        """An executor without workers."""

        def __init__(self, config: Any) -> None:
            self.vllm_config = config
            calls = {"update": lambda: 7, "execute_model": lambda: 8, "add_lora": bool, "remove_lora": bool}
            calls["reset_encoder_cache"] = bool
            self.driver_worker = SimpleNamespace(**calls)  # type: ignore[assignment]

    mine, other = (SimpleNamespace(cache_config=SimpleNamespace()) for _ in range(2))
    weights, adapters = Weights(1, Counters()), list[int]()
    side: Any = SimpleNamespace(weights=weights, adapter_called=adapters.append)
    watch = WeightCalls(mine, side)  # type: ignore[arg-type]
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


def test_every_harmless_call_is_a_method_of_vllm() -> None:
    """Each name in the list of harmless calls is a method of vLLM's workers that does not change weights."""
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
