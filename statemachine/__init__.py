"""The explicit state machines of kvpipe: pure tables, no I/O, no clock, no tensors.

Read `core.py` for the notation, then one file per machine. `diagram.py` lists them all and draws them.
"""

if __name__ != "kvpipe.statemachine":
    # The folder sits at the top of the repository and is packaged as `kvpipe.statemachine`. Imported under
    # another name its classes would exist twice, and python-statemachine owns the top-level name.
    msg = f"import this package as 'kvpipe.statemachine', not as {__name__!r}"
    raise ImportError(msg)
