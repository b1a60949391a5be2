"""Fixtures: a scheduler side that serves its operators, and a client."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpipe.config.settings import Settings, load_settings
from kvpipe.inputs.listening import Address
from kvpipe.manage import connections, models, survey
from kvpipe.manage.client import connect
from kvpipe.manage.engine import ManagedEngine
from kvpipe.manage.start import start
from kvpipe.testing.waiting import WAIT_S
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

TOKEN = "t0" * 16
READS = {"/v1/state", "/v1/holders", "/v1/counters", "/v1/pins", "/v1/lookup"}


def hashes(prompt: models.Prompt) -> Iterator[Sequence[bytes]]:
    """Yield a growing list of a prompt's block hashes.

    In these tests, the prompt's salt is the name of the request with this prompt.
    """
    whole = [f"{prompt.cache_salt}/{unit}".encode() for unit in range(len(prompt.tokens) // UNIT)]
    for stop in range(2, len(whole), 2):
        yield whole[:stop]
    yield whole


class Managed:
    """The scheduler side of a test world, with a management server."""

    def __init__(self, folder: Path, world: SchedulerWorld | None = None, name: str = "e1", **keys: Any) -> None:
        """Serve an idle engine. `keys` are keys of the engine's configuration."""
        self.world = world or SchedulerWorld()
        self.side = self.world.side
        self.engine = ManagedEngine(
            self.side,
            name,
            hash_tokens=UNIT,
            hash_prompt=hashes,
            set_freeze=lambda on: setattr(self.side.switches, "freeze", on),
            set_bypass=lambda on: setattr(self.side.switches, "bypass", on),
        )
        self.engine.wait_s_max = self.engine.read_s_max = self.engine.count_s_max = WAIT_S
        self._engine_thread = threading.current_thread()
        self.settings = settings(folder, **keys)
        self.address = Address.parse(self.settings.manage).of(name)
        self.server = start(self.settings, self.engine, self.side.counters)
        self.side.orders.turns.give()

    def ask(
        self, method: str, path: str, body: object = None, token: str = TOKEN, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Return the status and the answer.

        The caller's thread is the engine's thread, so the engine is idle during the request.
        """
        reads = path.partition("?")[0] in READS and (method == "GET" or path == "/v1/lookup")
        if reads and threading.current_thread() is self._engine_thread:
            with self.idle():
                return self._ask(method, path, body, token, raw)
        return self._ask(method, path, body, token, raw)

    def busy(self) -> None:
        """Make the engine busy, so that operators' orders wait for its next step."""
        self.side.orders.turns.take()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Make the engine idle."""
        turns = self.side.orders.turns
        away = turns.away
        turns.give()
        try:
            yield
        finally:
            if not away:
                turns.take()

    def _ask(self, method: str, path: str, body: object, token: str, raw: bytes | None) -> tuple[int, Any]:
        connection = connect(self.address)
        try:
            given = raw if raw is not None else None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
            connection.request(method, path, given, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def good(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer to a request, which must not be a refusal."""
        status, answered = self.ask(method, path, body)
        assert status == http.client.OK, answered
        return answered

    def refused(self, why: str) -> int:
        """Return how often a request was refused for the reason `why`."""
        return self.side.counters.totals().get(f"manage_refused.{why}", 0)

    def save(self, name: str, units: int, salt: str = "") -> Any:
        """Save a request of `units` units with a salt, which stays in the pool.

        If the engine was idle before, it is idle again after the save.
        """
        request = self.world.request(name, units)
        request.cache_salt = salt or None
        with self.side.orders.turns.taken():
            self.world.admit(request)
            self.world.succeed(*self.world.step(request))
        return request


def settings(folder: Path, **keys: Any) -> Settings:
    """Return a configuration with a token in a file."""
    file = folder / "token"
    if not file.exists():
        file.touch(0o600)
        file.write_text(TOKEN + "\n", encoding="utf-8")
    given = {"manage": f"unix:{folder}/{{engine}}.sock", "manage_token_file": str(file)}
    return load_settings(given | keys)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits long enough for a slow machine."""
    monkeypatch.setattr(connections, "CONNECTION_S_MAX", WAIT_S)
    monkeypatch.setattr(survey, "SURVEY_S_MAX", WAIT_S)


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[Managed]:
    """Yield a managed scheduler side."""
    one = Managed(tmp_path)
    yield one
    one.server.stop()
