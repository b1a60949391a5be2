"""Runs the command as `python -m kvpipe`, which also works if no `kvpipe` is on the path."""

import sys

from kvpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
