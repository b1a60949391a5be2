"""Every `kvpipe` command on the pages for users and operators runs, with an engine that serves and a disk tier."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.cli.main import main
from tests.manage.conftest import Managed

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("quickstart", "installation", "deployment", "operations", "troubleshooting", "ecosystem")
REFUSED = {
    "kvpipe cache warm 1,2,3,4 --seconds 600": "this engine has no tiers",
    "kvpipe top --at 127.0.0.1:9400 --token-file token": "tests/manage/test_tls_proxy.py has the tunnel",
    "kvpipe top --token-file token": "it runs until it is ended",
}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `kvpipe` command in the page's shell blocks, including the variables before the command.

    Commands in code font in the last column of rows about kvpipe are also included.
    """
    for cell in re.findall(r"^\| kvpipe \|.*\| ([^|]+) \|$", text, re.MULTILINE):
        yield from (shlex.split(code) for code in re.findall(r"`(kvpipe [^`]*)`", cell) if "…" not in code)
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"^ *([A-Z_]+=\S+ )*kvpipe ", line) else []
            if words:
                yield words


def _all() -> list[tuple[str, list[str]]]:
    return [(page, words) for page in PAGES for words in commands((DOCS / f"{page}.md").read_text(encoding="utf-8"))]


def _plain(words: list[str]) -> list[str]:
    return [word for word in words if not re.match(r"^[A-Z_]+=", word)]


@pytest.fixture
def _environment(managed: Managed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of the quickstart for this test's engine."""
    (tmp_path / "kv").mkdir()
    managed.engine.wait_s_max = 0.01
    managed.side.orders.turns.give()  # the engine is idle, so orders are carried out at once
    for name in [name for name in os.environ if name.startswith("KVPIPE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setenv("KVPIPE_MANAGE", managed.settings.manage)
    monkeypatch.setenv("KVPIPE_MANAGE_TOKEN_FILE", str(managed.settings.manage_token_file))


@pytest.mark.usefixtures("_environment")
def test_commands_on_the_pages_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command succeeds. A folder of this test replaces `/mnt/nvme/kv`."""
    failed = {}
    for page, words in _all():
        plain = _plain(words)
        if shlex.join(plain) in REFUSED or "doctor" in plain:  # tests/cli/test_doctor.py tests doctor
            continue
        try:
            status = main([word.replace("/mnt/nvme/kv", str(tmp_path / "kv")) for word in plain[1:]])
        except SystemExit as ended:  # argparse exits in this way
            status = int(ended.code or 0)
        if status:
            failed[f"{page}: {shlex.join(words)}"] = capsys.readouterr().err
    assert failed == {}


def test_each_exception_is_on_a_page() -> None:
    """Every command in the list of exceptions is on a page. The pages have many other commands."""
    there = {shlex.join(_plain(words)) for _, words in _all()}
    assert len(there) > 20
    assert set(REFUSED) <= there
