"""Makes virtual environments with packages of kvpipe. A test runs these packages there as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from kvpipe.testing.waiting import WAIT_S

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path, ok: bool = True) -> str:
    """Return what a command prints.

    The command's environment has no variable that names this tree or configures kvpipe.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVPIPE", "VIRTUAL"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=5 * WAIT_S, check=False)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment(folder: Path, *packages: Path) -> Path:
    """Make the virtual environment `folder`, install sdists or wheels into it, and return its folder of packages.

    Torch, vLLM and other dependencies come from the environment that runs the tests, which is last on the path.
    That environment also has an editable kvpipe, which is not used: its `.pth` file has no effect, because Python reads
    such files only in the new environment's own folder. The network is not used.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site,) = (folder / "lib").glob("python*/site-packages")
    dependencies = site / "dependencies.pth"
    dependencies.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    run(*PIP, "--python", folder / "bin" / "python", *install, *packages, cwd=folder)
    return site
