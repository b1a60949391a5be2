"""Runs mypyc and a C compiler on a copy of the sources, in the working directory: a script of `build.py`'s."""

from __future__ import annotations

import sys
from typing import Final

FLAGS: Final = ("-ffp-contract=off", "-Wno-error")
"""Floats are rounded after each operation, as by Python. A warning of some compiler is no reason to do without it."""


def main(name: str, *files: str) -> None:
    """Compile `files`; what they share is in a library, `name` with an ending of mypyc's."""
    import setuptools  # noqa: PLC0415  (before mypyc, which asks for it; where nothing is compiled, neither is there)
    from mypyc.build import mypycify  # noqa: PLC0415  (as above)

    options = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent")
    extensions = mypycify([*options, *files], target_dir="c", group_name=name, debug_level="0")
    for extension in extensions:
        extension.extra_compile_args.extend(FLAGS)
    setuptools.setup(name=name, script_args=["-q", "build_ext", "--inplace"], ext_modules=extensions)


if __name__ == "__main__":
    main(*sys.argv[1:])
