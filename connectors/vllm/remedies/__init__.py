"""Remedies for faults of vLLM. The remedies are kept out of kvpipe's core, which is independent of the engine."""
