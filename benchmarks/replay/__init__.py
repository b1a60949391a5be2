"""Replays real traces in virtual time against kvpipe's own catalog, policies and scheduler side. No engine runs."""
