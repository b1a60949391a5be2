"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kvpipe.config import markdown_table

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- config:begin (printed by `kvpipe config`; a test keeps it fresh) -->\n"
END = "<!-- config:end -->"


def test_the_readme_has_the_configuration_table() -> None:
    """The README's table is the one that the code prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == markdown_table()


def test_links_lead_somewhere() -> None:
    """Every relative link and every file named in the README and the docs exists."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"
        for named in re.findall(r"`((?:docs|connectors|tests|benchmarks|statemachine|kvpipe)/[\w./-]*)`", text):
            assert (ROOT / named).exists(), f"{page}: {named}"
