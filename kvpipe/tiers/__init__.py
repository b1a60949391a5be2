"""Places beyond host memory that keep chunks: the protocol, its use by an engine, and a folder for each kind."""
