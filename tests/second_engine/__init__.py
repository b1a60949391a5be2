"""A small inference engine that is not vLLM and reuses KV through kvpipe: the proof that the core is neutral."""
