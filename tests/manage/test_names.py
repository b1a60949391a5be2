"""Engines have names that survive a restart, and commands find the engines that listen."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvpipe.cli import main as cli
from kvpipe.inputs.cache_names import default_engine_name
from kvpipe.inputs.listening import UNIX_BYTES_MAX, Address, InUseError, OperatorSocket, listen
from tests.manage.conftest import Managed
from tests.rigs.forks import done_in_fork


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Return an address pattern that matches any number of engines."""
    return f"unix:{tmp_path}/{{engine}}.sock"


@pytest.mark.parametrize(
    ("model", "host", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "node-7.example.org", "Llama-3.1-8B-node-7"),
        ("/models/qwen/", "gpu", "qwen-gpu"),
        ("m" * 40, "vllm-llama-deployment-6d4cf56db6-x2x9z", "m" * 20 + "-nt-6d4cf56db6-x2x9z"),
        ("a model: 1", "", "a_model_1"),
        ("/", "...", "engine"),
    ],
)
def test_default_name_has_model_and_host(model: str, host: str, name: str) -> None:
    """The default name is short, because a socket's path has at most 107 bytes."""
    assert default_engine_name(model, host) == name
    assert len(name) < UNIX_BYTES_MAX // 2


def test_second_engine_of_a_default_name_gets_a_number(pattern: str) -> None:
    """After an engine has ended, another engine can have its name."""
    address = Address.parse(pattern)
    engines = [listen(address, "m-1", "manage", numbered=True) for _ in range(3)]
    assert [one.name for one in engines] == ["m-1", "m-1-2", "m-1-3"]
    engines[1].close()
    engines[1] = listen(address, "m-1", "manage", numbered=True)
    assert engines[1].address == address.of("m-1-2")
    for one in engines:
        one.close()


@pytest.mark.parametrize("numbered", [False, True])
def test_name_that_a_user_has_chosen_gets_no_number(pattern: str, tmp_path: Path, *, numbered: bool) -> None:
    """A path without `{engine}` does not contain the name. With such a path, a default name gets no number either."""
    address = Address.parse(f"unix:{tmp_path}/one.sock" if numbered else pattern)
    first = listen(address, "mine", "manage", numbered=numbered)
    with pytest.raises(InUseError, match="a running engine listens there"):
        listen(address, "mine", "manage", numbered=numbered)
    first.close()


def test_stale_sockets_are_removed_when_an_engine_starts(pattern: str, tmp_path: Path) -> None:
    """The sockets of running engines and of other programs are not removed."""
    address = Address.parse(pattern)
    living = OperatorSocket(address, "living", "manage")
    assert done_in_fork(lambda: OperatorSocket(address, "killed", "manage"))
    assert (tmp_path / "killed.sock").is_socket()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
    new = listen(address, "new", "manage", numbered=False)
    assert sorted(path.name for path in tmp_path.glob("*.sock")) == ["living.sock", "new.sock", "other.sock"]
    living.close()
    new.close()


def test_commands_find_the_one_engine_and_ask_all(
    pattern: str, managed: Managed, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands read the address from the engine's configuration, and ignore a socket without a listener."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    monkeypatch.setenv("KVPIPE_MANAGE", pattern)
    monkeypatch.setenv("KVPIPE_MANAGE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(managed.engine, "name", "first")
    assert cli.main(["engine", "state", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "first"
    second = Managed(tmp_path, name="e2")
    try:
        assert cli.main(["cache", "pins"]) == 2
        stated = capsys.readouterr().err
        assert f"2 engines listen at {pattern}: {managed.address}, {second.address}; give --at with one, or" in stated
        assert cli.main(["engine", "state", "--all", "--json"]) == 0
        answers = list(map(json.loads, capsys.readouterr().out.splitlines()))
        assert [(one["at"], one["engine"]) for one in answers] == [
            (str(managed.address), "first"),
            (str(second.address), "e2"),
        ]
        assert cli.main(["engine", "switch", "--freeze", "on", "--all-engines"]) == 0
        assert managed.side.switches.freeze
        assert second.side.switches.freeze
        capsys.readouterr()
        assert cli.main(["cache", "evict-matching", "--all", "--no-salt", "--at", str(second.address)]) == 2
        # For this command, `--all` means all chunks, not all engines. So `--all` contradicts a salt.
        assert "refused (422)" in capsys.readouterr().err
    finally:
        second.server.stop()


def test_engine_that_refuses_leaves_the_other_engines_asked(
    pattern: str, managed: Managed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine refuses. The other engines are still asked, and the status is 2."""
    second = Managed(tmp_path, name="e2")
    managed.side.switches.bypass = True
    at = ["--at", pattern, "--token-file", str(tmp_path / "token")]
    try:
        assert cli.main(["engine", "switch", "--freeze", "on", "--all-engines", *at]) == 2
        assert "refused (422): bypass contradicts freeze" in capsys.readouterr().err
        assert second.side.switches.freeze
    finally:
        second.server.stop()
