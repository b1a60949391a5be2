"""The only code that imports somebody else's engine. One folder per engine."""

if __name__ != "kvpipe.connectors":
    msg = f"import this package as 'kvpipe.connectors', not as {__name__!r}"
    raise ImportError(msg)
