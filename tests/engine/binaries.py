"""Lets a release of vLLM without compiled modules use the compiled modules of the installed release."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec
from pathlib import Path
from types import ModuleType


class _Binaries(MetaPathFinder):
    """Finds vLLM's compiled modules in every folder of `sys.path`. Python modules are not found in this way."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the location of a module if vLLM's own package lacks the module."""
        if fullname.rpartition(".")[0] != "vllm":
            return None
        loader = (ExtensionFileLoader, EXTENSION_SUFFIXES)
        found = (FileFinder(str(Path(folder, "vllm")), loader).find_spec(fullname) for folder in sys.path)
        return next(filter(None, found), None)


def lend(release: str) -> None:
    """Find compiled modules of vLLM in other folders of `sys.path` if its package has none.

    vLLM also queries the version of its distribution. This distribution is not installed, so the query returns the
    version of a CPU build.
    """
    sys.meta_path.append(_Binaries())
    installed = metadata.version

    def version(distribution_name: str) -> str:
        return f"{release}+cpu" if distribution_name == "vllm" else installed(distribution_name)

    metadata.version = version
