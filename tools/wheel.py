"""What hatchling does before it makes a wheel: compiles what `kvpipe.native` lists, if that can be done here."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Native(BuildHookInterface[Any]):
    """Makes a wheel for this platform, or, where nothing can be compiled, one of sources alone."""

    def dependencies(self) -> list[str]:
        """Return what it takes to compile; nothing where there is no C compiler."""
        native, build = self._kvpipe()
        return [] if native.off() or not build.compiler() else [f"mypy=={native.MYPY}", "setuptools>=65"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the tree, which may be read-only, and add that to the wheel; into it for an editable one."""
        native, build = self._kvpipe()
        if version == "editable":
            build.main()
            return
        if native.off():
            return
        self._made = Path(tempfile.mkdtemp(prefix="kvpipe-wheel-"))
        try:
            there = build.build(self._made / "made")
            name = native.folder().relative_to(Path(native.__file__).parents[2])
        except (build.BuildError, OSError) as error:
            self.app.display_warning(f"not compiled: Python runs the sources. {error}")
            return
        build_data["force_include"][str(there)] = str(name)
        build_data["infer_tag"], build_data["pure_python"] = True, False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it."""
        del version, build_data, artifact_path
        shutil.rmtree(getattr(self, "_made", ""), ignore_errors=True)

    def _kvpipe(self) -> tuple[Any, Any]:
        if self.root not in sys.path:
            sys.path.insert(0, self.root)
        from kvpipe import native  # noqa: PLC0415  (found here only)
        from kvpipe.native import build  # noqa: PLC0415  (as above)

        return native, build
