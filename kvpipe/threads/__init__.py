"""This package has kvpipe's own threads: the event loop, and the reader of adapters' files."""
