"""Run the command: `python -m kvpipe`, for where no `kvpipe` is on the path."""

import sys

from kvpipe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
