"""The page of public recipes describes what the code does."""

from __future__ import annotations

import pytest

from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.trial import doc_tables
from tests.vllm import recipes


def test_the_page_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe is checked again, so a new refusal changes the page."""
    page = recipes.PAGE.read_text(encoding="utf-8")
    assert doc_tables.fill_tables(page, recipes.tables()) == page, "python -m tests.vllm.recipes"
    assert sum(1 for _ in recipes.recipes()) == 64
    monkeypatch.setattr(drafters, "_FED_HIDDEN_STATES", ("eagle",))
    assert doc_tables.fill_tables(page, recipes.tables()) != page


def test_an_unknown_family_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of an unknown family raises an error, so that the page does not leave it out."""
    monkeypatch.delitem(recipes.FAMILIES, "Kimi K3")
    with pytest.raises(LookupError, match="kimi-k3"):
        recipes.recipes()
