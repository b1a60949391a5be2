"""`make release`, run in a clone, refuses a tree that is not ready.

For a tree that is ready, it makes a tag, packages and notes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvpipe.testing.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


def test_release_is_refused_with_all_problems_at_once(tmp_path: Path) -> None:
    """A refusal names all problems at once. A release makes a tag, two packages and notes."""
    clone = tmp_path / "clone"

    def run(*words: object, ok: bool = True) -> str:
        done = subprocess.run(
            [*map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    git = ("git", "-C", clone)
    run("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", clone)
    for key, name in (("user.name", "t"), ("user.email", "t@example.org")):
        run(*git, "config", key, name)
    for name in ("tools/release.py", "tools/package_metadata.py", "pyproject.toml", "CHANGELOG.md"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    release = (sys.executable, clone / "tools" / "release.py")
    said = run(*release, "9.9.9", ok=False)
    assert "has no URL" in said
    assert "CHANGELOG.md has no section '## [9.9.9] - DATE'; write it" in said
    project = clone / "pyproject.toml"
    text = project.read_text(encoding="utf-8").replace('version = "0.1.0"', 'version = "9.9.9"', 1)
    project.write_text(text.replace('repository = ""', 'repository = "https://example.org/kvpipe"'), encoding="utf-8")
    with (clone / "CHANGELOG.md").open("a", encoding="utf-8") as file:
        file.write("\n## [9.9.9] - 2030-01-02\n\n- New.\n")
    assert run(*release, "9.9.9", ok=False) == "release: the tree has changes; commit them\n"
    run(*git, "commit", "-qam", "Release")
    assert "v9.9.9 is tagged" in run(*release, "9.9.9")
    made = clone / "dist" / "9.9.9"
    assert (made / "notes.md").read_text(encoding="utf-8") == "- New.\n"
    assert len(list(made.glob("kvpipe-9.9.9*"))) == 2
    assert run(*git, "tag", "--list") == "v9.9.9\n"
    assert "the tag v9.9.9 is there" in run(*release, "9.9.9", ok=False)
