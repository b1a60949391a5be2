"""The documents describe the present code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from kvpipe.config.settings import markdown_table
from kvpipe.connectors.vllm.trial.invariants import INVARIANTS, LAWS, SEEN_BY_TRIALS
from kvpipe.connectors.vllm.trial.mutants import MUTANTS
from kvpipe.connectors.vllm.trial.mutants.page import PAGE, PROPOSED, VERDICTS, fill_conformance
from kvpipe.features import hints
from kvpipe.inputs import plugins
from kvpipe.tiers.registry import spec_of
from kvpipe.trace import counters
from kvpipe.trace.miss_reasons import REASONS
from kvpipe.trace.transitions import EVENTS
from kvpipe.transfer import layouts
from tests.unit import pages

ROOT = Path(__file__).parents[2]
TIERS = plugins.own(plugins.TIERS)


def test_the_readme_has_keys_that_there_are() -> None:
    """The keys in the readme exist and have the defaults of the whole table."""
    rows = (ROOT / "README.md").read_text(encoding="utf-8").split("## Configuration")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", rows, re.MULTILINE)
    assert len(named) > 5
    whole = {
        row.split("`")[1]: row.split(" | ")[1].strip("` |").replace(".0", "")
        for row in markdown_table().splitlines()[2:]
    }
    assert dict(named) == {name: whole[name] or "none" for name, _ in named}


def test_links_and_named_files_exist() -> None:
    """Every relative link of a page leads to a file, and every file that a page names exists.

    Pages at the top and in `docs/` are checked.
    """
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"
        for named in re.findall(r"`((?:docs|connectors|tests|benchmarks|statemachine|kvpipe)/[\w./-]*)`", text):
            assert (ROOT / named).exists(), f"{page}: {named}"


def test_names_in_reading_are_in_the_named_file() -> None:
    """Each numbered part of the page has a file. Each name in code font is in this file, or names another file."""
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8").split("\n## After")[0]
    parts = re.findall(r"^## \d+\. `([\w/.]+)`(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(parts) == 8
    for file, part in parts:
        named = [*re.findall(r"`([\w/.]+)`", part), *re.findall(r"\b([A-Z]{4,})\b", part)]
        others = [one for one in named if "/" in one]
        code = "\n".join((ROOT / one).read_text(encoding="utf-8") for one in (file, *others))
        words = {word for one in named if one not in others for word in one.split(".")}
        assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set(), file


def test_decisions_are_numbered() -> None:
    """The numbers begin at 1, and no number is missing or repeated.

    The title of a page has the number of its file name.
    """
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    titles = [page.read_text(encoding="utf-8").split(maxsplit=2)[1] for page in pages]
    assert titles == [f"{number}." for number in range(1, len(pages) + 1)]


def test_the_fuzzing_page_is_fresh() -> None:
    """The page's tables agree with the code and the last runs. In its last run, `make mutants` killed every mutant."""
    verdicts, proposed = (json.loads((ROOT / file).read_text(encoding="utf-8")) for file in (VERDICTS, PROPOSED))
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert fill_conformance(text, verdicts, proposed) == text, "python -m kvpipe.connectors.vllm.trial.mutants.page"
    assert {one["name"] for one in verdicts} == set(MUTANTS), "make mutants"
    assert all(one["by"] for one in verdicts)


def test_threat_model_names_tests_that_exist() -> None:
    """Every row names a test, an invariant or a mutant that exists, or states the risk that remains."""
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
    """Every law has an invariant, and every law that an invariant names exists."""
    held = {law for one in INVARIANTS.values() for law in one.laws} | {law for law, _ in SEEN_BY_TRIALS.values()}
    assert held == set(LAWS)


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_is_fresh(page: str) -> None:
    """The page has the tables that the code gives."""
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
def test_tables_have_a_row_for_every_name(page: str, names: Iterable[str]) -> None:
    """The tables of the page have a row for every name."""
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_map_has_every_folder() -> None:
    """The tree in `docs/architecture.md` has one line for every folder of code, and no other lines."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text[text.index("<!-- rooms:begin -->") : text.index("<!-- rooms:end -->")]
    named = re.findall(r"^([\w/]+)/ +\S", tree, re.MULTILINE)
    tops = (ROOT / "statemachine", ROOT / "kvpipe", ROOT / "connectors")
    there = {str(file.parent.relative_to(ROOT)) for top in tops for file in top.rglob("__init__.py")} - {"kvpipe"}
    assert sorted(named) == sorted(
        one for one in there if one.split("/")[1:2] not in (["statemachine"], ["connectors"])
    )


def test_every_counter_has_a_sentence() -> None:
    """The tables of counters have exactly the names of their types. No name is in both tables."""
    assert set(counters.FAULTS) == set(get_args(counters.FaultName))
    assert set(counters.COUNTS) == set(get_args(counters.CountName))
    assert not set(counters.FAULTS) & set(counters.COUNTS)


def test_every_counter_is_used() -> None:
    """The code counts every counter."""
    folders = ("kvpipe", "connectors", "statemachine")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file.name != "counters.py"]
    there = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert [name for name in (*counters.FAULTS, *counters.COUNTS) if f'"{name}"' not in there] == []


def test_every_page_is_in_one_group_of_the_index() -> None:
    """The index lists every page of `docs/`.

    A page that the index leaves out has no link, and fails the site's build.
    """
    listed = re.findall(r"^([\w/-]+)$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages_there = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {one for one in listed if "/" not in one} == pages_there


def test_pages_name_metrics_that_there_are() -> None:
    """Every metric that a page names exists. An alert on an unknown metric would never fire."""
    from kvpipe.connectors.vllm.metrics import METRICS

    texts = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    named = {name for text in texts.values() for name in re.findall(r"vllm:kvpipe_([a-z_]*[a-z])", text)}
    assert len(named) > 20
    assert {name for name in named if not {name, re.sub("_(total|bucket)$", "", name)} & {*METRICS}} == set()


def test_pages_name_options_that_vllm_has() -> None:
    """An option next to `vllm serve`, on a page or in a file to deploy, must be an option of vLLM's server.

    The test reads vLLM's source files, because making vLLM's parser takes several seconds.
    """
    vllm = Path(next(iter(find_spec("vllm").submodule_search_locations)))  # type: ignore[union-attr, arg-type]
    options = "".join(
        (vllm / file).read_text(encoding="utf-8")
        for file in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    )
    pages_there = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages_there]
    served = [line for text in texts for line in text.splitlines() if "vllm serve " in line and "--" in line]
    assert len(served) > 3
    named = {one for line in served for one in re.findall(r"(?<= )--[a-z-]+", line)}
    for file in ("compose.yaml", "helm-values.yaml", "kubernetes/engine.yaml"):
        text = (ROOT / "deploy" / file).read_text(encoding="utf-8")
        named |= set(re.findall(r"^ +- (--[a-z-]+)$", text, re.MULTILINE))
    assert {"--shutdown-timeout", "--kv-transfer-config"} <= named
    fields = {one: one.removeprefix("--").removeprefix("no-").replace("-", "_") for one in named}
    known = {one for one, field in fields.items() if re.search(rf"^    {field}: ", options, re.MULTILINE)}
    assert named - known == set()
