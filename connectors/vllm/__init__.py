"""vLLM's KV connector: vLLM loads the class in `connector.py`, which calls `kvpipe.scheduler` and `kvpipe.worker`."""
