"""vLLM's own tests of its scheduler pass for every supported release, with kvpipe on both sides of each scheduler."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.tiny.engine import ENVIRONMENT
from tests.contract import sources as contract
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, fetched

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "plugin"
"""The folder of the modules that run with vLLM's tests.

It is no package, because vLLM's package of tests is also called `tests`.
"""
_LISTED = runpy.run_path(str(PLUGIN / "attached_tests.py"))
AFTER_RESET: tuple[str, ...] = _LISTED["AFTER_RESET"]
EXPECTED: dict[str, str] = _LISTED["EXPECTED"]
BY_MACHINE: dict[str, str] = _LISTED["BY_MACHINE"]
RUN_SECONDS_MAX = 2700
TESTS_MIN = 150
"""The smallest number of vLLM's tests to which kvpipe must be attached."""


class VllmTests:
    """Runs the tests of each release under the release's own scheduler.

    Each run is a fork of a process that has imported vLLM.
    """

    def __init__(self) -> None:
        self._ready: dict[str, subprocess.Popen[str]] = {}

    def run(self, version: str, report: Path, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the tests of `version`. The folder of `report` may have more modules for the run."""
        process, log = self._process(version), report.with_suffix(".log")
        command = ["-p", "attached", "-p", "no:cacheprovider", "-p", "no:warnings", "-q", "--tb=short"]
        command += ["--show-capture=no", f"--attached-json={report}", *(more or ("tests/v1/core",))]
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([str(log), str(report.parent), command]), file=process.stdin, flush=True)
        status = process.stdout.readline()
        assert status, f"the process that has imported vLLM {version} ended"
        return subprocess.CompletedProcess(command, int(status), log.read_text(encoding="utf-8", errors="replace"))

    def _process(self, version: str) -> subprocess.Popen[str]:
        import vllm

        if version not in self._ready:
            folder = fetched(version, "--tests")
            installed = contract.package_version(f"version = '{vllm.__version__}'") == version
            paths = [str(ROOT), str(folder)] if installed else [str(fetched(version)), str(ROOT), str(folder)]
            given = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*paths, str(PLUGIN)]), "VLLM_TARGET_DEVICE": "cpu"}
            self._ready[version] = subprocess.Popen(
                [sys.executable, "-m", "attached_forks"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=os.environ | given,
                start_new_session=True,
            )  # fmt: skip
        return self._ready[version]

    def close(self) -> None:
        """End the processes and their forks."""
        for process in self._ready.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def vllm_tests() -> Iterator[VllmTests]:
    """Yield the processes that all tests of this file fork."""
    made = VllmTests()
    try:
        yield made
    finally:
        made.close()


def listed(names: Collection[str], ran: Collection[str]) -> set[str]:
    """Return the cases of `ran` that `names` has. A name without arguments stands for all cases of a test."""
    return {name for name in ran if name in names or name.partition("[")[0] in names}


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
@pytest.mark.parametrize("version", contract.recorded())
def test_vllms_own_tests_pass_with_kvpipe_attached(version: str, vllm_tests: VllmTests, tmp_path: Path) -> None:
    """The listed tests fail, and all other tests pass. No read is wrong, and no fault is counted."""
    done = vllm_tests.run(version, tmp_path / "report.json")
    assert done.returncode == 1, done.stdout[-6000:]
    message = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    by_machine = listed(BY_MACHINE, message["failed"] + message["passed"])
    failed = set(message["failed"]) - by_machine
    expected = listed(EXPECTED, message["failed"] + message["passed"])
    assert failed == expected, (failed ^ expected, done.stdout[-6000:])
    assert message["tests"] >= TESTS_MIN, message
    assert message["checked"] > message["steps"] // 4, message
    assert message["tokens"]["tokens_loaded"] > 0, message
    assert all("is not supported" in why for why in message["refused"]), message
    assert all(EXPECTED.values())


CERTAIN = "from kvpipe.scheduler.weights import Weights\nWeights.suspect = lambda *_: None\n"


@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
@pytest.mark.parametrize("version", contract.recorded())
def test_listed_tests_pass_without_the_doubt_after_a_reset(version: str, vllm_tests: VllmTests, tmp_path: Path) -> None:
    """A reset puts the weights in doubt, so nothing hits for a while.

    Without this doubt the listed tests pass, so the listed tests have no other cause to fail.
    """
    (tmp_path / "kvpipe_certain.py").write_text(CERTAIN, encoding="utf-8")
    chosen = " or ".join(name.partition("[")[0] for name in AFTER_RESET)
    files = [f"tests/v1/core/test_{name}.py" for name in ("async_scheduler", "worker_slot_overflow")]
    more = ("-p", "kvpipe_certain", "-k", chosen, *files)
    done = vllm_tests.run(version, tmp_path / "report.json", *more)
    assert done.returncode == 0, done.stdout[-6000:]
    message = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(AFTER_RESET) <= set(message["passed"]), message["passed"]


FINDERS = ("preemption", "no_preemption_when_space_available")
"""The vLLM tests whose requests ask for KV that another request already holds."""

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
def test_a_broken_kvpipe_fails_vllms_tests(what: str, vllm_tests: VllmTests, tmp_path: Path) -> None:
    """Some of vLLM's own tests find a fault that is put into kvpipe, so vLLM's tests can fail."""
    import vllm

    source, sign = BREAKAGES[what]
    (tmp_path / "kvpipe_broken.py").write_text(source, encoding="utf-8")
    version = contract.package_version(f"version = '{vllm.__version__}'")
    chosen = [f"tests/v1/core/test_scheduler.py::test_priority_scheduling_{name}" for name in FINDERS]
    done = vllm_tests.run(version, tmp_path / "report.json", "-p", "kvpipe_broken", *chosen)
    assert done.returncode == 1, done.stdout[-4000:]
    assert sign in done.stdout, done.stdout[-4000:]
