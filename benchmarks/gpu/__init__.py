"""Benchmarks that need a GPU: the data plane alone, and whole engines."""
