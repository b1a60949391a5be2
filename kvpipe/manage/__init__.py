"""A running engine, for its operators: what it holds and does, over HTTP on a Unix socket or a port of this machine."""
