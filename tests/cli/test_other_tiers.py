"""`kvpipe cache` and `kvpipe doctor` name a tier of another package if the tier raises forbidden exceptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpipe.cli import cache
from kvpipe.cli.doctor import storage
from kvpipe.cli.main import main
from kvpipe.config.settings import load_settings
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import DictSpec
from tests.cli.doctor_machines import machine_of


def _bug(*_: object, **__: object) -> Any:
    raise KeyError("a bug\x1b[2J")


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a method of the only tier raise an exception."""
    made: Callable[..., DictTier] = lambda name, *_, **__: DictTier(name)  # noqa: E731
    monkeypatch.setattr(cache, "parse_tiers", lambda _: (DictSpec.model_validate({}),))
    monkeypatch.setattr(cache, "make_tier", made)
    monkeypatch.setattr("kvpipe.tiers.checkup.make_tier", made)
    return lambda method: monkeypatch.setattr(DictTier, method, _bug)


@pytest.mark.parametrize("method", ["open", "capacity", "health", "scan", "close"])
def test_raising_tier_is_an_error_of_one_line(
    method: str, breaks: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A method that raises gives an error message of one line with the tier's name, and status 1."""
    breaks(method)
    assert main(["cache", "stats", "dict://"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvpipe: dict: ")
    assert "KeyError('a bug" in err
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.parametrize("method", ["open", "health", "write", "read", "delete"])
def test_doctor_warns_of_a_raising_tier(method: str, breaks: Callable[[str], None], tmp_path: Path) -> None:
    """The finding is a warning, because an engine would run without the tier."""
    breaks(method)
    settings = load_settings({}).model_copy(update={"tiers": (DictSpec.model_validate({}),)})
    answer = storage.check_tiers(settings, machine_of(tmp_path))
    assert answer is not None
    assert (answer.status, answer.detail.startswith("dict: KeyError(")) == ("warn", True)
