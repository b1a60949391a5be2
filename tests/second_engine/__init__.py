"""A small inference engine that is not vLLM and reuses KV through kvpipe.

It proves that the core depends on no engine.
"""
