"""A scheduler side that is served to its operators, and a client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpipe.config import Settings, load_settings
from kvpipe.connectors.vllm.trial.scheduler_world import UNIT, SchedulerWorld
from kvpipe.listening import Address
from kvpipe.manage import connections, models, survey
from kvpipe.manage.client import connect
from kvpipe.manage.engine import ManagedEngine
from kvpipe.manage.start import start
from kvpipe.testing.waiting import WAIT_S

TOKEN = "t0" * 16


def hashes(prompt: models.Prompt) -> Iterator[Sequence[bytes]]:
    """The world's: a prompt is that of the request that its salt names."""
    whole = [f"{prompt.cache_salt}/{unit}".encode() for unit in range(len(prompt.tokens) // UNIT)]
    for stop in range(2, len(whole), 2):
        yield whole[:stop]
    yield whole


class Managed:
    """`world.side`, served."""

    def __init__(self, folder: Path, world: SchedulerWorld | None = None, **keys: Any) -> None:
        """Serves from now on. `keys`: of the configuration."""
        self.world = world or SchedulerWorld()
        self.side = self.world.side
        self.engine = ManagedEngine(
            self.side,
            "e1",
            hash_tokens=UNIT,
            hash_prompt=hashes,
            set_freeze=lambda on: setattr(self.side.switches, "freeze", on),
            set_bypass=lambda on: setattr(self.side.switches, "bypass", on),
        )
        self.engine.wait_s_max = WAIT_S
        self.settings = settings(folder, **keys)
        self.address = Address.parse(self.settings.manage).of("e1")
        self.server = start(self.settings, self.engine, "e1", self.side.counters)

    def ask(
        self, method: str, path: str, body: object = None, token: str = TOKEN, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Return status and answer."""
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
        """Return an answer that is none of refusal."""
        status, answered = self.ask(method, path, body)
        assert status == http.client.OK, answered
        return answered

    def refused(self, why: str) -> int:
        """How often a request was refused for a reason."""
        return self.side.counters.totals().get(f"manage_refused.{why}", 0)

    def save(self, name: str, units: int, salt: str = "") -> Any:
        """Let a request of so many units, with a salt, come, be saved, and stay."""
        request = self.world.request(name, units)
        request.cache_salt = salt or None
        self.world.admit(request)
        self.world.succeed(*self.world.step(request))
        return request


def settings(folder: Path, **keys: Any) -> Settings:
    """A configuration with a token in a file of its own."""
    file = folder / "token"
    if not file.exists():
        file.touch(0o600)
        file.write_text(TOKEN + "\n", encoding="utf-8")
    given = {"manage": f"unix:{folder}/{{engine}}.sock", "manage_token_file": str(file)}
    return load_settings(given | keys)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(connections, "CONNECTION_S_MAX", WAIT_S)
    monkeypatch.setattr(survey, "SURVEY_S_MAX", WAIT_S)


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[Managed]:
    """A served side."""
    one = Managed(tmp_path)
    yield one
    one.server.stop()
