"""The last import of the process that tests fork, so that no fork searches imported modules for garbage.

VLLM searches all objects several times when a process starts and ends. Most of these objects are modules, which never
become garbage. After a fork each search also copies their memory. A forked process ends soon, so it needs no search but
Python's own.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
for _name in ("collect", "freeze", "unfreeze"):
    setattr(gc, _name, lambda *_, **__: 0)
