"""The site builds from this repository's pages. A page with a reference to a missing thing makes the build fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _build(source: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run Sphinx as `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", *more]
    return subprocess.run([*command, str(source), str(out)], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """The site has pages, reference, pictures and a search index, without a warning.

    It has drawn machines and docstrings.
    """
    subprocess.run([sys.executable, "tools/docs_pages.py"], check=True, cwd=ROOT)
    done = _build(ROOT / "docs", tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "Search.setIndex(" in (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    machine = (tmp_path / "machines" / "request.html").read_text(encoding="utf-8")
    assert "<svg" in machine
    assert "PREEMPTED</text>" in machine
    policies = (tmp_path / "generated" / "kvpipe.cache.policy.html").read_text(encoding="utf-8")
    assert 'id="kvpipe.cache.policy.sessions.Sessions"' in policies
    reference = (tmp_path / "generated" / "kvpipe.cache.html").read_text(encoding="utf-8")
    assert 'id="kvpipe.cache.catalog.Catalog"' in reference
    for picture in ("timeline", "host", "tier_redis"):
        assert any((tmp_path / "_images").glob(f"{picture}.svg"))
    assert "preempted" in (tmp_path / "_static" / "timeline.html").read_text(encoding="utf-8")


ABSENT = {
    "page": ("[there](nowhere.md)", "nowhere.md"),
    "heading": ("[there](index.md#no-such-heading)", "no-such-heading"),
    "picture": ("![picture](nothing.svg)", "nothing.svg"),
    "file": ("`kvpipe/nowhere.py`", "there is no file kvpipe/nowhere.py"),
    "name": ("`kvpipe.cache.catalog.Nothing`", "there is no kvpipe.cache.catalog.Nothing"),
}
"""For each kind of thing that a page can name: a reference to a missing thing, and the warning."""


def test_broken_reference_fails_the_build(tmp_path: Path) -> None:
    """A broken link, heading, picture, file or name gives one warning, and any warning fails the build."""
    index = "# Index\n\n```{toctree}\n" + "\n".join(ABSENT) + "\n```\n"
    (tmp_path / "index.md").write_text(index, encoding="utf-8")
    for page, (text, _) in ABSENT.items():
        lines = f"# Page\n\n`kvpipe/cache/catalog.py`, {text}\n"
        (tmp_path / f"{page}.md").write_text(lines, encoding="utf-8")
    options = ("-c", str(ROOT / "docs"), "-D", "html_static_path=", "-D", "html_extra_path=")
    done = _build(tmp_path, tmp_path / "out", *options)
    assert done.returncode == 1
    found = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(found) == len(ABSENT), done.stderr
    for page, (_, warning) in ABSENT.items():
        (line,) = (one for one in found if f"{tmp_path / page}.md" in one)
        assert warning in line
        assert "catalog.py" not in line.replace(warning, "")
