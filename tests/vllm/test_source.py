"""The source of a model's weights is the digest of the whole tensors that were loaded.

If there is a doubt, the weights have no source.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from kvpipe.connectors.vllm.identity.model import LoadedModel
from kvpipe.connectors.vllm.identity.source import LoadedFrom, Source, end_observing, loaded_from, watch_loading

TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "of a part of the model": torch.zeros(2)}


class _Model(torch.nn.Module):
    """A model that takes its part of each tensor, like a model on one of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 1, bias=False), torch.nn.Parameter(torch.zeros(2))
        self.takes, self.reports = 99, True
        self.skips = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load this rank's part of each tensor, and return the names of the loaded parameters."""
        names = set()
        for _, (name, tensor) in zip(range(self.takes), weights, strict=False):
            if name != self.skips:
                names.add(name)
                dict(self.named_parameters()).get(name, torch.empty(0)).data.reshape(-1)[:] = tensor.reshape(-1)[:1]
        return names if self.reports else None


def _parallel(**changes: Any) -> Any:
    """Return the configuration of two ranks that share heads."""
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "data_parallel_size": 1}
    experts = {"enable_expert_parallel": False, "enable_ep_weight_filter": False}
    ranks = {"world_size": 2, "tensor_parallel_size": 2, "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}
    return SimpleNamespace(**sizes | experts | ranks | changes)


class _MergingLoader(DummyModelLoader):
    """A loader of another package. kvpipe cannot know how this loader changes a loaded model."""


register_model_loader("merging")(_MergingLoader)


def _loaded(
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    calls: int = 1,
    quantization: str | None = None,
    tiers: str = "/tmp/kv",  # noqa: S108
    connector: str = "KVPipeConnector",
    parallel: dict[str, Any] | None = None,
    load_format: str = "auto",
    **how: Any,
) -> str:
    """Return the source that is recorded while a model is loaded."""
    model = _Model()
    for name, value in how.items():
        setattr(model, name, value)
    loader = SimpleNamespace(initialize_model=lambda _config, **_: model)
    watch_loading(loader)
    extra = {"tiers": tiers} if tiers else {}
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra) if connector else None
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(quantization=quantization),
        parallel_config=_parallel(**(parallel or {})),
        load_config=LoadConfig(load_format=load_format),
    )
    made = loader.initialize_model(config, prefix="")
    assert made is model
    some = list((TENSORS if tensors is None else tensors).items())
    for call in range(calls):
        model.load_weights(iter(some[call::calls]))
    received = end_observing(model)
    assert "load_weights" not in vars(model)
    return received


def test_equal_tensors_give_an_equal_source() -> None:
    """Equal tensors give an equal source, in any order and number of calls.

    If a byte, a name or a type differs, the source differs.
    """
    whole = _loaded()
    assert whole
    assert whole == _loaded(dict(reversed(TENSORS.items()))) == _loaded(calls=2)
    others = [
        TENSORS | {"a.weight": TENSORS["a.weight"] + 1},
        TENSORS | {"a.weight": TENSORS["a.weight"].reshape(4, 3)},
        TENSORS | {"b": torch.ones(5, dtype=torch.float64)},
        TENSORS | {"c": torch.ones(1)},
        {name: tensor for name, tensor in TENSORS.items() if name in {"a.weight", "b"}},
    ]
    assert len({whole, *map(_loaded, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "how",
    [
        {"skips": "b"},
        {"takes": 2},
        {"reports": False},
        {"quantization": "fp8"},
        {"tiers": ""},
        {"connector": ""},
        {"connector": "MultiConnector"},
        {"load_format": "merging"},
        {"parallel": {"worker_cls": "own.Worker"}},
        {"parallel": {"world_size": 4}},
        {"parallel": {"decode_context_parallel_size": 2}},
        {"parallel": {"enable_ep_weight_filter": True}},
        {"parallel": {"enable_expert_parallel": True, "data_parallel_size": 2}},
        {"calls": 0},
        {"tensors": {"b": torch.ones(5)}},
    ],
    ids=str,
)
def test_doubtful_source_is_unknown(how: dict[str, Any]) -> None:
    """A missing parameter, an unused tensor, or scales that a rank computes make the source unknown."""
    assert _loaded(**how) == ""


def test_source_of_a_model_of_another_loader_is_unknown() -> None:
    """The source of a model that another loader has made is unknown."""
    assert end_observing(_Model()) == ""


def test_weights_that_change_in_memory() -> None:
    """The source is reported as long as the memory has the content of the load, and again if this content returns."""
    source = Source(["loaded"])
    first = source.digests("memory")
    assert loaded_from(first).source
    assert loaded_from(first).memory == "memory"
    assert source.digests("other") == "other"
    assert source.digests("memory") == first
    assert Source(["loaded", ""]).digests("memory") == "memory"
    assert Source([]).digests("memory") == "memory"


def test_failed_reading_makes_later_content_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed reading, the content of memory after the load is unknown, so later content has no source."""
    layer = torch.nn.Linear(2, 2)
    engine = torch.nn.Sequential(layer)
    model = LoadedModel({"layer": layer}, lambda: None)
    assert model.roots == [engine]
    model._source = Source(["loaded"])
    with monkeypatch.context() as patch:
        patch.setattr("kvpipe.connectors.vllm.identity.model.tensors_digest", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.digest()
    assert not loaded_from(model.digest()).source


def test_ranks_with_different_tensors_have_no_source() -> None:
    """Ranks have no common source if they loaded different tensors, or if the source of one rank is unknown."""
    assert loaded_from("m0=s:m1=s") == LoadedFrom("m0:m1", "s")
    for noted in ("m0=s:m1=t", "m0=s:m1", "m0:m1"):
        assert loaded_from(noted) == LoadedFrom("m0:m1", "")
