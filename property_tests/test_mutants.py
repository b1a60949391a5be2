"""The property tests are able to fail: they find every bug of the catalogue when the bug is put back in."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.trial.children import CaseRunner
from kvpipe.connectors.vllm.trial.doc_tables import fill_tables
from kvpipe.connectors.vllm.trial.mutants import MUTANTS, Mutant, Patch, mutate
from kvpipe.connectors.vllm.trial.mutants.mutate import LIMITS, judge, killers, mutated
from kvpipe.connectors.vllm.trial.nightly import sequences
from kvpipe.trace.miss_reasons import EVICTED
from kvpipe.worker.pipeline import Pipeline

KEPT = sequences(Path(__file__).parent / "regressions")
KILLERS = killers(Path(__file__).parent / "killers.jsonl")

TRIALS_MAX = 5
"""The largest number of trials of a mutant. One trial takes about as long as the test of another mutant."""


@pytest.fixture(scope="module")
def bench() -> Iterator[CaseRunner]:
    """Yield a runner for the cases of all mutants. The runner imports everything only once."""
    with CaseRunner(LIMITS) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if not mutant.test])
def test_each_mutant_is_found(name: str, bench: CaseRunner) -> None:
    """Each mutant breaks an invariant, or the invariant that the mutant names, within `TRIALS_MAX` trials."""
    verdict = judge(name, KEPT, KILLERS, bench)
    assert verdict.by, f"{name} lives: {MUTANTS[name].does}"
    remedy = f"keep a sequence: python -m {mutate.__name__} {name} --killers property_tests/killers.jsonl"
    assert verdict.trials <= TRIALS_MAX, f"{name} was found after {verdict.trials} trials; {remedy}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.test])
def test_mutant_with_its_own_test_is_found(name: str) -> None:
    """The test that the mutant names fails."""
    assert judge(name, []).by, f"{name} lives: {MUTANTS[name].does}"


def test_mutated_code_is_restored() -> None:
    """After the `with` block, the process runs the original code."""
    before = Pipeline.end_step.__code__
    with mutated(MUTANTS["storers_not_cleared"]):
        assert Pipeline.end_step.__code__ is not before
    assert Pipeline.end_step.__code__ is before
    assert "if self.step.fire(m.STEP_END).moves:" in inspect.getsource(Pipeline.end_step)


@pytest.mark.parametrize("method", ["end_step", "*"])
def test_mutant_whose_text_does_not_exist_is_an_error(method: str) -> None:
    """A mutant whose text does not exist is an error, neither found nor missed."""
    gone = Mutant("Nothing.", (Patch("kvpipe.worker.pipeline:Pipeline", method, "storer.next()", "pass"),))
    with pytest.raises(LookupError, match="mend the mutant"), mutated(gone):
        pass


def test_a_function_is_mutated_wherever_it_was_imported() -> None:
    """A mutated function is also mutated in each module that has imported the function."""
    page = "<!-- a:begin -->\nold<!-- a:end -->"
    bug = Mutant(
        "Nothing is filled in.",
        (Patch("kvpipe.connectors.vllm.trial.doc_tables", "fill_tables", "    return text", "    return ''"),),
    )
    with mutated(bug):
        assert not fill_tables(page, {"a": "new"})
    assert "new" in fill_tables(page, {"a": "new"})


def alive() -> None:
    """Assert something true. A mutant replaces the assertion, so that it fails."""
    assert EVICTED


def test_mutant_with_its_own_test_is_found_when_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant is found if the test fails, and missed if it passes. A missing test or module is an error."""
    patches = (Patch("property_tests.test_mutants", "alive", "assert EVICTED", "assert not EVICTED"),)
    here = "property_tests/test_mutants.py::"
    for name, mutant in {
        "killed": Mutant("", patches, test=f"{here}test_that_a_mutant_names"),
        "lives": Mutant("", patches, test=f"{here}test_mutated_code_is_restored"),
        "lost": Mutant("", patches, test=f"{here}test_nothing"),
        "nowhere": Mutant("", (Patch("property_tests.nowhere", "alive", "", ""),), test=f"{here}test_nothing"),
    }.items():
        monkeypatch.setitem(MUTANTS, name, mutant)
    assert judge("killed", []).by == "test_that_a_mutant_names"
    assert not judge("lives", []).by
    with pytest.raises(LookupError, match=r"not found: .*test_nothing"):
        judge("lost", [])
    with pytest.raises(LookupError, match=r"No module named 'property_tests\.nowhere'"):
        judge("nowhere", [])


def test_that_a_mutant_names() -> None:
    """`test_mutant_with_its_own_test_is_found_when_the_test_fails` runs this test, which fails under its mutant."""
    alive()


def test_a_mutant_that_hangs_its_test_is_killed_like_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed child returns no exit status of pytest, so the result is an error and not a verdict."""
    monkeypatch.setattr(mutate, "TEST_SECONDS_MAX", 0.1)
    if not (child := os.fork()):
        signal.pause()
        os._exit(1)
    assert mutate._ended(child) == -signal.SIGKILL
