"""vLLM's own tests of its scheduler, of every supported release, with kvpipe on both sides of each scheduler."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.trial.engine import ENVIRONMENT
from tests.contract import sources as contract
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, fetched

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "plugin"
"""A folder of modules beside vLLM's tests, which are called `tests`, as ours are."""
_LISTED = runpy.run_path(str(PLUGIN / "attached_tests.py"))
AFTER_RESET: tuple[str, ...] = _LISTED["AFTER_RESET"]
EXPECTED: dict[str, str] = _LISTED["EXPECTED"]
RUN_SECONDS_MAX = 2700
TESTS_MIN = 150
"""So many have kvpipe attached at least: fewer, and it would be another suite."""


def run(version: str, report: Path, *more: str, also: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the tests of `version` under its own scheduler. `also` is one more folder of modules."""
    import vllm

    folder = fetched(version, "--tests")
    installed = contract.package_version(f"version = '{vllm.__version__}'") == version
    paths = [str(ROOT), str(folder)] if installed else [str(fetched(version)), str(ROOT), str(folder)]
    paths += [str(PLUGIN), *([str(also)] if also is not None else [])]
    command = [sys.executable, "-m", "pytest", "-p", "attached", "-p", "no:cacheprovider", "-p", "no:warnings"]
    command += ["-q", "--tb=short", "--show-capture=no", f"--attached-json={report}", *(more or ("tests/v1/core",))]
    given = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_TARGET_DEVICE": "cpu"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS_MAX, cwd=folder, env=given
    )


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
@pytest.mark.parametrize("version", contract.recorded())
def test_vllms_own_tests_pass_with_kvpipe_attached(version: str, tmp_path: Path) -> None:
    """All pass but those that are listed, which fail; nothing false is read, no fault is contained."""
    done = run(version, tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    message = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert message["tests"] >= TESTS_MIN, message
    assert message["checked"] > message["steps"] // 4, message
    assert message["tokens"]["tokens_loaded"] > 0, message
    assert all("is not supported" in why for why in message["refused"]), message
    assert all(EXPECTED.values())


CERTAIN = "from kvpipe.scheduler.weights import Weights\nWeights.suspect = lambda *_: None\n"


@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
@pytest.mark.parametrize("version", contract.recorded())
def test_those_that_fail_after_a_reset_fail_for_the_doubt(version: str, tmp_path: Path) -> None:
    """Without the doubt that a reset casts on the weights they pass: nothing else keeps them from it."""
    (tmp_path / "kvpipe_certain.py").write_text(CERTAIN, encoding="utf-8")
    chosen = " or ".join(name.partition("[")[0] for name in AFTER_RESET)
    files = [f"tests/v1/core/test_{name}.py" for name in ("async_scheduler", "worker_slot_overflow")]
    more = ("-p", "kvpipe_certain", "--runxfail", "-k", chosen, *files)
    done = run(version, tmp_path / "report.json", *more, also=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(AFTER_RESET) + 1} passed" in done.stdout, "one of them is listed for one of its arguments only"


FINDERS = ("preemption", "no_preemption_when_space_available")
"""What they ask is held by another request already."""

BREAKAGES = {
    "a load that reads nothing": (
        (
            "from kvpipe.transfer.cpu import CpuEngine as E\n"
            "honest = E.copy_layer\n"
            "E.copy_layer = lambda s, plan, layer: frozenset() if plan.direction == 1 else honest(s, plan, layer)\n"
        ),
        "a wrong read",
    ),
    "an exception behind the border": (
        (
            "from kvpipe.scheduler.side import SchedulerSide as S\n"
            "def admitted(self, request, blocks, external): raise KeyError(request.request_id)\n"
            "S.admitted = admitted\n"
        ),
        "contained_error",
    ),
    "an asynchronous load of nothing": (
        (
            "from kvpipe.scheduler.side import SchedulerSide as S\n"
            "S.lookup = lambda self, request, local, **_: (0, True)\n"
        ),
        "AssertionError",
    ),
}


@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
@pytest.mark.parametrize("what", list(BREAKAGES))
def test_a_broken_kvpipe_fails_vllms_tests(what: str, tmp_path: Path) -> None:
    """A fault that is put into kvpipe is found by some of vLLM's own tests: they can fail."""
    import vllm

    source, sign = BREAKAGES[what]
    (tmp_path / "kvpipe_broken.py").write_text(source, encoding="utf-8")
    version = contract.package_version(f"version = '{vllm.__version__}'")
    chosen = [f"tests/v1/core/test_scheduler.py::test_priority_scheduling_{name}" for name in FINDERS]
    done = run(version, tmp_path / "report.json", "-p", "kvpipe_broken", *chosen, also=tmp_path)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    assert sign in done.stdout, done.stdout[-4000:]
