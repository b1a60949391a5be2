"""The page of public recipes describes what the code does."""

from __future__ import annotations

import pytest

from kvpipe.connectors.vllm import drafters
from kvpipe.testing import doc_tables
from tests.vllm import recipes


def test_the_page_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recipe was asked; what is refused later changes it."""
    page = recipes.PAGE.read_text(encoding="utf-8")
    assert doc_tables.fill(page, recipes.tables()) == page, "python -m tests.vllm.recipes"
    assert sum(1 for _ in recipes.recipes()) == 64
    monkeypatch.setattr(drafters, "_FED_HIDDEN_STATES", ("eagle",))
    assert doc_tables.fill(page, recipes.tables()) != page


def test_an_unknown_family_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe is not left out."""
    monkeypatch.delitem(recipes.FAMILIES, "Kimi K3")
    with pytest.raises(LookupError, match="kimi-k3"):
        recipes.recipes()
