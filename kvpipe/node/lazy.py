"""Imports numpy in the background. A holder needs numpy only to search its memory for slots of a second size.

An import from a slow disk may take seconds. Engines kill a holder whose clock stands still for that long.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Final

from kvpipe.node.clients import RefusedError

_log = logging.getLogger("kvpipe.node")


class LazyNumpy:
    """The import of numpy. After a failed import, this process makes no second attempt."""

    def __init__(self) -> None:
        """Import nothing yet."""
        self._thread: threading.Thread | None = None
        self._imported = threading.Event()
        self._why = "numpy is being imported"

    def is_there(self) -> bool:
        """Return whether numpy is imported. The first call starts the import."""
        if self._thread is None:
            if "numpy" in sys.modules:  # imported by other code of this process
                return True
            self._thread = threading.Thread(target=self._main, name="kvpipe-node-numpy", daemon=True)
            self._thread.start()
        return self._imported.is_set()

    def require(self) -> None:
        """Start the import if it has not begun. Raises RefusedError if numpy is not there yet."""
        if not self.is_there():
            raise RefusedError(f"the holder cannot give slots of a second size yet: {self._why}", again=True)

    def _main(self) -> None:
        try:
            import numpy as np  # noqa: F401, PLC0415
        except (ImportError, OSError) as error:
            self._why = f"{type(error).__name__}: {error}"
            _log.warning("numpy cannot be imported, so slots keep their sizes: %s", self._why)
        else:
            self._imported.set()


NUMPY: Final = LazyNumpy()
