"""A small inference engine that is not vLLM and reuses KV through kvpipe.

This engine proves that kvpipe's core depends on no engine.
"""
