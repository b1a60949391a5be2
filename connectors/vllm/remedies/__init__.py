"""Remedies for faults of vLLM. They are kept out of kvpipe's core, which is independent of the engine."""
