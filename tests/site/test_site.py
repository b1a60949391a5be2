"""The site builds from what is here, and does not from pages that promise what is not there."""

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
    """Pages, reference, pictures and a search index, without a warning; machines are drawn, docstrings are there."""
    subprocess.run([sys.executable, "tools/docs_pages.py"], check=True, cwd=ROOT)
    done = _build(ROOT / "docs", tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0
    assert "Search.setIndex(" in (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    machine = (tmp_path / "machines" / "request.html").read_text(encoding="utf-8")
    assert "<svg" in machine
    assert "PREEMPTED</text>" in machine
    policies = (tmp_path / "generated" / "kvpipe.cache.policy.html").read_text(encoding="utf-8")
    assert "Evicts from the chain that promises the fewest hits" in policies
    reference = (tmp_path / "generated" / "kvpipe.cache.html").read_text(encoding="utf-8")
    assert 'id="kvpipe.cache.catalog.Catalog"' in reference
    for picture in ("timeline", "host", "tier_redis"):
        assert any((tmp_path / "_images").glob(f"{picture}.svg"))
    assert "preempted" in (tmp_path / "_static" / "timeline.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[there](nowhere.md)", "nowhere.md"),
        ("[there](index.md#no-such-heading)", "no-such-heading"),
        ("![picture](nothing.svg)", "nothing.svg"),
        ("`kvpipe/nowhere.py`", "there is no file kvpipe/nowhere.py"),
        ("`kvpipe.cache.catalog.Nothing`", "there is no kvpipe.cache.catalog.Nothing"),
    ],
)
def test_what_is_not_there_fails_the_build(text: str, warning: str, tmp_path: Path) -> None:
    """A broken link, a heading, a picture, a file or a name that the repository does not have."""
    (tmp_path / "index.md").write_text(f"# Page\n\n`kvpipe/cache/catalog.py`, {text}\n", encoding="utf-8")
    options = ("-c", str(ROOT / "docs"), "-D", "html_static_path=", "-D", "html_extra_path=")
    done = _build(tmp_path, tmp_path / "out", *options)
    assert done.returncode == 1
    assert warning in done.stderr
    assert "catalog.py" not in done.stderr.replace(warning, "")
