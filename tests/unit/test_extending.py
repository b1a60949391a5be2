"""What `docs/extending.md` shows is what is there, and what it lets a reader write keeps the protocols."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "tests" / "third_party_tier"
BLOCKS = re.findall(r"^ *```(?:python|toml)\n *# ([\w.]+)\n(.*?)^ *```$", PAGE, flags=re.DOTALL | re.MULTILINE)
IMPORTS = """
import pytest
from kvpipe.config import load_settings
from kvpipe.testing.policy_conformance import PolicyConformance
from kvpipe.testing.transfer_conformance import TransferConformance
from kvpipe.testing.transfer_worlds import world
"""


def lines(text: str) -> str:
    """Return a text without its indentation, and without what an excerpt may leave out."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_page_has_its_excerpts() -> None:
    """One of each file of the package, and the two classes with their suites."""
    found = [name for name, _ in BLOCKS]
    assert found.count("test") == 2
    assert set(found) == {"pyproject.toml", "kvpipe_sqlite_tier.py", "test_sqlite_tier.py", "policy", "engine", "test"}


@pytest.mark.parametrize(("name", "text"), [block for block in BLOCKS if "." in block[0]])
def test_an_excerpt_is_in_its_file(name: str, text: str) -> None:
    """Line by line, as it is there."""
    assert lines(text) in lines((PACKAGE / name).read_text(encoding="utf-8"))


def test_what_the_page_shows_keeps_the_protocols(tmp_path: Path) -> None:
    """Its policy and its transfer engine, put into a module with the page's own tests, pass the suites."""
    code = "\n".join(text for name, text in BLOCKS if "." not in name)
    (tmp_path / "test_page.py").write_text(f"{IMPORTS}\n{code}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout
