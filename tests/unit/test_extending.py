"""The code in `docs/extending.md` is the code of the package.

Code that a reader writes in the same way satisfies the protocols.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kvpipe.testing.tier_conformance import Limit
from kvpipe.tiers.base import Tier

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "kvpipe" / "cli" / "tier_package"
BLOCKS = re.findall(r"^ *```(?:python|toml)\n *# ([\w.]+)\n(.*?)^ *```$", PAGE, flags=re.DOTALL | re.MULTILINE)
IMPORTS = """
import pytest
from kvpipe.config.settings import load_settings
from kvpipe.testing.policy_conformance import PolicyConformance
from kvpipe.testing.transfer_conformance import TransferConformance
from kvpipe.testing.transfer_worlds import world
"""


def lines(text: str) -> str:
    """Return the lines of a text without indentation. Lines that an excerpt may leave out are removed."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_page_has_its_excerpts() -> None:
    """The page has one excerpt of each file of the package, and the two classes with their suites."""
    found = [name for name, _ in BLOCKS]
    assert found.count("test") == 2
    assert set(found) == {"pyproject.toml", "kvpipe_sqlite_tier.py", "test_sqlite_tier.py", "policy", "engine", "test"}


@pytest.mark.parametrize(("name", "text"), [block for block in BLOCKS if "." in block[0]])
def test_an_excerpt_is_in_its_file(name: str, text: str) -> None:
    """Every line of an excerpt is a line of the file that the excerpt names."""
    assert lines(text) in lines((PACKAGE / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*get_args(Limit), *(one for one in vars(Tier) if not one.startswith("_"))])
def test_every_limit_and_method_of_a_tier_has_a_row(name: str) -> None:
    """The page has a row for each limit that a world may declare, and for each call that a tier must answer."""
    assert re.search(rf"^\| .*`{name}(\(\w*\))?`.* \|", PAGE, flags=re.MULTILINE)


def test_examples_of_the_page_pass_the_suites(tmp_path: Path) -> None:
    """In a module with the page's own tests, the page's policy and transfer engine pass the suites."""
    code = "\n".join(text for name, text in BLOCKS if "." not in name)
    (tmp_path / "test_page.py").write_text(f"{IMPORTS}\n{code}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
