"""Connectors, the only code that imports an inference engine. Each engine has one folder."""

if __name__ != "kvpipe.connectors":
    msg = f"import this package as 'kvpipe.connectors', not as {__name__!r}"
    raise ImportError(msg)
