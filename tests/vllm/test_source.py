"""From which weights a model was loaded: whole tensors on their way in, and nothing where any of that is in doubt."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.source import LoadedFrom, Source, end_listening, loaded_from, watch_loading

TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "of a part of the model": torch.zeros(2)}


class _Model(torch.nn.Module):
    """Takes its part of the tensors that it is given, as a rank of several does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 1, bias=False), torch.nn.Parameter(torch.zeros(2))
        self.takes, self.tells = 99, True
        self.skips = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Take parts, and tell of which parameters."""
        names = set()
        for _, (name, tensor) in zip(range(self.takes), weights, strict=False):
            if name != self.skips:
                names.add(name)
                dict(self.named_parameters()).get(name, torch.empty(0)).data.reshape(-1)[:] = tensor.reshape(-1)[:1]
        return names if self.tells else None


def _loaded(
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    calls: int = 1,
    quantization: str | None = None,
    tiers: str = "/tmp/kv",  # noqa: S108
    connector: bool = True,
    **how: Any,
) -> str:
    """Return what is heard while a model is loaded."""
    model = _Model()
    for name, value in how.items():
        setattr(model, name, value)
    loader = SimpleNamespace(initialize_model=lambda _config, **_: model)
    watch_loading(loader)
    transfer = SimpleNamespace(kv_connector_extra_config={"tiers": tiers} if tiers else {}) if connector else None
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(quantization=quantization))
    made = loader.initialize_model(config, prefix="")
    assert made is model
    some = list((TENSORS if tensors is None else tensors).items())
    for call in range(calls):
        model.load_weights(iter(some[call::calls]))
    heard = end_listening(model)
    assert "load_weights" not in vars(model)
    return heard


def test_whole_tensors_decide() -> None:
    """The same tensors come to the same, in any order and by any number of calls; any other byte, name or type not."""
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
        {"tells": False},
        {"quantization": "fp8"},
        {"tiers": ""},
        {"connector": False},
        {"calls": 0},
        {"tensors": {"b": torch.ones(5)}},
    ],
    ids=str,
)
def test_what_is_in_doubt_is_unknown(how: dict[str, Any]) -> None:
    """A parameter that was not loaded, tensors that were not taken, scales of a rank's own: then nothing is known."""
    assert _loaded(**how) == ""


def test_a_model_that_nobody_heard_of() -> None:
    """A model that another loader has made is unknown."""
    assert end_listening(_Model()) == ""


def test_weights_that_change_in_memory() -> None:
    """What was loaded is known as long as memory is what it was at first; with it back, again."""
    source = Source(["heard"])
    first = source.told("memory")
    assert loaded_from(first).source
    assert loaded_from(first).memory == "memory"
    assert source.told("other") == "other"
    assert source.told("memory") == first
    assert Source(["heard", ""]).told("memory") == "memory"
    assert Source([]).told("memory") == "memory"


def test_ranks_must_agree() -> None:
    """Ranks that were loaded from different tensors, or of which one does not know, have no source together."""
    assert loaded_from("m0=s:m1=s") == LoadedFrom("m0:m1", "s")
    for told in ("m0=s:m1=t", "m0=s:m1", "m0:m1"):
        assert loaded_from(told) == LoadedFrom("m0:m1", "")
