"""The command runs wherever the package can be imported."""

from __future__ import annotations

import subprocess
import sys

from kvpipe import __version__


def test_the_package_runs_as_the_command() -> None:
    """`python -m kvpipe` has the same output and exit status as `kvpipe`."""
    run = [sys.executable, "-m", "kvpipe"]
    assert subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout == (
        f"kvpipe {__version__}\n"
    )
    wrong = subprocess.run([*run, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage: kvpipe ")
