"""`make release VERSION=…`: check the tree, tag it, build the packages and write the notes. Nothing is pushed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def notes(version: str) -> str:
    """Return the changelog's section of a version, or "" if the changelog has no such section."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""


def problems(version: str) -> list[str]:
    """Return the problems that prevent a release, each with its remedy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    held = project["project"]["version"]
    checks = {
        f"VERSION={version!r} is no version; write three numbers": re.fullmatch(r"\d+\.\d+\.\d+", version),
        "the tree has changes; commit them": not git("status", "--porcelain"),
        f"pyproject.toml has version {held}, not {version}; change one of them": held == version,
        f"CHANGELOG.md has no section '## [{version}] - DATE'; write it": notes(version),
        f"the tag v{version} is there; choose another version": not git("tag", "--list", f"v{version}"),
        "pyproject.toml has no URL of the repository; set tool.hatch.metadata.hooks.custom.repository": project["tool"][
            "hatch"
        ]["metadata"]["hooks"]["custom"]["repository"],
    }
    return [problem for problem, holds in checks.items() if not holds]


def main(version: str) -> int:
    """Make the release, or print its problems and return 1."""
    if found := problems(version):
        print("\n".join(f"release: {one}" for one in found), file=sys.stderr)
        return 1
    folder = ROOT / "dist" / version
    subprocess.run((sys.executable, "-m", "hatchling", "build", "-d", str(folder)), cwd=ROOT, check=True)
    (folder / "notes.md").write_text(notes(version) + "\n", encoding="utf-8")
    git("tag", "-a", f"v{version}", "-m", f"kvpipe {version}")
    print(f"release: v{version} is tagged, {folder} has the packages and notes.md. Test, then push the tag.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
