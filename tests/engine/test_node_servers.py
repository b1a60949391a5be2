"""Servers, replicas and tensor-parallel engines share the memory of their node, and restart while others serve."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.trial.processors import complete
from kvpipe.testing.waiting import eventually
from tests.engine.child_engine import Child
from tests.engine.common import BLOCK, baseline, engine, prompt, whole_blocks
from tests.engine.serving import Server

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 96), prompt(200, 97)]
DUE = [whole_blocks(BLOCK, len(tokens)) for tokens in PROMPTS]
TOKENS = 8


@pytest.fixture
def node(short_path: Path) -> dict[str, Any]:
    """Return the configuration of engines that share one memory."""
    return {
        "chunk_tokens": 128, "pool": "node", "pool_dir": str(short_path / "node"), "keep_s": 5,
        "pool_bytes_max": "64MiB",
    }  # fmt: skip


def _hits(server: Server, replica: int = 0) -> float:
    """Return the number of tokens that a replica of a server has found in memory."""
    return server.metric("hit_tokens", tier="memory", engine=str(replica))


def _asked_for(server: Server, replica: int) -> float:
    """Return the number of tokens that a replica of a server has found or missed, in all requests."""
    return sum(server.metric(name, engine=str(replica)) for name in ("missed_tokens", "hit_tokens"))


@contextmanager
def _asked(server: Server, expected: list[list[int]]) -> Iterator[None]:
    """Send requests to the server without a pause, and check the answers.

    At least one round of requests ends in the context.
    """
    wrong, done, over = [], threading.Event(), threading.Event()

    def ask() -> None:
        while not over.is_set():
            for tokens, answer in zip(PROMPTS, expected, strict=True):
                wrong.extend([] if (given := server.stream(tokens, TOKENS)) == answer else [given])
            done.set()

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
        assert eventually(done.is_set, every_s=0.05)
    finally:
        over.set()
        client.join()
    assert not wrong


def test_servers_share_one_memory_when_each_is_killed_while_the_other_serves(
    tmp_path: Path, node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of one server, and another server, find each other's chunks, also after a restart.

    Each server is killed while the other server answers, and hits with the first requests after its restart. All
    answers are those of an engine without kvpipe.
    """
    monkeypatch.delenv("KVPIPE_TRACE_FILE")  # a killed process may leave an incomplete last line
    expected = baseline(PROMPTS, TOKENS, enable_prefix_caching=False)

    def start(name: str, *options: str) -> Server:
        server = Server(
            tmp_path / name, node, "--no-enable-prefix-caching", *options, VLLM_CPU_OMP_THREADS_BIND="nobind"
        )
        server.begin()
        return server

    def check(server: Server, which: int, *, found: bool, replica: int = 0) -> None:
        before, asked_for = _hits(server, replica), _asked_for(server, replica) + len(PROMPTS[which])
        assert server.stream(PROMPTS[which], TOKENS, rank=replica) == expected[which]
        server.idle()
        assert eventually(lambda: _asked_for(server, replica) >= asked_for, every_s=0.1)  # metrics may be late
        assert _hits(server, replica) - before == found * DUE[which]

    replicas, single = start("replicas", "--data-parallel-size", "2"), start("single")
    with replicas, single:
        check(replicas, 0, found=False)
        check(replicas, 0, found=True, replica=1)
        check(single, 0, found=True)
        check(single, 1, found=False)
        check(replicas, 1, found=True, replica=1)
        with _asked(replicas, expected):
            single.kill()
            again = start("single again")
            with again:
                check(again, 0, found=True)
                check(again, 1, found=True)
        with start("single at last") as last, _asked(last, expected):
            replicas.kill()
            with start("replicas again", "--data-parallel-size", "2") as more:
                for replica in (0, 1):
                    check(more, 0, found=True, replica=replica)
                    check(more, 1, found=True, replica=replica)


def test_engines_of_two_ranks_share_one_copy_of_latents(node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine with MLA on two ranks is killed while the other engine serves, and hits after its restart.

    The expected answers are those of vLLM's own prefix cache, for the reason in
    `test_latents_on_two_ranks_give_the_answers_of_a_prefix_cache`.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.delenv("KVPIPE_TRACE_FILE")
    options: dict[str, Any] = {"recipe": "deepseek-mla", "dtype": "bfloat16", "tensor_parallel_size": 2}
    with complete("amx"), engine(**options, enable_prefix_caching=True) as plain:
        cold, warm = ([plain.generate([tokens], TOKENS)[0] for tokens in PROMPTS] for _ in range(2))
        held = whole_blocks(plain, *map(len, PROMPTS))
    options |= {"kvpipe": node, "enable_prefix_caching": False, "processor": "amx"}

    def check(asked: Child, answers: list[list[int]], hits: int) -> None:
        given = [asked.generate([tokens], TOKENS) for tokens in PROMPTS]
        assert ([one for (one,), _ in given], given[-1][1].get("memory", 0)) == (answers, hits)

    first, second = Child(options), Child(options)
    try:
        check(first, cold, 0)
        check(second, warm, held)
        first.kill()
        check(second, warm, 2 * held)
        first = Child(options)
        check(first, warm, held)
        second.kill()
        check(first, warm, 2 * held)
        second = Child(options)
        check(second, warm, held)
    finally:
        first.kill()
        second.kill()
