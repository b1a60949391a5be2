"""What hatchling does before it makes a wheel: compiles what `kvpipe.native` lists, if that can be done here."""

from __future__ import annotations

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Native(BuildHookInterface[Any]):
    """Makes a wheel for this platform, or, without a C compiler, one of sources alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the tree, and put what came of it into the wheel; an editable one finds it there."""
        sys.path.insert(0, self.root)
        from kvpipe import native  # noqa: PLC0415  (found here only)
        from kvpipe.native import build  # noqa: PLC0415

        if build.main() == 0 and version != "editable" and not native.off():
            there = native.folder()
            build_data["force_include"][str(there)] = str(there.relative_to(self.root))
            build_data["infer_tag"], build_data["pure_python"] = True, False
