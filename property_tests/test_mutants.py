"""The suite can fail: every bug of the catalogue, put back in, is found within the default profile."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.cache.miss_reasons import EVICTED
from kvpipe.connectors.vllm.trial import mutate
from kvpipe.connectors.vllm.trial.children import CaseRunner
from kvpipe.connectors.vllm.trial.mutants import MUTANTS, Mutant, Patch
from kvpipe.connectors.vllm.trial.mutate import LIMITS, judge, killers, mutated
from kvpipe.connectors.vllm.trial.nightly import sequences
from kvpipe.testing.doc_tables import fill
from kvpipe.worker.pipeline import Pipeline

KEPT = sequences(Path(__file__).parent / "regressions")
KILLERS = killers(Path(__file__).parent / "killers.jsonl")


@pytest.fixture(scope="module")
def bench() -> Iterator[CaseRunner]:
    """Return what runs the cases of all mutants: it walks through all there is once."""
    with CaseRunner(LIMITS) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name: str, bench: CaseRunner) -> None:
    """Some invariant is broken, or the one that was asked for."""
    verdict = judge(name, KEPT, KILLERS, bench)
    assert verdict.by, f"{name} lives: {MUTANTS[name].does}"


def test_a_mutant_is_taken_out_again() -> None:
    """What the process runs afterwards is the code as it is written."""
    before = Pipeline.end_step.__code__
    with mutated(MUTANTS["storers_not_cleared"]):
        assert Pipeline.end_step.__code__ is not before
    assert Pipeline.end_step.__code__ is before
    assert "if self.step.fire(m.STEP_END).moves:" in inspect.getsource(Pipeline.end_step)


@pytest.mark.parametrize("method", ["end_step", "*"])
def test_a_mutant_whose_text_is_gone_reports_it(method: str) -> None:
    """It does not pass for killed, or for alive."""
    gone = Mutant("Nothing.", (Patch("kvpipe.worker.pipeline:Pipeline", method, "storer.next()", "pass"),))
    with pytest.raises(LookupError, match="mend the mutant"), mutated(gone):
        pass


def test_a_function_is_mutated_wherever_it_was_imported() -> None:
    """Not only where it is defined."""
    page = "<!-- a:begin -->\nold<!-- a:end -->"
    bug = Mutant(
        "Nothing is filled in.", (Patch("kvpipe.testing.doc_tables", "fill", "    return text", "    return ''"),)
    )
    with mutated(bug):
        assert not fill(page, {"a": "new"})
    assert "new" in fill(page, {"a": "new"})


def alive() -> None:
    """Fail where a reason is not what it is."""
    assert EVICTED


def test_a_mutant_that_a_test_of_its_own_must_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed when that test fails, lives when it passes, and is an error when test or module is not there."""
    patches = (Patch("property_tests.test_mutants", "alive", "assert EVICTED", "assert not EVICTED"),)
    here = "property_tests/test_mutants.py::"
    for name, mutant in {
        "killed": Mutant("", patches, test=f"{here}test_what_a_mutant_of_its_own_breaks"),
        "lives": Mutant("", patches, test=f"{here}test_a_mutant_is_taken_out_again"),
        "lost": Mutant("", patches, test=f"{here}test_nothing"),
        "nowhere": Mutant("", (Patch("property_tests.nowhere", "alive", "", ""),), test=f"{here}test_nothing"),
    }.items():
        monkeypatch.setitem(MUTANTS, name, mutant)
    assert judge("killed", []).by == "test_what_a_mutant_of_its_own_breaks"
    assert not judge("lives", []).by
    with pytest.raises(LookupError, match=r"not found: .*test_nothing"):
        judge("lost", [])
    with pytest.raises(LookupError, match=r"No module named 'property_tests\.nowhere'"):
        judge("nowhere", [])


def test_what_a_mutant_of_its_own_breaks() -> None:
    """See the test before."""
    alive()


def test_a_mutant_that_hangs_its_test_is_killed_like_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no exit status of pytest's: an error, not a verdict."""
    monkeypatch.setattr(mutate, "TEST_SECONDS_MAX", 0.1)
    if not (child := os.fork()):
        signal.pause()
        os._exit(1)
    assert mutate._ended(child) == -signal.SIGKILL
