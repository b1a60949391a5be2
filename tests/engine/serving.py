"""vLLM's OpenAI-compatible server in its own processes, and clients that stream from it, disconnect, and kill it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvpipe.connectors.vllm.tiny.engine import DEFAULTS
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.testing.waiting import WAIT_S
from tests.rigs.forked import Forked, kill_group, serve

START_SECONDS_MAX = 5 * WAIT_S
ANSWER_SECONDS_MAX = 2 * WAIT_S
TROUBLES = ("contained_error", "illegal_transition", "EngineDeadError")


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """A server.

    Inside a block `with Server(...)` the server answers. At the end of the block the server ends, even if requests are
    running.
    """

    def __init__(
        self,
        log: Path,
        kvpipe: dict[str, Any] | None,
        *options: str,
        model: Path | None = None,
        spawned: bool = False,
        transfer: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        """`options` are options of the command `vllm serve`.

        `log` is the file for the server's output. Lines that the server logs while it stops are not checked. `kvpipe`
        is kvpipe's extra config. `transfer` is the whole value of vLLM's flag, if kvpipe is not the only connector.
        `spawned` says that the server spawns its processes, as vLLM's CPU build does. Otherwise the server forks them,
        which is faster.
        """
        self.model, self.port, self.log = str(model or make_model("llama")), free_port(), log
        flag: dict[str, Any] = {"kv_connector": "KVPipeConnector", "kv_role": "kv_both"}
        flag["kv_load_failure_policy"] = "recompute"  # the README's flag has this value
        if kvpipe is not None:
            flag["kv_connector_extra_config"] = kvpipe
        self._spawned = spawned
        self._arguments = [
            "--model", self.model, "--host", "127.0.0.1", "--port", str(self.port),
            "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--block-size",
            str(DEFAULTS["block_size"]), "--max-model-len", "1024", "--kv-transfer-config",
            json.dumps(transfer or flag), *options,
        ]  # fmt: skip
        self._environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO",
        } | environment  # fmt: skip
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._stopping = False

    def begin(self) -> None:
        """Start the server without waiting, so that a test can start several servers in parallel."""
        with self.log.open("wb") as sink:
            if not self._spawned:
                self._process = Forked(serve, str(self.log), self._environment, self._arguments)
                return
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._arguments]
            self._process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=os.environ | self._environment,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        """Wait until the server answers. Start the server first if `begin` was not called."""
        if self._process is None:
            self.begin()
        assert self._process is not None
        limit = time.monotonic() + START_SECONDS_MAX
        try:
            while not self._healthy():
                assert self._process.poll() is None, self.stated[-3000:]
                assert time.monotonic() < limit, self.stated[-3000:]
                time.sleep(0.3)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        """Stop the server. Check that its output before the stop shows no error."""
        assert self._process is not None
        message = self.stated
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # vLLM sometimes waits for clients without end
                self._process.wait(60)
        self.kill()
        if kind is None:
            for trouble in TROUBLES:
                assert trouble not in message, message[max(0, message.index(trouble) - 500) :][:3000]

    @property
    def stated(self) -> str:
        """The server's output so far."""
        return self.log.read_text("utf-8", "replace")

    def kill(self) -> None:
        """Send SIGKILL to all of the server's processes. A second call does nothing."""
        assert self._process is not None
        kill_group(self._process)

    def _healthy(self) -> bool:
        try:
            return self.ask("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Send one request. Return the HTTP status and the text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS_MAX)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def stream(
        self, tokens: Sequence[int], max_tokens: int, *, leave_after: int | None = None, rank: int | None = None
    ) -> list[int] | None:
        """Return the tokens of a streamed answer, or None if the client has disconnected after `leave_after` events.

        Raises:
            OSError: the server has ended.
        """
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "detokenize": False, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS_MAX)
        message: list[int] = []
        events = 0
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == http.client.OK, answer.read()[:2000]
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                message += [token for choice in event["choices"] for token in choice["token_ids"] or ()]
                events += 1
                if events == leave_after:
                    return None
        except http.client.HTTPException as error:
            raise ConnectionError(repr(error)) from error
        finally:
            connection.close()
        if len(message) != max_tokens:
            raise ConnectionError(f"{len(message)} of {max_tokens} tokens came")
        return message

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of `vllm:kvpipe_<name>` over all lines with `labels`."""
        lines = self.ask("GET", "/metrics")[1].splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"vllm:kvpipe_{name}{{", f"vllm:kvpipe_{name}_total{{"))
            and all(one in line for one in wanted)
        )

    def idle(self, seconds_max: float = WAIT_S) -> None:
        """Wait until no request runs and kvpipe holds nothing, without further requests."""
        limit = time.monotonic() + seconds_max
        held = ("requests", "leases", "jobs_in_flight")
        while sum(self.metric(name) for name in held):
            assert time.monotonic() < limit, {name: self.metric(name) for name in held}
            time.sleep(0.3)
