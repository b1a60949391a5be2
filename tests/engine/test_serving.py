"""Users stream, disconnect during an answer, reset the cache, kill the server, and run several engines on one disk."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.waiting import PATIENT, PATIENT_MS, WAIT_S, eventually
from tests.engine.common import BLOCK, baseline, prompt
from tests.engine.serving import Server

pytestmark = pytest.mark.engine

SHARED = prompt(192, 71)
PROMPTS = [SHARED + prompt(40 + 30 * i, 80 + i) for i in range(6)] + [prompt(400, 90)]
TOKENS = 24
FEW_BLOCKS = ("--num-gpu-blocks-override", str(1280 // BLOCK), "--max-num-seqs", "12")


def _disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "chunk_tokens": 64, "pool_bytes_max": "64MiB", "lookup_ms_max": PATIENT_MS,
        "lookup_slow_ms_max": PATIENT_MS,
        "tiers": [{"kind": "disk", "path": str(folder / "kv"), "bytes_max": "1GiB", **PATIENT}],
    } | more  # fmt: skip


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the answers of an engine without kvpipe."""
    return baseline(PROMPTS, TOKENS, enable_prefix_caching=False)


class Clients:
    """Concurrent clients.

    Each client sends requests again and again, and a third of the clients disconnect during an answer.
    """

    def __init__(self, server: Server, expected: list[list[int]], clients: int, each: int) -> None:
        """Start the clients."""
        self._server, self._expected, self._each = server, expected, each
        self.right = self.left = self.broken = 0
        self.wrong: list[int] = []
        self.begun = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self._running = [self._pool.submit(self._client, number) for number in range(clients)]

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        for _ in range(self._each):
            which = rng.randrange(len(PROMPTS))
            leave_after = rng.randrange(1, TOKENS // 2) if number % 3 == 0 else None
            self.begun.release()
            try:
                message = self._server.stream(PROMPTS[which], TOKENS, leave_after=leave_after)
            except OSError:
                with self._lock:
                    self.broken += 1
                return
            with self._lock:
                if message is None:
                    self.left += 1
                elif message == self._expected[which]:
                    self.right += 1
                else:
                    self.wrong.append(which)

    def join(self) -> None:
        """Wait for all clients, and check that no client got a wrong answer."""
        for one in self._running:
            one.result()
        self._pool.shutdown()
        assert not self.wrong


def test_streaming_clients_that_leave_while_the_cache_is_reset(tmp_path: Path, expected: list[list[int]]) -> None:
    """Every finished answer is right during preemptions and resets. After the last answer, no chunk is leased."""
    with Server(tmp_path / "log", _disk(tmp_path), *FEW_BLOCKS) as server:
        clients = Clients(server, expected, clients=24, each=3)
        for _ in range(2):
            for _ in range(20):
                assert clients.begun.acquire(timeout=2 * WAIT_S)
            assert server.ask("POST", "/reset_prefix_cache?reset_external=true")[0] == 200
        clients.join()
        assert (clients.right, clients.left, clients.broken) == (16 * 3, 8 * 3, 0)
        server.idle()
        assert server.metric("preemptions") > 0
        assert server.metric("hit_tokens") > 0
        assert server.stream(PROMPTS[0], TOKENS) == expected[0]


def test_killed_in_mid_load_and_restarted(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed and restarted twice.

    Each new server answers rightly and finds the chunks of the server before.
    """
    monkeypatch.delenv("KVPIPE_TRACE_FILE")  # a killed process may leave an incomplete last line in the trace
    found = []
    for last in (False, False, True):
        with Server(tmp_path / "log", _disk(tmp_path), *FEW_BLOCKS) as server:
            clients = Clients(server, expected, clients=8, each=1 if last else 40)
            if last:
                clients.join()
                assert not clients.broken
            else:
                limit = time.monotonic() + 2 * WAIT_S
                while clients.right < 12:
                    assert not clients.wrong
                    assert time.monotonic() < limit
                    time.sleep(0.05)
            found.append(server.metric("hit_tokens", tier="disk"))
            if not last:
                server.kill()
                clients.join()
                assert clients.broken
    assert not found[0]
    assert found[1] > 0
    assert found[2] > 0


def _share(folder: Path, expected: list[list[int]], asked: tuple[int, ...], *options: str) -> None:
    """Check that two replicas share a disk: each replica finds chunks that the other replica has computed."""
    kvpipe = _disk(folder, name="shared", state_dir=str(folder / "state"))
    options = ("--data-parallel-size", "2", "--no-enable-prefix-caching", *options)
    with Server(folder / "log", kvpipe, *options, VLLM_CPU_OMP_THREADS_BIND="nobind") as server:
        for number, which in enumerate(asked):
            assert server.stream(PROMPTS[which], TOKENS, rank=number % 2) == expected[which]
        server.idle()
        assert eventually(lambda: len(list((folder / "kv").rglob("*-g0-*"))) >= 10, every_s=0.2)
        for number, which in enumerate(asked):
            assert server.stream(PROMPTS[which], TOKENS, rank=1 - number % 2) == expected[which]
        server.idle()
        for replica in "01":  # the other API server may report the metric only after the answer

            def hits(replica: str = replica) -> float:
                return server.metric("hit_tokens", tier="disk", engine=replica)

            assert eventually(hits, every_s=0.2)


def test_two_replicas_share_disk_name_and_trace(tmp_path: Path, expected: list[list[int]]) -> None:
    """Two data parallel replicas and two API servers share a disk, a name, a state folder and a trace."""
    _share(tmp_path, expected, (0, 1, 6), "--api-server-count", "2")


def test_two_replicas_of_two_ranks_share_disk_name_and_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas have two ranks each. A chunk is found if both ranks of a replica have stored it."""
    # this test's engine without kvpipe needs the variable to run two ranks
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    expected = baseline(PROMPTS[:2], TOKENS, tensor_parallel_size=2, enable_prefix_caching=False)
    _share(tmp_path, expected, (0, 1), "--tensor-parallel-size", "2")
