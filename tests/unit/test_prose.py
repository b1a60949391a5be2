"""Pages and docstrings are plain English, as far as a program can count this."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
RECORDS: Final = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
PAGES: Final = sorted(
    file
    for file in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    )
    if "generated" not in file.relative_to(ROOT).parts and "<!-- Generated from" not in file.read_text(encoding="utf-8")
)
"""The pages that people write, without generated pages."""
CODE: Final = ("benchmarks", "connectors", "kvpipe", "property_tests", "statemachine", "tests", "tools")
"""The folders of which docstrings are read. Links in these folders are not followed."""

COLUMNS_MAX: Final = 120
WORDS_MAX: Final = 30
RECORD_LINES_MAX: Final = 70
ENTRY_LINES_MAX: Final = 2
HEADINGS: Final = ["Question", "Decision", "Alternatives", "What would change it"]

_OPENING: Final = re.compile(r"[*_(]*(?:Who|Whoever|What|Whatever|Whose|Of|That which|By whom|Nothing that)\b")
_ITEM: Final = re.compile(r"^\s*(?:[-*]|\d+\.) +")
_NO_PROSE: Final = ("|", "#", "<", "![", "[!")


def paragraphs(text: str) -> Iterator[list[str]]:
    """Yield the lines of each paragraph and list item, without code, tables, headings, comments and pictures."""
    lines, fenced = list[str](), False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if fence or fenced or not line.strip() or line.lstrip().startswith(_NO_PROSE):
            if lines:
                yield lines
            lines = []
            continue
        if _ITEM.match(line) and lines:
            yield lines
            lines = []
        lines.append(line)
    if lines:
        yield lines


def sentences(text: str) -> Iterator[str]:
    """Yield every sentence of the prose in `text`, without code, targets of links and marks of lists."""
    for lines in paragraphs(text):
        words = " ".join(line.strip() for line in lines)
        words = re.sub(r"\]\([^)]*\)", "]", re.sub(r"(`+)[^`]*\1", "`code`", _ITEM.sub("", words, count=1)))
        yield from re.split(r"(?<=[.!?])[*_)\]]*\s+(?=[*_(\[`\w])", words)


def wide_lines(text: str) -> Iterator[str]:
    """Yield every line of prose that has more than `COLUMNS_MAX` characters without the targets of its links."""
    for lines in paragraphs(text):
        yield from (line for line in lines if len(re.sub(r"\]\([^)]*\)", "]", line)) > COLUMNS_MAX)


def docstrings(source: str) -> Iterator[str]:
    """Yield every docstring in `source`, without its indented blocks. Docstrings of attributes are included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            blocks = inspect.cleandoc(node.value.value).split("\n\n")
            yield "\n\n".join(block for block in blocks if not block.startswith(" "))


@cache
def _sentences_of_code() -> dict[str, list[tuple[str, str]]]:
    """Return (file, sentence) for each sentence of a docstring, by folder."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        texts = docstrings(_text(file))
        found.setdefault(_name(file.parent), []).extend((file.name, one) for text in texts for one in sentences(text))
    return found


def _docstrings_that(wrong: Callable[[str], object]) -> dict[str, list[str]]:
    """Return the sentences of docstrings for which `wrong` is true, by folder."""
    found = {
        folder: [f"{file}: {one}" for file, one in sentences_there if wrong(one)]
        for folder, sentences_there in _sentences_of_code().items()
    }
    return {folder: those for folder, those in found.items() if those}


def _is_long(sentence: str) -> bool:
    return len(sentence.split()) > WORDS_MAX


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _found(find: Callable[[str], Iterable[str]]) -> dict[str, list[str]]:
    """For each page, return the items that `find` yields."""
    found = {_name(page): list(find(_text(page))) for page in PAGES}
    return {page: those for page, those in found.items() if those}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_sentences_open_with_their_subject() -> None:
    """No sentence of a page opens with Who, What, Of and similar words.

    A question as a heading may open in this way.
    """
    assert _found(lambda text: filter(_OPENING.match, sentences(text))) == {}


def test_sentences_have_at_most_thirty_words() -> None:
    """No sentence has more than thirty words. Code counts as one word."""
    assert _found(lambda text: filter(_is_long, sentences(text))) == {}


def test_docstrings_open_with_their_subject() -> None:
    """No sentence of a docstring opens with Who, What, Of and similar words."""
    assert _docstrings_that(_OPENING.match) == {}


def test_sentences_of_docstrings_have_at_most_thirty_words() -> None:
    """No sentence of a docstring has more than thirty words. Indented blocks are left out."""
    assert _docstrings_that(_is_long) == {}


def test_lines_of_prose_fit_into_120_columns() -> None:
    """No line of prose is wider than 120 columns. Tables and the targets of links may be wider."""
    assert _found(wide_lines) == {}


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_a_decision_has_its_headings_and_fits_on_a_page(record: Path) -> None:
    """The status and the date come first. Measurements belong in `docs/notes`."""
    text = _text(record)
    assert re.match(r"# \d+\. .+\n\nStatus: (?:accepted|superseded)\b[^#]*\b20\d\d-\d\d-\d\d", text)
    assert [one for one in re.findall(r"^## (.+)$", text, re.MULTILINE) if one in HEADINGS] == HEADINGS
    assert len(text.splitlines()) <= RECORD_LINES_MAX


def test_an_entry_of_the_changelog_has_at_most_two_lines() -> None:
    """Each entry is one change: something that users can do now, or a fault that no longer occurs."""
    entries = [lines for lines in paragraphs(_text(ROOT / "CHANGELOG.md")) if _ITEM.match(lines[0])]
    assert len(entries) > 50
    assert [lines[0] for lines in entries if len(lines) > ENTRY_LINES_MAX] == []


def test_every_note_belongs_to_a_decision() -> None:
    """A note's file has the name of its decision, and the decision links to the note."""
    for note in (ROOT / "docs" / "notes").glob("0*.md"):
        decision = ROOT / "docs" / "decisions" / note.name
        assert f"../notes/{note.name}" in _text(decision)
        assert f"../decisions/{note.name}" in _text(note)


def test_prose_is_told_from_code_and_tables() -> None:
    """`sentences` leaves out code and tables. The tests of openings and of sentence lengths need this."""
    page = "# What is it\n\nA. Of b?\n- What *c*.\n| Who |\n```\nOf d\n```\n**Who `e. Of f`.** [g](h. Of i)\n"
    assert list(sentences(page)) == ["A.", "Of b?", "What *c*.", "**Who `code`.", "[g]"]
    assert [bool(_OPENING.match(one)) for one in sentences(page)] == [False, True, True, True, False]
    assert list(wide_lines("| " + "a" * 200 + "\n" + "b" * 100 + " [c](" + "d" * 50 + ")\n" + "e" * 121)) == ["e" * 121]


def test_docstrings_are_told_from_other_strings() -> None:
    """`docstrings` also finds docstrings of attributes and methods. An indented block is not prose."""
    code = [
        '"""A.\n\n    Of b\n\nC ``d e``."""',
        'x = "f"\n"""G."""',
        'def h():\n    """I.\n\n        Of j\n\n    K.\n    """',
    ]
    assert [list(sentences(one)) for one in docstrings("\n".join(code))] == [["A.", "C `code`."], ["G."], ["I.", "K."]]
