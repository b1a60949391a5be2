"""Run the command: `python -m kvpipe.cli`."""

import sys

from kvpipe.cli.main import main

sys.exit(main())
