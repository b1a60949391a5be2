"""The sdist and the wheel are complete: each is built, installed into an empty environment, and used there."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tests.rigs.environments import environment, run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
DISCOVER = """
import importlib.metadata, json, sys, kvpipe.cli.main, kvpipe.connectors
status = kvpipe.cli.main.main(["doctor"])
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_plugins_by_group
load_plugins_by_group("vllm.general_plugins")["kvpipe"]()
connector = KVConnectorFactory.get_connector_class_by_name("KVPipeConnector")
found = importlib.metadata.distribution("kvpipe").locate_file("kvpipe")
print("\\n" + json.dumps([str(found), kvpipe.__path__[0], kvpipe.connectors.__path__[0], connector.__module__]))
sys.exit(status)
"""


@pytest.fixture(scope="module", params=["kvpipe-*.tar.gz", "kvpipe-*-py3-none-any.whl"], ids=["sdist", "wheel"])
def site(request: pytest.FixtureRequest, dist: Path) -> Path:
    """Return the folder of packages of an environment into which the sdist or the wheel is installed."""
    (package,) = dist.glob(request.param)
    return environment(dist / request.param.rpartition(".")[2], package)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel of this tree, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def _files(top: Path, *, links: bool) -> Iterator[str]:
    for folder, _, names in os.walk(top, followlinks=links):
        yield from (Path(folder, name).relative_to(top).as_posix() for name in names if not name.endswith(".pyc"))


def test_package_has_every_file_of_the_tree(site: Path) -> None:
    """The package has every file of the tree. Files behind links of the tree are ordinary files in the package."""
    tree = sorted(_files(ROOT / "kvpipe", links=True))
    assert {"connectors/vllm/plugin.py", "statemachine/core.py", "trace/timeline.html", "py.typed"} <= {*tree}
    assert sorted(_files(site / "kvpipe", links=False)) == tree
    assert not any(path.is_symlink() for path in (site / "kvpipe").rglob("*"))


def test_package_has_every_entry_point(site: Path) -> None:
    """The package has the command and the entry points of `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["entry-points"] | {"console_scripts": project["scripts"]}
    (info,) = site.glob("kvpipe-*.dist-info")
    found = {(one.group, one.name, one.value) for one in PathDistribution(info).entry_points}
    assert found == {(group, name, value) for group, some in wanted.items() for name, value in some.items()}


def test_check_accepts_the_defaults(site: Path, tmp_path: Path) -> None:
    """The installed `kvpipe check` accepts the default configuration."""
    assert "policy = sessions\n" in run(site.parents[2] / "bin" / "kvpipe", "check", "{}", cwd=tmp_path)


@pytest.fixture(scope="module")
def printed(site: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of `kvpipe doctor` and of vLLM's own discovery.

    Both run in one process, because each imports vLLM.
    """
    return run(site.parents[2] / "bin" / "python", "-c", DISCOVER, cwd=tmp_path_factory.mktemp("elsewhere"))


def test_doctor_finds_the_plugin(printed: str) -> None:
    """The installed `kvpipe doctor` finds the plug-in without kvpipe's repository."""
    assert "kvpipe.connectors.vllm.plugin:register loads, vLLM knows KVPipeConnector" in printed
    assert "kvpipe works here" in printed


def test_vllm_discovers_the_installed_connector(site: Path, printed: str) -> None:
    """vLLM's own discovery runs the plug-in of the new environment, not of this tree."""
    house = str(site / "kvpipe")
    wanted = [house, house, f"{house}/connectors", "kvpipe.connectors.vllm.connector"]
    assert json.dumps(wanted) in printed.splitlines()
