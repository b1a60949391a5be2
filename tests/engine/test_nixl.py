"""kvpipe runs beside vLLM's real NixlConnector. Two servers prefill for each other, and both connectors load KV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.waiting import eventually
from tests.engine.common import baseline, prompt
from tests.engine.serving import Server, free_port

pytestmark = pytest.mark.engine

TOKENS, UNIT = 12, 32
PROMPTS = [prompt(300, 401), prompt(420, 402), prompt(333, 403), prompt(300, 404), prompt(420, 405)]
OWN: dict[str, Any] = {"enable_prefix_caching": False}
KVPIPE = {
    "kv_connector": "KVPipeConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"chunk_tokens": 64, "pool_bytes_max": "64MiB"},
}  # fmt: skip
NIXL = {
    "kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engine.tamed_nixl", "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}  # fmt: skip
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def _server(folder: Path, *children: dict[str, Any]) -> Server:
    """Return a server whose connectors are `children`, in this order."""
    transfer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu", "kv_connector_extra_config": {"connectors": children},
    }  # fmt: skip
    name = children[0]["kv_connector"]
    ports: Any = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    options = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "200")
    return Server(folder / f"{name}.log", None, *options, transfer=transfer, **ports)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Yield two servers. VLLM asks kvpipe first in the first server, and NIXL first in the second server."""
    folder = tmp_path_factory.mktemp("nixl")
    with ExitStack() as stack:
        servers = _server(folder, KVPIPE, NIXL), _server(folder, NIXL, KVPIPE)
        for server in servers:
            server.begin()
            stack.callback(server.kill)
        yield stack.enter_context(servers[0]), stack.enter_context(servers[1])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the answers of an engine without a connector."""
    return baseline(PROMPTS, TOKENS, **OWN)


def _ask(server: Server, tokens: list[int], count: int, transfer: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Return the tokens and the `kv_transfer_params` of an answer."""
    body = {
        "model": server.model, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "detokenize": False, "return_token_ids": True, "kv_transfer_params": transfer,
    }  # fmt: skip
    status, text = server.ask("POST", "/v1/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")


def _over_nixl(prefill: Server, decode: Server, tokens: list[int]) -> list[int]:
    """Send a prompt to `prefill` and then to `decode`, as a proxy does. Return the answer of `decode`."""
    _, handle = _ask(prefill, tokens, 1, TO_PREFILL)
    assert handle["do_remote_prefill"]
    answer: list[int] = _ask(decode, tokens, TOKENS, handle)[0]
    return answer


def _transfers(server: Server) -> int:
    lines = server.ask("GET", "/metrics")[1].splitlines()
    return int(sum(float(one.rsplit(" ", 1)[1]) for one in lines if "vllm:nixl_xfer_time_seconds_count" in one))


def _hits_again(server: Server, tokens: list[int], expected: list[int]) -> None:
    """Request a prompt that kvpipe has in memory, and check that the prompt hits."""
    before, whole = server.metric("hit_tokens"), len(tokens) // UNIT * UNIT
    assert _ask(server, tokens, TOKENS)[0] == expected
    assert eventually(lambda: server.metric("hit_tokens") - before >= whole, every_s=0.1)


@pytest.mark.parametrize("prefills", [0, 1])
def test_both_connectors_bring_kv(pair: tuple[Server, Server], expected: list[list[int]], prefills: int) -> None:
    """NIXL reads a prompt from the other server.

    When the prompt is repeated, kvpipe loads it. VLLM may ask the connectors in either order.
    """
    prefill, decode = pair[prefills], pair[1 - prefills]
    read, hit = _transfers(decode), decode.metric("hit_tokens")
    assert _over_nixl(prefill, decode, PROMPTS[prefills]) == expected[prefills]
    assert eventually(lambda: _transfers(decode) > read, every_s=0.1)
    decode.idle()
    for server in pair:
        _hits_again(server, PROMPTS[prefills], expected[prefills])
    assert decode.metric("hit_tokens") > hit


def test_a_part_in_the_pool_does_not_undo_the_prefill(pair: tuple[Server, Server], expected: list[list[int]]) -> None:
    """vLLM asks kvpipe first. Kvpipe holds only 128 of 333 tokens, and answers with no hit.

    So NIXL reads the whole prompt from the other server.
    """
    decode, prefill = pair
    _ask(decode, PROMPTS[2][:130], 1)
    decode.idle()
    read, hits = _transfers(decode), decode.metric("hit_tokens")
    assert _over_nixl(prefill, decode, PROMPTS[2]) == expected[2]
    assert eventually(lambda: _transfers(decode) > read, every_s=0.1)
    assert eventually(lambda: decode.metric("misses", reason="elsewhere") == 1, every_s=0.1)
    assert decode.metric("hit_tokens") == hits


def test_a_whole_prompt_in_the_pool_spares_the_transfer(pair: tuple[Server, Server], expected: list[list[int]]) -> None:
    """vLLM asks kvpipe first. Kvpipe has the whole prompt, so nothing is read from the prefill server."""
    decode, prefill = pair
    assert _ask(decode, PROMPTS[3], TOKENS)[0] == expected[3]
    decode.idle()
    read, hits = _transfers(decode), decode.metric("hit_tokens")
    assert _over_nixl(prefill, decode, PROMPTS[3]) == expected[3]
    assert eventually(lambda: decode.metric("hit_tokens") - hits >= 288, every_s=0.1)
    assert _transfers(decode) == read


def test_ranks_have_reported_though_another_connector_shakes_hands(pair: tuple[Server, Server]) -> None:
    """All ranks' reports arrive and no tier is refused, although another connector answers the handshake."""
    for server in pair:
        assert "tiers_not_on_all_ranks" not in server.stated
        assert "weights_not_on_all_ranks" not in server.stated
