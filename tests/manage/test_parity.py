"""What the interface serves, what its page lists and what `kvpipe engine` asks are the same."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli import manage
from kvpipe.manage.api import make_app
from tests.manage.conftest import Managed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "management.md"
ROW = re.compile(r"^\| (`(?:GET|POST|PUT|DELETE)[^|]*) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)

Operation = tuple[str, str]


def _operation(method: str, path: str) -> Operation:
    """A method and a path; whatever number or name stands in it."""
    return method.upper(), re.sub(r"\?.*|/(?:\{\w+\}|\d+|[A-Z]+)$", lambda hit: "/N" if hit[0][0] == "/" else "", path)


def _served(managed: Managed) -> set[Operation]:
    paths = make_app(managed.engine, managed.side.counters).openapi()["paths"]
    return {_operation(method, path) for path, methods in paths.items() for method in methods}


def _listed() -> tuple[set[Operation], set[str]]:
    """Return the operations of the page's table, and its commands. A method without a path is of the next one."""
    operations, commands = set[Operation](), set[str]()
    for asked, names in ROW.findall(PAGE.read_text(encoding="utf-8")):
        path = ""
        for one in reversed(re.findall(r"`([^`]+)`", asked)):
            method, _, own = one.partition(" ")
            path = own or path
            operations.add(_operation(method, path))
        commands |= set(re.findall(r"`([\w-]+)`", names))
    return operations, commands


def _asked(monkeypatch: pytest.MonkeyPatch, token: Path) -> dict[str, set[Operation]]:
    """Return what each command asks when it is called with whatever it needs. Nobody is asked."""
    out = dict[str, set[Operation]]()
    parser = argparse.ArgumentParser()
    manage.add_parsers(parser)
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        asked = out[name] = set()

        def ask(_at: object, _token: str, method: str, path: str, _body: object, to: set[Operation] = asked) -> Any:
            to.add(_operation(method, path))
            return {}

        monkeypatch.setattr(manage, "ask", ask)
        given = ["--at", "127.0.0.1:1"] if "--at" in command.format_help() else []
        for one in command._actions:
            value = str(next(iter(one.choices))) if one.choices else "1"
            if not one.option_strings:
                given.append(value)
            elif one.required or one.choices:
                given += [one.option_strings[0], value]
        args = parser.parse_args([name, *given, "--token-file", str(token)])
        assert args.run(args) == 0
    return out


def test_page_command_and_interface_agree(managed: Managed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every operation is on the page and has a command; every command is on the page. A state has the switches."""
    served, (listed, commands) = _served(managed), _listed()
    asked = _asked(monkeypatch, tmp_path / "token")
    assert len(served) > 10
    assert listed == served
    assert set().union(*asked.values()) == served - {("GET", "/v1/switches")}
    assert commands == {name for name, operations in asked.items() if operations}
