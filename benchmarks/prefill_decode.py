"""Prefill in one server, decode in another: the time to the first token through tiers, beside one server and NIXL.

A prompt goes to the prefill server for one token, and at its answer to the decode server, as a proxy sends it. The time
counts from the first call to the decode server's first token. Each server computes on a core of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.report import Figure
from benchmarks.warm import prompt
from kvpipe.testing.models import make_model
from kvpipe.testing.tier_worlds import WORLDS

LENGTHS: Final = (512, 2048)
REPEATS: Final = 5
ANSWER_TOKENS: Final = 4
START_S_MAX: Final = 600.0
LIMITS: Final = {"disk": 1.25, "redis": 1.5}
"""The limits of one server's time to the first token."""
HANDED: Final = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL: Final[dict[str, Any]] = {
    "kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engine.tamed_nixl", "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}  # fmt: skip
"""With a progress thread that sleeps: unchanged it takes half of the core that computes."""


class Answer:
    """A server's answer to one prompt: its tokens, and what it returns for the next server."""

    def __init__(self) -> None:
        """Nothing has come."""
        self.tokens: list[int] = []
        self.handed: Any = None


class Server:
    """One server of vLLM's, on the core `core`."""

    def __init__(self, core: int, transfer: dict[str, Any] | None) -> None:
        """Start it. `transfer`: vLLM's `--kv-transfer-config`."""
        self.model, self._port = str(make_model("big-kv")), _free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--host", "127.0.0.1",
            "--port", str(self._port), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size",
            "32", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--num-gpu-blocks-override", "300",
            "--no-enable-prefix-caching",
        ]  # fmt: skip
        command += ["--kv-transfer-config", json.dumps(transfer)] if transfer is not None else []
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()), "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        self._process = subprocess.Popen(  # noqa: S603
            command, env=os.environ | environment, start_new_session=True, stdout=subprocess.DEVNULL
        )

    def wait(self) -> None:
        """Wait until it answers."""
        limit = time.monotonic() + START_S_MAX
        while True:
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("a server did not start")
            with contextlib.suppress(OSError):
                self.ask([3] * 40, 1)
                return
            time.sleep(0.5)

    def ask(self, tokens: Sequence[int], count: int, handed: Any = None, **more: Any) -> Answer:
        """Return the answer to a prompt. `handed`: what the prefill server has returned, or what it is told."""
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True, "kv_transfer_params": handed,
        } | more  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S_MAX)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            read, out = json.loads(connection.getresponse().read()), Answer()
        out.tokens, out.handed = read["choices"][0]["token_ids"], read.get("kv_transfer_params")
        return out

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _servers(*transfers: dict[str, Any] | None) -> Iterator[list[Server]]:
    """Start servers beside each other, and end them."""
    made = []
    try:
        for core, transfer in enumerate(transfers):
            made.append(Server(core, transfer))
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.end()


def _alone(lengths: Sequence[int]) -> dict[int, tuple[float, list[list[int]]]]:
    """Return, by length, one server's median seconds to the first token, and its answers."""
    out = {}
    with _servers(None) as (server,):
        for n in lengths:
            seconds, answers = [], []
            for at in range(REPEATS):
                begin = time.perf_counter()
                server.ask(prompt(n, 100 * n + at), 1)
                seconds.append(time.perf_counter() - begin)
                answers.append(server.ask(prompt(n, 100 * n + at), ANSWER_TOKENS).tokens)
            out[n] = median(seconds), answers
    return out


def _pair(transfers: Sequence[dict[str, Any]], answers: dict[int, list[list[int]]], *, hands: bool) -> dict[int, float]:
    """Return, by length, the median seconds from the prompt's arrival to the decode server's first token.

    `hands`: the prefill server is told, and returns what the decode server is told.
    """
    out = {}
    with _servers(*transfers) as (prefill, decode):
        for n, expected in answers.items():
            seconds = []
            for at in range(REPEATS):
                tokens = prompt(n, 100 * n + at)
                begin = time.perf_counter()
                handed = prefill.ask(tokens, 1, HANDED if hands else None).handed
                first = decode.ask(tokens, 1, handed)
                seconds.append(time.perf_counter() - begin)
                assert first.tokens == expected[at][:1], "the answer differs from one server's"
            out[n] = median(seconds)
    return out


def _kvpipe(role: str, tier: dict[str, Any]) -> dict[str, Any]:
    extra = {"pool_bytes_max": "1GiB", "tiers": [tier]}
    return {"kv_connector": "KVPipeConnector", "kv_role": role, "kv_connector_extra_config": extra}


def run() -> list[Figure]:
    """Every way and length, beside one server."""
    alone = _alone(LENGTHS)
    answers = {n: given for n, (_, given) in alone.items()}
    nixl = _pair([NIXL, NIXL], answers, hands=True)
    out = []
    for kind, limit in LIMITS.items():
        with (
            tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parents[1]) as folder,
            WORLDS[kind](Path(folder)) as world,
        ):
            tier = json.loads(world.spec.model_dump_json(exclude_none=True))
            took = _pair([_kvpipe(role, tier) for role in ("kv_producer", "kv_consumer")], answers, hands=False)
        for n in LENGTHS:
            beside = f"{took[n] * 1e3:.0f} ms; one server {alone[n][0] * 1e3:.0f} ms, NIXL {nixl[n] * 1e3:.0f} ms"
            name = f"first token of prefill and decode through {kind} / one server, {n} tokens"
            out.append(Figure(name, took[n] / alone[n][0], limit, "x", beside))
    return out
