"""vLLM's KV connector: `connector.py` is the class vLLM loads, with its two sides in `scheduler.py` and `worker.py`."""
