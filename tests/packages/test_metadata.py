"""The page of kvpipe on a package index has no relative link. The base package needs neither torch nor vLLM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvpipe.connectors.vllm.compat import SUPPORTED
from kvpipe.testing.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "vllm"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

sys.meta_path.insert(0, Blocked())
from kvpipe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def hook() -> ProjectMetadata[PluginManager]:
    """Return the object that gives the project's metadata in a build."""
    return ProjectMetadata(str(ROOT), PluginManager())


def test_long_description_has_no_relative_link() -> None:
    """The page on a package index has no relative link, because the index has no folder `docs/`."""
    text = hook().core.readme
    assert "](docs/" not in text
    assert "](CONTRIBUTING.md)" not in text
    assert "](https://github.com/LMCache/LMCache)" in text


def test_links_are_absolute_with_a_repository() -> None:
    """Relative links become links to files of the version's tag. Anchors and absolute links are not changed."""
    spec = importlib.util.spec_from_file_location("package_metadata", ROOT / "tools" / "package_metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = "[a](docs/a.md#b), [c](#c), [d](https://example.org/d)"
    wanted = "[a](https://example.org/kvpipe/blob/v1.2.3/docs/a.md#b), [c](#c), [d](https://example.org/d)"
    assert module.absolute(page, "https://example.org/kvpipe", "1.2.3") == wanted
    assert module.absolute(page, "", "1.2.3") == "a, [c](#c), [d](https://example.org/d)"


def test_base_package_needs_no_engine() -> None:
    """Only the extra `vllm` needs torch and vLLM, in the supported versions."""
    core = hook().core
    assert not {Requirement(one).name for one in core.dependencies} & {"torch", "vllm"}
    needed = {one.name: one.specifier for one in map(Requirement, core.optional_dependencies["vllm"])}
    assert set(needed) == {"torch", "vllm"}
    (first, *_), (*_, last) = SUPPORTED, SUPPORTED
    assert needed["vllm"] == SpecifierSet(f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}")
    assert "Programming Language :: Python :: 3.11" in core.classifiers


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("top --help", "--interval SECONDS"),
        ("cache --help", "purge"),
        ("engine --help", "switch"),
        ("check {}", "policy = sessions"),
        (f"trace show {ROOT}/docs/sample-trace.jsonl", "below_minimum"),
        ("demo", "kvpipe: this command needs torch, as an engine does; run it in vLLM's environment"),
    ],
)
def test_commands_of_operators_need_no_torch(command: str, shown: str) -> None:
    """These commands run without torch and vLLM. A command that needs vLLM reports that vLLM is missing."""
    words = [sys.executable, "-c", WITHOUT, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)
    assert shown in done.stdout + done.stderr
    assert done.returncode == (2 if command == "demo" else 0)
    assert "Traceback" not in done.stderr
