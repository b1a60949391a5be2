"""Every vLLM process of an environment runs the plugin, and so refuses unsupported engines before they start."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.executor.abstract import Executor

from kvpipe.connectors.vllm import plugin, support
from kvpipe.errors import ConfigError, UnsupportedError
from kvpipe.testing.logged import capture_logs

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
    """An engine's configuration.

    Its constructor reads the executor's class, like the constructor of vLLM's configuration.
    """

    def __init__(self, transfer: object) -> None:
        """Set `async_scheduling` as the user does, before `__post_init__` runs."""
        super().__init__(kv_transfer_config=transfer, scheduler_config=SimpleNamespace(async_scheduling=True))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Read the executor's class."""
        self.chosen = Executor.get_class(self)  # type: ignore[arg-type]


def _transfer(*names: str) -> Any:
    return SimpleNamespace(has_connector=lambda name: name in names)


def test_an_engine_is_checked_when_its_configuration_is_made() -> None:
    """The check does not run inside the configuration's constructor, where the configuration is still incomplete."""
    config: Any = Config(_transfer(plugin.NAME))
    assert config.chosen is CHOSEN
    with pytest.raises(UnsupportedError, match="kvpipe: no"):
        Executor.get_class(config)


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_producer_that_would_store_nothing_is_refused_early(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """The producer is refused before its model is loaded."""
    monkeypatch.setattr(support, "check_engine", lambda _: None)
    extra = {"tiers": ["/mnt/kv?store=second_use"]}
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector=plugin.NAME, kv_role=role, kv_connector_extra_config=extra)
    )
    if role == "kv_both":
        assert Executor.get_class(config) is CHOSEN
    else:
        with pytest.raises(ConfigError, match=r"store='second_use' .* set store='all', or kv_role='kv_both'"):
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
def test_engine_without_kvpipe_is_not_changed(config: Any) -> None:
    """The configuration of an engine without kvpipe is not changed.

    Neither is the configuration of another release of vLLM changed, nor one that raises on access.
    """
    assert Executor.get_class(config) is CHOSEN


def test_check_that_raises_refuses_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs again when vLLM makes the connector."""
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
    """The plugin registers everything that does not need the missing module."""
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
def test_setting_of_embeddings_from_clients_is_not_changed(
    connector: str, encoder: Any, *, taken: bool, wanted: bool
) -> None:
    """With kvpipe as the only connector, the user's setting decides.

    If an engine gets all KV or all embeddings from elsewhere, vLLM lets clients leave out tokens.
    """
    media = SimpleNamespace(allow_missing_mm_embeddings=True, enable_mm_embeds=wanted)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        kv_transfer_config=SimpleNamespace(kv_connector=connector, is_kv_consumer=True),
        ec_transfer_config=encoder,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert (media.allow_missing_mm_embeddings, media.enable_mm_embeds) == (taken, taken or wanted)


def _offloading(connector: str | None, pool: Any = None, ranks: int = 1, **cache: Any) -> Any:
    """Return the settings beside `kv_offloading_size`, in the form of vLLM's configuration."""
    extra: dict[str, Any] = {"pool_bytes_max": pool} if pool is not None else {}
    if connector == "MultiConnector":
        child = {"kv_connector": plugin.NAME} | ({"kv_connector_extra_config": extra} if extra else {})
        extra = {"connectors": [{"kv_connector": "Another"}, child]}
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    return SimpleNamespace(
        cache_config=CacheConfig(**{"kv_offloading_size": 1.5, **cache}),
        kv_transfer_config=transfer if connector else None,
        parallel_config=SimpleNamespace(world_size=ranks),
    )


def _pool(config: Any) -> Any:
    """Return kvpipe's `pool_bytes_max` in vLLM's configuration.

    Also check that the connector is still the one that the user has named.
    """
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == "MultiConnector":
        other, child = extra["connectors"]
        assert (other, set(extra)) == ({"kv_connector": "Another"}, {"connectors"})
        extra = child.get("kv_connector_extra_config", {})
    else:
        assert transfer.kv_connector == plugin.NAME
    return extra.get("pool_bytes_max")


@pytest.mark.parametrize("connector", [plugin.NAME, "MultiConnector"])
def test_offloading_size_sets_the_pool_of_each_rank(connector: str) -> None:
    """The size is for all ranks together. vLLM may build its configuration a second time from the same parts."""
    config = _offloading(connector, ranks=2)
    for _ in range(2):
        VllmConfig._post_init_kv_transfer_config(config)
        assert _pool(config) == 3 << 28
    config = _offloading(connector, kv_offloading_size=None)
    VllmConfig._post_init_kv_transfer_config(config)
    assert _pool(config) is None


def test_offloading_size_leaves_the_users_dictionary_unchanged() -> None:
    """The user may start a second engine with the same dictionary and another size."""
    config = _offloading(plugin.NAME, "1.5GiB")
    extra = config.kv_transfer_config.kv_connector_extra_config
    VllmConfig._post_init_kv_transfer_config(config)
    assert (_pool(config), extra) == (3 << 29, {"pool_bytes_max": "1.5GiB"})


@pytest.mark.parametrize("connector", [plugin.NAME, "MultiConnector"])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"pool": "4GiB"}, r"pool_bytes_max=4\.0GiB contradicts kv_offloading_size \(1\.5 GiB, 1 ranks\); set only"),
        ({"kv_offloading_size": 0.0}, r"kv_offloading_size=0\.0 is not valid; give GiB"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size=nan is not valid; give GiB"),
        ({"kv_offloading_size": float("inf")}, "kv_offloading_size=inf is not valid; give GiB"),
        (
            {"kv_offloading_backend": "lmcache"},
            "kv_offloading_backend='lmcache' cannot be used with the connector KVPipeConnector; le",
        ),
    ],
    ids=["another pool", "zero", "nan", "inf", "lmcache"],
)
def test_offloading_size_is_refused_when_it_cannot_be_the_pool(connector: str, wrong: dict[str, Any], why: str) -> None:
    """Without the refusal, vLLM would silently replace the user's connector by its own connector."""
    with pytest.raises(ConfigError, match=f"^kvpipe: {why}"):
        VllmConfig._post_init_kv_transfer_config(_offloading(connector, **wrong))


@pytest.mark.parametrize(
    ("policy", "role", "warned"),
    [("fail", "kv_both", True), ("fail", "kv_producer", False), ("recompute", "kv_both", False)],
)
def test_failed_loads_that_end_requests_are_warned_of(
    policy: Any, role: Any, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning shows the JSON that the user can add.

    An engine that loads nothing needs no policy for failed loads.
    """
    monkeypatch.setattr(support, "check_engine", lambda _: None)
    transfer = KVTransferConfig(kv_connector=plugin.NAME, kv_role=role, kv_load_failure_policy=policy)
    config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(data_parallel_size=1))
    with capture_logs() as lines:
        Executor.get_class(config)
    said = [line for line in lines if line["event"] == "failed_loads_end_requests"]
    assert [line["remedy"] for line in said] == [
        'add "kv_load_failure_policy":"recompute" to --kv-transfer-config' for _ in range(warned)
    ]


@pytest.mark.parametrize(("replicas", "refused"), [(1, True), (2, False)])
@pytest.mark.parametrize("multi", [False, True])
def test_keys_that_cannot_be_used_are_refused_before_weights_are_loaded(
    replicas: int, refused: bool, multi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler of a data parallel replica may run on another machine, where its own connector checks the keys."""
    monkeypatch.setattr(support, "check_engine", lambda _: None)
    extra: dict[str, Any] = {"manage": "127.0.0.1:1"}
    if multi:
        extra = {"connectors": [{"kv_connector": plugin.NAME, "kv_connector_extra_config": extra}]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector" if multi else plugin.NAME, kv_role="kv_both", kv_connector_extra_config=extra
    )
    parallel = SimpleNamespace(data_parallel_size=replicas)
    config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    if refused:
        with pytest.raises(ConfigError, match=r"^kvpipe: manage='127\.0\.0\.1:1' without a token"):
            Executor.get_class(config)
    else:
        assert Executor.get_class(config) is CHOSEN


@pytest.mark.parametrize("connector", [None, "Another"])
def test_offloading_size_gives_vllms_own_connector_when_kvpipe_is_not_configured(connector: str | None) -> None:
    """vLLM uses its own connector for `--kv-offloading-size`, as without the plugin."""
    config = _offloading(connector)
    VllmConfig._post_init_kv_transfer_config(config)
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
