"""Limits in `kv_transfer_params` have the same meaning as in vLLM's own `OffloadingConnector`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.v1.kv_offload.base import Locality, Medium

from kvpipe.connectors.vllm.limits import LOAD_TIERS, LOAD_TOKENS, MATCHERS_MAX, SAVE_TOKENS, limits_of

TOKENS: list[Any] = [None, 0, 1, 4096, 10**400, -1, True, False, 1.0, 1.5, float("nan"), "1", "", [1], {}]
CPU, STORAGE = {"medium": "CPU"}, {"medium": "storage"}
TIERS: list[Any] = [
    None, [], [{}], [CPU], [STORAGE], [CPU, STORAGE], [CPU | {"locality": "Local"}, {"locality": "REMOTE"}],
    [STORAGE | {"locality": None}], [STORAGE | {"more": 1}], [{"medium": "disk"}], [{"medium": "disk"}, CPU],
    [{"medium": 1}], [{"locality": ["LOCAL"]}, STORAGE], ["CPU"], [None], [None, CPU], [[]],
    [STORAGE | {"locality": 0}], "CPU", {}, CPU, 0, True, ({},), [{"medium": ""}],
]  # fmt: skip


def _read(**parameters: Any) -> tuple[Any, list[str]]:
    """Return a request's limits, and the names of invalid values."""
    ignored: list[str] = []
    request: Any = SimpleNamespace(kv_transfer_params=parameters)
    return limits_of(request, ignored.append), ignored


@pytest.mark.parametrize("value", TOKENS, ids=str)
def test_limit_of_tokens_is_that_of_vllm(value: Any) -> None:
    """The expected limit is that of vLLM's class for the same parameters. An invalid value is counted.

    None, for no limit, is valid.
    """
    limits, ignored = _read(**{LOAD_TOKENS: value, SAVE_TOKENS: value})
    config: Any = SimpleNamespace(kv_group_configs=())
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params={LOAD_TOKENS: value, SAVE_TOKENS: value})
    nothing: Any = None
    theirs = offloading.RequestOffloadState(config, request, nothing, nothing)
    assert (limits.load_tokens_max, limits.save_tokens_max) == (theirs.max_load_tokens, theirs.max_offload_tokens)
    invalid = value is not None and theirs.max_load_tokens is None
    assert ignored == [LOAD_TOKENS, SAVE_TOKENS] * invalid


@pytest.mark.parametrize("value", TIERS, ids=str)
def test_matchers_choose_the_tiers_that_they_choose_in_vllm(value: Any) -> None:
    """All tiers of kvpipe have the medium "storage". The cases have both known localities and an unknown locality."""
    limits, _ = _read(**{LOAD_TIERS: value})
    theirs = offloading._create_req_context(  # type: ignore[arg-type]
        SimpleNamespace(request_id="r", kv_transfer_params={LOAD_TIERS: value}, kv_hints=None)
    ).load_tier_filter
    for locality in (None, *Locality):
        assert limits.asks(locality.value.lower() if locality else "") == theirs.allows(Medium.STORAGE, locality), (
            locality
        )


def test_every_invalid_matcher_is_counted() -> None:
    """Valid matchers in the list still apply. A list with only invalid matchers sets no limit."""
    assert _read(kv_load_tiers=[CPU, None, {"medium": 1}])[1] == [LOAD_TIERS] * 2
    assert _read(kv_load_tiers="CPU")[1] == [LOAD_TIERS]
    assert _read(kv_load_tiers=[None])[0].load_tiers is None


def test_long_list_of_matchers_is_ignored_as_a_whole() -> None:
    """Nine matchers can express every choice of tiers, so kvpipe ignores longer lists.

    VLLM itself accepts lists of any length.
    """
    assert _read(kv_load_tiers=[STORAGE] * MATCHERS_MAX)[0].load_tiers is not None
    limits, ignored = _read(kv_load_tiers=[STORAGE] * (MATCHERS_MAX + 1))
    assert (limits.load_tiers, ignored) == (None, [LOAD_TIERS])


@pytest.mark.parametrize("parameters", [None, "x", ["max_load_tokens"], 3], ids=repr)
def test_parameters_that_are_no_mapping_have_no_limits(parameters: Any) -> None:
    """The connector replaces such parameters by None, and vLLM then sees a request without parameters."""
    request: Any = SimpleNamespace(kv_transfer_params=parameters)
    assert limits_of(request, pytest.fail) == (None, None, None)
