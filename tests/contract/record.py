"""Records vLLM's connector contract and reports whether kvpipe fits it: `python -m tests.contract.record 0.34.0`.

The arguments are wheels, folders with the package, or versions (fetched with pip). Sources are parsed, never imported.
The command writes `tests/contract/records/vllm-X.Y.Z.json`, prints a verdict for every recorded version, and exits with
1 on a mismatch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tests.contract import judging
from tests.contract import sources as c
from tests.contract.fetch import FetchError, download


def record_wheel(wheel: Path) -> dict[str, Any]:
    """Record the contract in a wheel."""
    with zipfile.ZipFile(wheel) as archive:

        def read(path: str) -> str:
            return archive.read(path).decode()

        return c.record(c.package_version(read("vllm/_version.py")), read)


def record_source(source: str) -> dict[str, Any]:
    """Record the contract of a wheel, a folder or a version."""
    path = Path(source)
    if path.is_dir():
        version, read = c.folder_reader(path)
        return c.record(version, read)
    if path.suffix == ".whl":
        return record_wheel(path)
    with tempfile.TemporaryDirectory(prefix="kvpipe-contract-") as work:
        return record_wheel(download(source, Path(work)))


def verdict(contract: dict[str, Any]) -> list[str]:
    """Return the reasons why kvpipe does not work with the release.

    The result is empty if kvpipe works with the release.
    """
    found = judging.mismatches(contract, judging.connector_methods())
    if not judging.supports(contract["version"]):
        found.append("compat.SUPPORTED does not name it: add it once everything else fits and the tests pass")
    return found


def report(folder: Path) -> bool:
    """Print a verdict per recorded version, and the news of each version.

    Return True if kvpipe fits all recorded versions.
    """
    ok, before = True, None
    for version in c.recorded(folder):
        current = c.load(version, folder)
        found = verdict(current)
        ok = ok and not found
        print(f"vLLM {version}: {'fits' if not found else 'DOES NOT FIT'}")
        for line in found:
            print(f"  mismatch: {line}")
        for line in judging.news(current, before) if before is not None else ():
            print(f"  news: {line}")
        before = current
    return ok


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="*", help="wheels, folders or versions; none: only print the verdicts")
    parser.add_argument("--into", type=Path, default=c.RECORDS, help="folder of the records")
    arguments = parser.parse_args()
    folder: Path = arguments.into
    for source in arguments.sources:
        try:
            contract = record_source(source)
        except (FetchError, OSError, KeyError, ValueError) as e:
            print(f"{source}: {e}", file=sys.stderr)
            return 2
        folder.mkdir(exist_ok=True)
        (folder / f"vllm-{contract['version']}.json").write_text(c.dump(contract), encoding="utf-8")
    return 0 if report(folder) else 1


if __name__ == "__main__":
    sys.exit(main())
