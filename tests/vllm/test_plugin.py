"""What every vLLM process of an environment runs: it refuses early what kvpipe cannot serve, and breaks nobody else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.executor.abstract import Executor

from kvpipe.connectors.vllm import plugin, support
from kvpipe.errors import UnsupportedError

CHOSEN = type("Chosen", (), {})


def _refuse(_: object) -> None:
    message = "kvpipe: no"
    raise UnsupportedError(message)


@pytest.fixture(autouse=True)
def _plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "get_class", staticmethod(lambda vllm_config: vllm_config and CHOSEN))
    monkeypatch.setattr(support, "check_engine", _refuse)
    plugin.register()
    plugin.register()


class Config(SimpleNamespace):
    """An engine's configuration, whose constructor asks for the executor as vLLM's does."""

    def __init__(self, transfer: object) -> None:
        """`async_scheduling` is the user's own, so that it is set from the first."""
        super().__init__(kv_transfer_config=transfer, scheduler_config=SimpleNamespace(async_scheduling=True))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Ask."""
        self.chosen = Executor.get_class(self)  # type: ignore[arg-type]


def _transfer(*names: str) -> Any:
    return SimpleNamespace(has_connector=lambda name: name in names)


def test_an_engine_is_checked_when_its_configuration_is_made() -> None:
    """Not in the midst of its constructor, whatever is set there already."""
    config: Any = Config(_transfer(plugin.NAME))
    assert config.chosen is CHOSEN
    with pytest.raises(UnsupportedError, match="kvpipe: no"):
        Executor.get_class(config)


def _raises(_: object) -> bool:
    raise RuntimeError


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(kv_transfer_config=_transfer("Another")),
        SimpleNamespace(kv_transfer_config=None),
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="Another")),
        SimpleNamespace(kv_transfer_config=SimpleNamespace(has_connector=_raises)),
        SimpleNamespace(other=1),
    ],
    ids=["another connector", "none", "older", "raises", "no such field"],
)
def test_an_engine_without_kvpipe_is_left_alone(config: Any) -> None:
    """Also one of a vLLM whose configuration is another, or that raises when it is asked."""
    assert Executor.get_class(config) is CHOSEN


def test_a_check_that_fails_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector checks once more when it is made."""
    monkeypatch.setattr(support, "check_engine", _raises)
    config: Any = SimpleNamespace(kv_transfer_config=_transfer(plugin.NAME))
    assert Executor.get_class(config) is CHOSEN


@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.executor.abstract",
        "vllm.model_executor.model_loader",
        "vllm.distributed.kv_transfer.kv_connector.factory",
    ],
)
def test_a_vllm_that_lacks_a_module_starts(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What can be done is done all the same."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    plugin.register()
    assert (plugin.NAME in KVConnectorFactory._registry) == ("factory" not in module)


@pytest.mark.parametrize(
    ("connector", "encoder", "taken"),
    [
        (plugin.NAME, None, False),
        ("MultiConnector", None, True),
        (plugin.NAME, SimpleNamespace(is_ec_consumer=True), True),
    ],
)
@pytest.mark.parametrize("wanted", [False, True])
def test_whether_clients_send_embeddings_is_left_to_the_user(
    connector: str, encoder: Any, *, taken: bool, wanted: bool
) -> None:
    """With kvpipe alone. VLLM lets those of an engine that is sent all KV, or all embeddings, leave them out."""
    media = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=wanted)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        kv_transfer_config=SimpleNamespace(kv_connector=connector, is_kv_consumer=True),
        ec_transfer_config=encoder,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert (media.allow_missing_mm_embeddings, media.enable_mm_embeds) == (taken, taken or wanted)


def _offloading(connector: str | None) -> Any:
    """Return what the user has set beside `kv_offloading_size`, as vLLM's configuration has it."""
    extra: dict[str, Any] = {"connectors": [{"kv_connector": plugin.NAME}]} if connector == "MultiConnector" else {}
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    cache = CacheConfig(kv_offloading_size=1.0)
    return SimpleNamespace(cache_config=cache, kv_transfer_config=transfer if connector else None)


@pytest.mark.parametrize("connector", [plugin.NAME, "MultiConnector"])
def test_an_option_that_would_replace_kvpipe_is_refused(connector: str) -> None:
    """VLLM takes a connector of its own then, silently, whichever the user has named."""
    config = _offloading(connector)
    with pytest.raises(UnsupportedError, match=r"^kvpipe: kv_offloading_size=1\.0 .*, and set pool_bytes_max$"):
        VllmConfig._post_init_kv_transfer_config(config)
    config.cache_config.kv_offloading_size = None
    VllmConfig._post_init_kv_transfer_config(config)
    assert config.kv_transfer_config.kv_connector == connector


@pytest.mark.parametrize("connector", [None, "Another"])
def test_who_uses_vllms_offloading_gets_it(connector: str | None) -> None:
    """As without kvpipe."""
    config = _offloading(connector)
    VllmConfig._post_init_kv_transfer_config(config)
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
