"""The documents describe what the code does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from kvpipe import counters, plugins
from kvpipe.cache.miss_reasons import REASONS
from kvpipe.config import markdown_table
from kvpipe.connectors.vllm.trial.invariants import INVARIANTS, LAWS, SEEN_BY_TRIALS
from kvpipe.connectors.vllm.trial.mutants import MUTANTS
from kvpipe.connectors.vllm.trial.page import PAGE, PROPOSED, VERDICTS, fill
from kvpipe.scheduler import hints
from kvpipe.tiers.registry import spec_of
from kvpipe.trace.transitions import EVENTS
from kvpipe.transfer import layouts
from tests.unit import pages

ROOT = Path(__file__).parents[2]
TIERS = plugins.own(plugins.TIERS)


def test_the_readme_has_keys_that_there_are() -> None:
    """With the defaults that the whole table has."""
    rows = (ROOT / "README.md").read_text(encoding="utf-8").split("## Configuration")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", rows, re.MULTILINE)
    assert len(named) > 5
    whole = {
        row.split("`")[1]: row.split(" | ")[1].strip("` |").replace(".0", "")
        for row in markdown_table().splitlines()[2:]
    }
    assert dict(named) == {name: whole[name] or "none" for name, _ in named}


def test_links_lead_somewhere() -> None:
    """Every relative link and every file named in the README and the docs exists."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"
        for named in re.findall(r"`((?:docs|connectors|tests|benchmarks|statemachine|kvpipe)/[\w./-]*)`", text):
            assert (ROOT / named).exists(), f"{page}: {named}"


def test_decisions_are_numbered() -> None:
    """From 1 on, without a gap and no number twice; a page's title has the number of its file."""
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    titles = [page.read_text(encoding="utf-8").split(maxsplit=2)[1] for page in pages]
    assert titles == [f"{number}." for number in range(1, len(pages) + 1)]


def test_the_fuzzing_page_is_fresh() -> None:
    """Its tables are those of the code and of the last runs, and `make mutants` has killed every mutant."""
    verdicts, proposed = (json.loads((ROOT / file).read_text(encoding="utf-8")) for file in (VERDICTS, PROPOSED))
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert fill(text, verdicts, proposed) == text, "python -m kvpipe.connectors.vllm.trial.page"
    assert {one["name"] for one in verdicts} == set(MUTANTS), "make mutants"
    assert all(one["by"] for one in verdicts)


def test_the_threat_model_names_what_there_is() -> None:
    """Every row has a test, an invariant or a mutant that exists by that name, or has what remains."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    files = [file for folder in ("tests", "property_tests") for file in (ROOT / folder).rglob("test_*.py")]
    there = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))}
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= there
    assert len(named) > 30
    rows = [row for row in text.splitlines() if row.startswith("| ") and not row.startswith("| what |")]
    held = named | set(INVARIANTS) | set(MUTANTS)
    assert [row for row in rows if "emains" not in row and not any(f"`{name}`" in row for name in held)] == []


def test_every_law_is_held_by_an_invariant() -> None:
    """And no invariant holds a law that there is not."""
    held = {law for one in INVARIANTS.values() for law in one.laws} | {law for law, _ in SEEN_BY_TRIALS.values()}
    assert held == set(LAWS)


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_fresh(page: str) -> None:
    """They are those that the code gives."""
    assert pages.fresh(page) == (pages.DOCS / page).read_text(encoding="utf-8"), "python -m tests.unit.pages"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("counters.md", (*counters.FAULTS, *counters.COUNTS)),
        ("hints.md", (*hints.REASONS, *hints.PAYLOADS)),
        ("layouts.md", layouts.ADAPTERS),
        ("tiers.md", {key for kind in TIERS for key in spec_of(plugins.TIERS, kind).model_fields} - {"kind"}),
        ("tracing.md", (*EVENTS, *REASONS)),
    ],
)
def test_the_tables_name_all_there_is(page: str, names: Iterable[str]) -> None:
    """Every name has a row."""
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_map_has_every_room() -> None:
    """Each folder of code is in the tree of `docs/architecture.md`, and each line of the tree is a folder."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text[text.index("<!-- rooms:begin -->") : text.index("<!-- rooms:end -->")]
    named = re.findall(r"^([\w/]+)/ +\w", tree, re.MULTILINE)
    tops = (ROOT / "statemachine", ROOT / "kvpipe", ROOT / "connectors")
    there = {str(file.parent.relative_to(ROOT)) for top in tops for file in top.rglob("__init__.py")}
    assert sorted(named) == sorted(
        one for one in there if one.split("/")[1:2] not in (["statemachine"], ["connectors"])
    )


def test_every_counter_has_a_sentence() -> None:
    """What a type checker lets through is what the page lists, and each is either a fault or not."""
    assert set(counters.FAULTS) == set(get_args(counters.Fault))
    assert set(counters.COUNTS) == set(get_args(counters.Count))
    assert not set(counters.FAULTS) & set(counters.COUNTS)


def test_every_counter_is_used() -> None:
    """A name that nothing counts is no counter."""
    folders = ("kvpipe", "connectors", "statemachine")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name != "counters.py"]
    there = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in (*counters.FAULTS, *counters.COUNTS) if f'"{name}"' not in there] == []
