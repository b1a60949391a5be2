"""kvpipe's KV connector for vLLM. The class in `connector.py` calls `kvpipe.scheduler` and `kvpipe.worker`."""
