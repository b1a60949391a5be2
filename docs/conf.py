"""The site: Sphinx reads the Markdown pages of this folder and the docstrings of the code. `make docs` builds it.

Any warning fails the build: a broken link, a missing picture, a name or a file that the code does not have.
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx import addnodes
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.domains.python import PythonDomain
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import docs_pictures  # noqa: E402  (beside, in tools/)
import fastapi  # noqa: E402, F401  (before autodoc imports modules again: its models are of one pydantic)

project = "kvpipe"
author = "the kvpipe authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "kvpipe"
html_copy_source = False
html_show_copyright = False
root_doc = "index"
exclude_patterns: list[str] = []
html_extra_path = ["grafana.json"]
html_static_path = ["generated/static"]
suppress_warnings = ["ref.python"]  # Sphinx would take `bytes` in a signature for attributes of that name

myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
default_role = "code"
highlight_language = "none"

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

_log = logging.getLogger("kvpipe")
_PATH = re.compile(r"(?:docs|connectors|tests|property_tests|benchmarks|statemachine|kvpipe|tools)/[\w./-]*")
_NAME = re.compile(r"kvpipe(?:\.\w+)+")
_CODE = re.compile(r"``.*?``|`[^`]*`(?=(\w)?)", re.DOTALL)
_GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


class Mermaid(Directive):
    """A state diagram in mermaid. GitHub draws it itself; on the site `tools/docs_pictures.py` draws it."""

    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        """Return the picture, within the page, so that it has the page's colours."""
        return [nodes.raw("", docs_pictures.machine(list(self.content)), format="html")]


def _is_there(name: str) -> bool:
    """Whether the dotted `name` is a module of this repository, or is defined in one. Nothing is imported."""
    folder, *parts = ROOT / "kvpipe", *name.split(".")[1:]
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return True
    file = folder / f"{parts[0]}.py"
    if file.exists():
        parts.pop(0)
    text = (file if file.exists() else folder / "__init__.py").read_text(encoding="utf-8")
    return all(
        re.search(rf"^\s*(?:class |def |async def |from .* import .*)?{part}\b", text, re.MULTILINE) for part in parts
    )


def read_as_markdown(_: Sphinx, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """Let docstrings use Markdown: `Job`s needs no space before the s, and an indented example no second colon."""
    text = _CODE.sub(lambda code: code[0] + ("\\ " if code[1] else ""), "\n".join(lines))
    lines[:] = re.sub(r"(?<!:):(\n\n +\S)", r"::\1", text).split("\n")


def check_names(_: Sphinx, tree: nodes.document) -> None:
    """Warn about every path and dotted name in code font that the repository does not have."""
    for literal in tree.findall(nodes.literal):
        text = literal.astext()
        if _PATH.fullmatch(text) and not (ROOT / text).exists():
            _log.warning("there is no file %s", text, location=literal)
        if _NAME.fullmatch(text) and text not in _GROUPS and not _is_there(text):
            _log.warning("there is no %s", text, location=literal)


@functools.cache
def _titles(env: BuildEnvironment) -> dict[str, nodes.Element]:
    """Return the table of contents of each page, with its titles and lists of pages, without sections and objects."""
    found = {}
    for page, contents in env.tocs.items():
        found[page] = kept = contents.copy()
        for item in contents.children:
            kept += (title := item.copy())
            title += [part.deepcopy() for part in item.children[:1]]
            if pages := [part.copy() for part in item.findall(addnodes.toctree)] if item.children[1:] else []:
                title += nodes.bullet_list("", *pages)
    return found


def navigate_by_titles(app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Let the theme copy only titles for the navigation of a page.

    Otherwise Sphinx copies the sections and objects of all pages for each page, and then drops them.
    """
    navigation = context["toctree"]

    def by_titles(**options: Any) -> str:  # noqa: ANN401  (Sphinx's own)
        assert options["titles_only"]  # noqa: S101
        with patch.object(app.env, "tocs", _titles(app.env)):
            return navigation(**options)

    context["toctree"] = by_titles


def search_once(domain: PythonDomain) -> None:
    """Let Sphinx search all objects once for each name, and not at all for a name that no object ends with.

    A signature names types such as `int`. For each of them Sphinx would search all objects three times.
    """
    search = domain.find_obj

    @functools.cache
    def ends() -> frozenset[str]:
        return frozenset(name.rpartition(".")[2] for name in domain.objects)

    @functools.cache
    def find(
        env: BuildEnvironment, module: str, owner: str, name: str, kind: str | None, mode: int = 0
    ) -> list[tuple[str, Any]]:
        found = name.removesuffix("()").rpartition(".")[2] in ends()
        return search(env, module, owner, name, kind, mode) if found else []

    domain.find_obj = find  # type: ignore[method-assign]


def setup(app: Sphinx) -> None:
    """Register the parsers and checks with Sphinx, which calls this function."""
    app.add_directive("mermaid", Mermaid)
    app.connect("autodoc-process-docstring", read_as_markdown)
    app.connect("doctree-read", check_names)
    app.connect("env-updated", lambda _, env: search_once(env.get_domain("py")))  # all objects are known then
    app.connect("html-page-context", navigate_by_titles, priority=400)  # this handler runs before the theme's own
