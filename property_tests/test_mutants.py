"""The suite can fail: every bug of the catalogue, put back in, is found within the default profile."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvpipe.pipeline import Pipeline
from kvpipe.testing.mutants import MUTANTS, Mutant, Patch
from kvpipe.testing.mutate import judge, mutated
from kvpipe.testing.nightly import sequences

KEPT = sequences(Path(__file__).parent / "regressions")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(name: str) -> None:
    """Some invariant is broken, or the one that was asked for."""
    verdict = judge(name, KEPT)
    assert verdict.by, f"{name} lives: {MUTANTS[name].does}"


def test_a_mutant_is_taken_out_again() -> None:
    """What the process runs afterwards is the code as it is written."""
    before = Pipeline.end_step
    with mutated(MUTANTS["storers_not_cleared"]):
        assert Pipeline.end_step is not before
    assert Pipeline.end_step is before
    assert "batch, self._save = self._save, None" in inspect.getsource(Pipeline.end_step)


@pytest.mark.parametrize("method", ["end_step", "*"])
def test_a_mutant_whose_text_is_gone_says_so(method: str) -> None:
    """It does not pass for killed, or for alive."""
    gone = Mutant("Nothing.", (Patch("kvpipe.pipeline:Pipeline", method, "storer.next()", "pass"),))
    with pytest.raises(LookupError, match="mend the mutant"), mutated(gone):
        pass
