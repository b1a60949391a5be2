"""Measures the time to first token when one server prefills and another decodes, with KV transfer through tiers.

For comparison, one server alone and NIXL are measured. Like a proxy, the benchmark first sends a prompt to the prefill
server for one token. After the prefill server's answer, it sends the prompt to the decode server. The time is measured
from the first call to the decode server's first token. Each server computes on a core of its own.
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
from typing import Any, Final, NamedTuple

from benchmarks.report import Figure
from benchmarks.warm import prompt
from kvpipe.connectors.vllm.tiny.models import make_model
from tests.rigs.tier_worlds import WORLDS

LENGTHS: Final = (512, 2048)
REPEATS: Final = 5
ANSWER_TOKENS: Final = 4
START_S_MAX: Final = 600.0
TIERS: Final = ("disk", "redis")
MOST: Final = 1.5
"""The limit on the time to first token, as a multiple of one server's time to first token."""
HITS_LEAST: Final = 0.9
"""The least share of a prompt that must hit. A hit ends before the last token, at a whole block of 32 tokens."""
USAGE: Final = {"include_usage": True}
HANDED: Final = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL: Final[dict[str, Any]] = {
    "kv_connector": "NixlConnector", "kv_connector_module_path": "tests.engine.tamed_nixl", "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}  # fmt: skip
"""NIXL's configuration. NIXL's progress thread sleeps, because a polling thread takes half of the computing core."""


class Answer(NamedTuple):
    """A server's answer: seconds to the first token, the tokens, and the number of the prompt's tokens that hit."""

    first_s: float
    tokens: list[int]
    cached: int


class Server:
    """A server process of vLLM that computes on one core."""

    def __init__(self, core: int, transfer: dict[str, Any] | None) -> None:
        """Start the server on the core `core`. `transfer` is vLLM's `--kv-transfer-config`."""
        self.model, self._port = str(make_model("big-kv")), _free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--host", "127.0.0.1",
            "--port", str(self._port), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size",
            "32", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--num-gpu-blocks-override", "300",
            "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
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
        """Wait until the server answers. Raises RuntimeError if the server ends or does not answer in time."""
        limit = time.monotonic() + START_S_MAX
        while True:
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("a server did not start")
            with contextlib.suppress(OSError):
                self.prefill([3] * 40, None)
                return
            time.sleep(0.5)

    def prefill(self, tokens: Sequence[int], handed: Any) -> Any:
        """Compute a prompt and one token, and return the transfer parameters for the decode server.

        `handed` has the transfer parameters of this request.
        """
        with self._asked(tokens, 1, handed) as response:
            return json.loads(response.read()).get("kv_transfer_params")

    def answer(self, tokens: Sequence[int], handed: Any = None) -> Answer:
        """Return the answer to a prompt. `handed` has the transfer parameters from the prefill server."""
        begin, first_s, out, cached = time.perf_counter(), 0.0, list[int](), 0
        with self._asked(tokens, ANSWER_TOKENS, handed, stream=True, stream_options=USAGE) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                read = json.loads(line[len(b"data: ") :])
                for choice in read["choices"]:
                    first_s = first_s or time.perf_counter() - begin
                    out += choice["token_ids"]
                if read.get("usage"):
                    cached = (read["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(first_s, out, cached)

    @contextlib.contextmanager
    def _asked(self, tokens: Sequence[int], count: int, handed: Any, **more: Any) -> Iterator[http.client.HTTPResponse]:
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True, "kv_transfer_params": handed,
        } | more  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S_MAX)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()

    def end(self) -> None:
        """Kill the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _servers(*transfers: dict[str, Any] | None) -> Iterator[list[Server]]:
    """Start a server for each of `transfers`, yield the servers when all answer, and kill them at the end."""
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
    """Return, by prompt length, the median seconds to the first token of a server alone, and the server's answers."""
    out = {}
    with _servers(None) as (server,):
        for n in lengths:
            answers = [server.answer(prompt(n, 100 * n + at)) for at in range(REPEATS)]
            out[n] = median(one.first_s for one in answers), [one.tokens for one in answers]
    return out


def _pair(
    transfers: Sequence[dict[str, Any]], answers: dict[int, list[list[int]]], *, hands: bool
) -> dict[int, tuple[float, int]]:
    """Return, by prompt length, the median seconds until the decode server's first token, and the hits.

    The hits are the fewest tokens of a prompt that the decode server did not compute. `hands` says that the prefill
    server returns transfer parameters for the decode server.

    Raises:
        RuntimeError: an answer differs from the answer of one server alone.

    """
    out = {}
    with _servers(*transfers) as (prefill, decode):
        for n, expected in answers.items():
            seconds, cached = [], []
            for at in range(REPEATS):
                tokens, begin = prompt(n, 100 * n + at), time.perf_counter()
                handed = prefill.prefill(tokens, HANDED if hands else None)
                before = time.perf_counter() - begin
                answer = decode.answer(tokens, handed)
                seconds.append(before + answer.first_s)
                cached.append(answer.cached)
                if answer.tokens != expected[at]:
                    raise RuntimeError(f"{n} tokens: {answer.tokens} instead of one server's {expected[at]}")
            out[n] = median(seconds), min(cached)
    return out


def _kvpipe(role: str, tier: dict[str, Any]) -> dict[str, Any]:
    extra = {"pool_bytes_max": "1GiB", "tiers": [tier]}
    return {"kv_connector": "KVPipeConnector", "kv_role": role, "kv_connector_extra_config": extra}


def run() -> list[Figure]:
    """Return the figures of each kind of tier and each prompt length, relative to one server."""
    alone = _alone(LENGTHS)
    answers = {n: given for n, (_, given) in alone.items()}
    nixl = _pair([NIXL, NIXL], answers, hands=True)
    out = []
    for kind in TIERS:
        with (
            tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parents[1]) as folder,
            WORLDS[kind](Path(folder)) as world,
        ):
            tier = json.loads(world.spec.model_dump_json(exclude_none=True))
            took = _pair([_kvpipe(role, tier) for role in ("kv_producer", "kv_consumer")], answers, hands=False)
        for n in LENGTHS:
            seconds, hits = took[n]
            beside = f"{seconds * 1e3:.0f} ms; one server {alone[n][0] * 1e3:.0f} ms, NIXL {nixl[n][0] * 1e3:.0f} ms"
            name = f"first token of prefill and decode through {kind} / one server, {n} tokens"
            out.append(Figure(name, seconds / alone[n][0], MOST, "x", beside))
            name = f"hits of the decode server through {kind}, {n} tokens"
            out.append(Figure(name, hits / n, HITS_LEAST, "of the prompt", at_least=True))
    return out
