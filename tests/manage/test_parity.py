"""The interface, its page, and the commands `kvpipe engine` and `kvpipe cache` have the same operations."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli import asking, cache, held, main, manage
from kvpipe.manage.api import make_app
from tests.manage.conftest import Managed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "management.md"
ROW = re.compile(r"^\| (`(?:GET|POST|PUT|DELETE)[^|]*) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)

Operation = tuple[str, str]


def _operation(method: str, path: str) -> Operation:
    """Return a method and a path in which placeholders replace numbers and names."""
    return method.upper(), re.sub(r"\?.*|/(?:\{\w+\}|\d+|[A-Z]+)$", lambda hit: "/N" if hit[0][0] == "/" else "", path)


def _served(managed: Managed) -> set[Operation]:
    paths = make_app(managed.engine, managed.side.counters).openapi()["paths"]
    return {_operation(method, path) for path, methods in paths.items() for method in methods}


def _listed() -> tuple[set[Operation], set[str]]:
    """Return the operations and the commands in the page's table.

    In the table, a method without a path belongs to the next path.
    """
    operations, commands = set[Operation](), set[str]()
    for asked, names in ROW.findall(PAGE.read_text(encoding="utf-8")):
        path = ""
        for one in reversed(re.findall(r"`([^`]+)`", asked)):
            method, _, own = one.partition(" ")
            path = own or path
            operations.add(_operation(method, path))
        commands |= set(re.findall(r"`((?:engine|cache) [\w-]+)`", names))
    return operations, commands


def _of(add: Callable[[argparse.ArgumentParser], None]) -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    add(parser)
    (sub,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return dict(sub.choices)


def _commands() -> dict[str, argparse.ArgumentParser]:
    """Return the commands that ask an engine or take an engine's token. Commands for tiers take no token."""
    both = {"engine": _of(manage.add_parsers), "cache": _of(cache.add_parsers)}
    named = {f"{of} {name}": one for of, commands in both.items() for name, one in commands.items()}
    return {name: one for name, one in named.items() if "--token-file" in one.format_help()}


def _asked(monkeypatch: pytest.MonkeyPatch, token: Path) -> dict[str, set[Operation]]:
    """Return the requests that each command would send if it is called with all required arguments.

    No engine is asked.
    """
    out = dict[str, set[Operation]]()
    for name, command in _commands().items():
        asked = out[name] = set()

        def ask(_at: object, _token: str, method: str, path: str, _body: object, to: set[Operation] = asked) -> Any:
            to.add(_operation(method, path))
            return {}

        monkeypatch.setattr(asking, "send_request", ask)
        given = ["--at", "127.0.0.1:1"] if "--at" in command.format_help() else []
        for one in command._actions:
            value = str(next(iter(one.choices))) if one.choices else "1"
            if not one.option_strings:
                given.append(value)
            elif one.required or one.choices:
                given += [one.option_strings[0], value]
        args = command.parse_args([*given, "--token-file", str(token)])
        assert args.run(args) == 0
    return out


def test_page_command_and_interface_agree(managed: Managed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every operation has a row on the page and a command, and every command is on the page.

    The page shows the switches as a part of the state.
    """
    served, (listed, commands) = _served(managed), _listed()
    asked = _asked(monkeypatch, tmp_path / "token")
    assert len(served) > 10
    assert listed == served
    assert set().union(*asked.values()) == served - {("GET", "/v1/switches")}
    assert commands == {name for name, operations in asked.items() if operations}


def test_each_command_has_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvpipe cache` has all commands about held KV, and `kvpipe engine` refers to these."""
    asking_cache = {name.removeprefix("cache ") for name in _commands() if name.startswith("cache ")}
    assert asking_cache == set(held.COMMANDS)
    assert not asking_cache & set(_of(manage.add_parsers))
    for name in held.COMMANDS:
        with pytest.raises(SystemExit, match="2"):
            main.main(["engine", name, "--at", "127.0.0.1:1", "1,2"])
        assert f"engine {name}: this is a command of `kvpipe cache`: kvpipe cache {name}" in capsys.readouterr().err


def test_help_separates_commands_for_engines_from_commands_for_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    """One heading has the commands that ask an engine. Another heading has the commands that open tiers.

    No command is missing.
    """
    with pytest.raises(SystemExit, match="0"):
        main.main(["cache", "--help"])
    _, asking_engine, opening_tiers = re.split(r"\n\n(?=ask a running|open tiers)", capsys.readouterr().out)
    listed = [set(re.findall(r"^  (\S+) ", part, re.MULTILINE)) for part in (asking_engine, opening_tiers)]
    assert listed == [set(held.COMMANDS), set(_of(cache.add_parsers)) - set(held.COMMANDS)]
    assert "--at" in asking_engine
    assert "--at" not in opening_tiers
