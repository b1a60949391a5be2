"""kvpipe runs under the real vLLM scheduler of every supported release, with a model whose KV identifies its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvpipe.connectors.vllm.trial import nightly
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Move, Trial
from tests.contract import fetch
from tests.contract import sources as contract

if TYPE_CHECKING:
    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.transfer.cpu import CpuEngine

ROOT = Path(__file__).resolve().parents[2]
FETCH_SECONDS_MAX = 1800
RUN_SECONDS_MAX = 1500
SEEDS = 8


def run(command: list[str], seconds_max: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tests' programs."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds_max,
        env=os.environ | environment,
        cwd=ROOT,
    )


def fetched(*asked: str) -> Path:
    """Return the folder that `tests.contract.fetch` prints for the arguments `asked`."""
    return Path(_fetch(*asked))


def other_releases() -> list[tuple[str, Path]]:
    """Return each recorded release that is not installed, with the folder of its sources.

    At least one such release must exist.
    """
    found = [line.split(" ", 1) for line in _fetch("--others").splitlines()]
    assert found
    return [(version, Path(folder)) for version, folder in found]


def _fetch(*asked: str) -> str:
    """Return the output of `tests.contract.fetch`. Fail the test if the download fails."""
    done = run([sys.executable, "-m", fetch.__name__, *asked], FETCH_SECONDS_MAX)
    if done.returncode:
        pytest.fail(f"this test needs the sources of another vLLM: {done.stderr.strip()}", pytrace=False)
    return done.stdout.strip()


def runs(shape: Shape) -> Iterator[nightly.TrialRun]:
    """Run a few seeds. Yield the runs in which an invariant was broken."""
    return (ran for ran in (nightly.run_moves(shape, seed) for seed in range(SEEDS)) if ran.broken)


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + RUN_SECONDS_MAX)
def test_the_schedulers_of_other_supported_releases() -> None:
    """The invariants hold under the scheduler of each other recorded release, which runs from its sources."""
    for version, sources in other_releases():
        _, read = contract.folder_reader(sources)
        assert contract.dump(contract.record(version, read)) == contract.dump(contract.load(version))
        command = [sys.executable, "-m", nightly.__name__, "--seeds", "1", "--seconds", str(RUN_SECONDS_MAX), "--json"]
        done = run(command, RUN_SECONDS_MAX, PYTHONPATH=str(sources), VLLM_TARGET_DEVICE="cpu")
        assert done.returncode == 0, done.stdout[:4000] + done.stderr[-4000:]
        message = json.loads(done.stdout.splitlines()[-1])
        assert message["version"] == version
        assert message["broken"] == []
        assert message["seed"] == 1


@pytest.mark.parametrize("shape", ["sync", "async-scheduler-async-load", "hybrid"])
def test_a_wrong_byte_is_noticed(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flipped byte in a saved layer causes a wrong read and a wrong output, so the check can fail."""
    from kvpipe.transfer.base import Direction
    from kvpipe.transfer.cpu import CpuEngine

    honest = CpuEngine.copy_layer

    def flip(self: CpuEngine, plan: Any, layer: int) -> Any:
        failed = honest(self, plan, layer)
        if layer == 1 and plan.direction is Direction.SAVE:
            for _, slot, page, _, _ in plan.runs[0].tolist():
                at = self._geometry.layer_offsets[0][1] + page * self._geometry.groups[0].layers[1].page_bytes
                self._pool.slot(slot)[at] ^= 1
        return failed

    monkeypatch.setattr(CpuEngine, "copy_layer", flip)
    broken = (ran.broken[0] for ran in runs(SHAPES[shape]))
    assert any("findable_chunks_are_whole_and_true" in one and "g0.l1" in one for one in broken)


@pytest.mark.parametrize("hook", ["guard_read", "fence"])
def test_a_missing_wait_is_noticed(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for late copies KV is wrong, so the check can fail."""
    from kvpipe.testing.held import HeldEngine

    monkeypatch.setattr(HeldEngine, hook, lambda _self, _ticket, _timeout_s: True)
    wanted = "every_read_is_right" if hook == "guard_read" else "findable_chunks_are_whole_and_true"
    assert any(wanted in ran.broken[0] for ran in runs(Shape(load="sync", device=True)))


def test_a_leaked_lease_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is never released is found after the drain, so the check can fail."""
    from kvpipe.cache.catalog import Catalog

    monkeypatch.setattr(Catalog, "release", lambda _self, _owner: 0)
    assert any("leases_have_owners" in ran.broken[0] for ran in runs(SHAPES["sync"]))


def test_an_exception_inside_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contained exception still fails the scenario, so the check can fail."""
    from kvpipe.scheduler.side import SchedulerSide

    honest = SchedulerSide.lookup

    def lookup(self: SchedulerSide, request: Any, local_tokens: int) -> Any:
        if self.context.steps.planned == 30:
            raise KeyError(request.request_id)
        return honest(self, request, local_tokens)

    monkeypatch.setattr(SchedulerSide, "lookup", lookup)
    assert any("contained_error" in ran.broken[0] for ran in runs(SHAPES["async-load"]))


@pytest.mark.parametrize(("shape", "units"), [("sync", 2), ("async-scheduler", 1), ("drafts", 1)])
def test_the_last_unit_of_an_answer(shape: str, units: int) -> None:
    """A prompt of 33 tokens gets an answer of 32 tokens, so KV of 64 tokens is computed.

    If steps overlap, the last 32 of these 64 tokens become final too late to be saved.
    """
    ran = nightly.run_moves(SHAPES[shape], 0, [("add", 1, 32, 0, 31), *[("step", 7)] * 6, ("drain",)])
    assert ran.broken == []
    assert ran.counters["units_saved"] == units


@pytest.mark.parametrize(("every", "units"), [(1, 2), (8, 2), (1024, 1)])
def test_generated_tokens_wait_for_the_next_step_that_saves(every: int, units: int) -> None:
    """The prompt's unit is saved at once.

    The answer's unit is final 16 steps before the request ends, and is saved in one of these steps.
    """
    trial = Trial(SHAPES["sync"], 0, connector=KVPIPE._replace(extra=f'{{"save_decode_steps": {every}}}'))
    for move in [("add", 1, 32, 0, 47), *[("step", 7)] * 8, ("drain",)]:
        trial.do(move)
    trial.close()
    assert trial.side.counters["units_saved"] == units


def test_later_input_of_a_session_is_saved_when_save_decode_is_off() -> None:
    """With `save_decode` off, a session gets 64 tokens, answers, and gets 40 more tokens.

    All three units of 32 tokens are saved.
    """
    steps: list[Move] = [("step", 7)] * 3
    trial = Trial(SHAPES["sync"], 0, connector=KVPIPE._replace(extra='{"save_decode": false}'))
    for move in [("session", 1, 63, 0), *steps, ("more", 0, 40, 0), *steps, ("drain",)]:
        trial.do(move)
    trial.close()
    assert trial.side.counters["units_saved"] == 3
