"""The explicit state machines of kvpipe are pure tables, without I/O, clocks or tensors.

`core.py` describes the notation. Each other file has one machine. `diagram.py` lists all machines and draws them.
"""

if __name__ != "kvpipe.statemachine":
    # The folder is at the top of the repository and is packaged as `kvpipe.statemachine`. If the folder were imported
    # under another name, its classes would exist twice. The name `statemachine` belongs to another package,
    # python-statemachine.
    msg = f"import this package as 'kvpipe.statemachine', not as {__name__!r}"
    raise ImportError(msg)
